"""Keys and tokens are kept out of what a run writes: configs, messages, logs.

A program gets its secrets from its environment; so a value is one if a variable with a telling name holds it, or if it
looks like a key of the kinds that services give out.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rltrain.errors import ConfigError

_TELLING = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_NO_SECRET = re.compile(r"_(PATH|FILE|DIR|MODE|ENV)$|^TOKENIZERS_", re.IGNORECASE)
_SHORTEST = 8  # characters: TOKENS=all is a setting
# OpenAI and its like, GitHub, Hugging Face, GitLab, Slack, AWS, Google, JSON web tokens.
_LOOKS_LIKE_ONE = re.compile(
    r"\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_OPTION = re.compile(r"(?:^|_)(?:api_?key|secret|secret_key|password|passwd|(?:access|auth|bearer|api)_token)$", re.I)
HIDDEN = "[hidden]"


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with [hidden] in the place of every secret."""
    for value in sorted(_values(environment), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _LOOKS_LIKE_ONE.sub(HIDDEN, text)


def refuse_secrets(values: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where a resolved config holds a secret: it is written to config.yaml, and shown."""
    known = _values(environment)
    for key, value in _leaves(values, ""):
        name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
        if _LOOKS_LIKE_ONE.search(value) or (_OPTION.search(name) and value) or any(one in value for one in known):
            raise ConfigError(
                f"{redacted(key, environment)}: holds a key, token or password, which config.yaml and logs would show "
                "to others; put it into an environment variable, and give the variable's name instead, as in "
                "api_key_env=NAME"
            )


def _values(environment: Mapping[str, str]) -> set[str]:
    return {
        value
        for name, value in environment.items()
        if len(value) >= _SHORTEST and _TELLING.search(name) and not _NO_SECRET.search(name)
    }


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key, text) of every text in nested mappings and lists."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{number}]")
    elif isinstance(value, str):
        yield key, value
