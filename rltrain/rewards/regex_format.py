"""Reward for format: 1 if a response matches a regular expression."""

import functools
import re

_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def regex_format(prompt: str, response: str, *, pattern: str, full: bool = True, flags: str = "") -> float:
    """Return 1 if the response matches a pattern of Python's `re`, else 0.

    A pattern with nested repetitions, such as `(a+)+`, can take exponential time on some texts. A match that takes too
    long is ended by the time limit of a reward call, and the sample counts as failed.

    Args:
        prompt: unused.
        response: the model's text.
        pattern: the regular expression.
        full: if True, the pattern must match the whole response; if False, the pattern may match any part of the
            response.
        flags: any letters of a (ASCII), i (ignore case), m (^ and $ match at every line), s (a dot also matches a line
            break) and x (verbose).

    Returns:
        1.0 if the regular expression matches the response, else 0.0.

    Raises:
        ValueError: the pattern is not a valid regular expression, or a flag is unknown.
    """
    compiled = _compiled(pattern, flags)
    return float(bool(compiled.fullmatch(response) if full else compiled.search(response)))


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str, flags: str) -> re.Pattern[str]:
    unknown = [letter for letter in flags if letter not in _FLAGS]
    if unknown:
        raise ValueError(f"flags={flags!r}: {unknown[0]!r} is not a flag; use letters from {''.join(_FLAGS)}")
    try:
        return re.compile(pattern, sum(_FLAGS[letter] for letter in set(flags)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"pattern={pattern[:200]!r} is not a valid regular expression: {error}; use the syntax of Python's module "
            "re"
        ) from None
