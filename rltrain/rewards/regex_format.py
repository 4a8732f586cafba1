"""1 where a response has the form that a regular expression describes."""

import functools
import re

_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def regex_format(prompt: str, response: str, *, pattern: str, full: bool = True, flags: str = "") -> float:
    """Match the response with a pattern of Python's `re`.

    A pattern with one repetition inside another, as `(a+)+`, can take forever on some texts: the time limit of a call
    then ends it, and the sample is failed.

    Args:
        prompt: not looked at.
        response: the model's text.
        pattern: the regular expression.
        full: it has to match from the first character to the last; else anywhere.
        flags: of a (ASCII), i (any case), m (^ and $ at lines), s (a dot is also a line end), x (verbose).

    Returns:
        1.0 if it matches, else 0.0.

    Raises:
        ValueError: the pattern or a flag is not one of Python's.
    """
    compiled = _compiled(pattern, flags)
    return float(bool(compiled.fullmatch(response) if full else compiled.search(response)))


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str, flags: str) -> re.Pattern[str]:
    unknown = [letter for letter in flags if letter not in _FLAGS]
    if unknown:
        raise ValueError(f"flags={flags!r}: {unknown[0]!r} is no flag; use letters of {''.join(_FLAGS)}")
    try:
        return re.compile(pattern, sum(_FLAGS[letter] for letter in set(flags)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern={pattern[:200]!r} is no regular expression: {error}; write it as for re") from None
