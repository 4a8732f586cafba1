"""Keeps API keys and tokens out of the configs, messages and logs that a run writes.

A program usually receives secrets, such as API keys, through environment variables. A value counts as a secret if the
name of its environment variable contains a word such as KEY or TOKEN, or if the value looks like an API key of a
well-known service.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import quote

_TELLING = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_NO_SECRET = re.compile(r"_(PATH|FILE|DIR|MODE|ENV)$|^TOKENIZERS_", re.IGNORECASE)
# A value with fewer than 8 characters counts as a setting and not as a secret, for example the value of TOKENS=all.
_SHORTEST = 8
_SHORTEST_LINE = 16  # A single line of a multi-line secret is hidden only if the line has at least 16 characters.
_PEM = r"-----{} ?[A-Z0-9 ]*PRIVATE ?KEY ?(?:BLOCK)?-----"
# Matches JSON web tokens, private keys in PEM form, and the API keys of OpenAI and similar services, GitHub, Hugging
# Face, GitLab, Slack, AWS and Google. If the end marker of a private key is missing, the pattern matches everything
# after the start marker.
_LOOKS_LIKE_ONE = (
    r"\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
    rf"|{_PEM.format('BEGIN')}(?s:.*?)(?:{_PEM.format('END')}|\Z)"
)
_OPTION = re.compile(r"(?:^|_)(?:api_?key|secret|secret_key|password|passwd|(?:access|auth|bearer|api)_token)$", re.I)
# repr() and JSON escape a backslash, and nested escapes multiply the backslashes, so `_BACKSLASHES` matches any number
# of backslashes. The quantifier in `_BACKSLASHES` is possessive, and a match cannot start between two backslashes, so
# that matching a text of only backslashes takes linear time.
_BACKSLASHES = r"(?<!\\)\\++"
_LINE_BREAK = rf"{_BACKSLASHES}(?:[nr]|x0[ad]|u000[ad])"
_GAP = rf"(?:\s|{_LINE_BREAK}|{_BACKSLASHES}[tvf]|%20|%0[9adAD])*"
_LINES = re.compile(rf"[\n\r]|{_LINE_BREAK}")
HIDDEN = "[hidden]"


def redacted(text: str, environment: Mapping[str, str] = os.environ, *, keys: Collection[str] = ()) -> str:
    """Return `text` with every secret replaced by `[hidden]`.

    A secret is found even if its whitespace is changed, escaped or removed, or if other characters of the secret are
    escaped as in repr(), JSON or a URL. Each long line of a multi-line secret is hidden even where the line occurs
    without the other lines of the secret.

    Args:
        text: text that may contain secrets and is about to be shown or written. Shorten the text only after the call of
            `redacted`, because a truncated secret is not recognized.
        environment: environment variables. The value of an environment variable counts as a secret if the variable's
            name indicates a secret.
        keys: secrets to hide in addition to the secrets in `environment`. A secret in `keys` may have any length.
    """
    return _pattern(frozenset({*_values(environment), *keys})).sub(HIDDEN, text)


def secret_in(values: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the dotted key of the first secret in nested mappings and lists; None if there is no secret.

    If the dotted key itself contains a secret, `secret_in` returns the key with `[hidden]` in place of the secret.
    """
    for key, value in _leaves(values, ""):
        name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
        if (_OPTION.search(name) and value) or redacted(value, environment) != value:
            return redacted(key, environment)
    return None


class RedactingFormatter(logging.Formatter):
    """Log formatter that hides secrets in records, including tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted text of a log record without secrets."""
        return redacted(super().format(record))


def hide_in_logs() -> None:
    """Hide secrets in the warnings and errors of all loggers for which no handler is configured."""
    if logging.lastResort:
        logging.lastResort.setFormatter(RedactingFormatter())


def _values(environment: Mapping[str, str]) -> set[str]:
    return {
        value
        for name, value in environment.items()
        if len(value.strip()) >= _SHORTEST and _TELLING.search(name) and not _NO_SECRET.search(name)
    }


@functools.lru_cache(maxsize=8)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    """Return a regular expression that matches all secrets, the long lines of each secret, and well-known forms of
    keys.
    """
    lines = {line.strip() for secret in secrets for line in _LINES.split(secret)}
    wanted = {*secrets, *(line for line in lines if len(line) >= _SHORTEST_LINE)}
    spelled = map(_any_spelling, sorted(wanted, key=len, reverse=True))
    return re.compile("|".join([*filter(None, spelled), _LOOKS_LIKE_ONE]))


def _any_spelling(secret: str) -> str:
    """Return a regular expression that matches a secret in any spelling of its whitespace and special characters."""
    words = re.split(rf"(?:\s|{_LINE_BREAK})+", secret)
    return _GAP.join("".join(map(_spellings, re.sub(r"\\+", r"\\", word))) for word in words if word)


@functools.lru_cache(maxsize=1024)
def _spellings(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    quoted = quote(character, safe="", errors="surrogatepass")
    if character == "\\":
        return rf"(?:{_BACKSLASHES}|(?i:{quoted}))"
    spelled = {character.encode("unicode_escape").decode(), json.dumps(character)[1:-1]}
    escapes = "|".join(re.escape(one[1:]) for one in sorted(spelled) if one[0] == "\\")
    plain = rf"{re.escape(character)}{f'|(?i:{escapes})' if escapes else ''}"
    return rf"(?:(?:{_BACKSLASHES})?(?:{plain})|(?i:{quoted}))"


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in nested mappings and lists."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{number}]")
    elif isinstance(value, str):
        yield key, value
