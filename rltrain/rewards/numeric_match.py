"""Reward for numeric answers: 1 if the last number in a response equals the answer."""

import math
import re
from collections import deque

from rltrain.rewards.boxed import last_boxed

# The regular expressions of `numeric_match` cannot backtrack for long, because each repetition is bounded or is
# followed by characters that the repetition cannot match.
_DIGITS = r"(?:\d{1,3}(?:[,\u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z_\d^])(?<![_^]\{{)(?<![_^]-)                        # not a part of a name, an index or an exponent
    (?P<sign>(?<![\w.)\]}}])[-+\u2212])? \ ? (?:\\?[$€£¥])?        # a sign after a digit or a bracket is an operator
    (?:
      (?:(?P<whole>\d{{1,9}})\ ?)? \\[dt]?frac\ ?\{{(?P<over>-?\d{{1,300}})\}}\ ?\{{(?P<under>\d{{1,300}})\}}
      | (?:(?P<whole2>\d{{1,9}})\ )? (?P<over2>\d{{1,300}})\ ?/\ ?(?P<under2>\d{{1,300}})(?![\d.])
      | (?P<decimal>{_DIGITS})
        (?:[eE](?P<exponent>[-+]?\d{{1,9}})(?!\d) | \ ?(?:\\times|\\cdot|×|\*)\ ?10\^(?:\{{(?P<power>[-+]?\d{{1,9}})\}}
          | (?P<power2>[-+]?\d{{1,9}})))?
    )
    (?P<percent>\ ?\\?%)?
    """,
    re.VERBOSE,
)
_GROUPING = re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|\\!,)(?=\d{3})")
_SHORT_FRACTION = re.compile(r"frac\ ?(\d)\ ?(\d)")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s?\{[^{}]{0,99}\}(?:\s?\^\s?(?:\d|\{\s?\d\s?\}))?")
_DIGIT = re.compile(r"\d")
# `_last` looks for the last digit of a response backwards, in steps of 400 characters. The steps have 400
# characters because almost every number is shorter than 400 characters.
_NEAR = 400


def numeric_match(
    prompt: str,
    response: str,
    *,
    answer: str | float | None,
    marker: str | None = None,
    answer_marker: str | None = None,
    rel_tol: float = 1e-9,
    abs_tol: float = 0.0,
) -> float | None:
    r"""Compare the last number in the response with the answer.

    If the response has a `\boxed{...}`, the last number inside the last box is used. With a `marker`, only the text
    after the marker's last occurrence is searched, and the first number of that text is used if the text has no
    `\boxed{...}`.

    Supported notations are 1,234 and 1{,}234, +5, -5, $5, .5, 1e-3, 1.5 \times 10^{3}, 3/4, \frac{3}{4}, 1 1/2, and 50%
    (one half). If the number in the response has a percent sign and the right number has none, or vice versa, a
    percentage such as 50% equals both one half and 50. Digits in names (x2), indices and exponents (m^2) are not read
    as numbers.

    The number in the response and the right number are compared as floats. For integers of more than eight digits, set
    `rel_tol=0` or use `exact_match`.

    Args:
        prompt: unused.
        response: the model's text.
        answer: the right number, or a text that contains exactly one number. If the answer contains `answer_marker`,
            only the part after `answer_marker` is read.
        marker: the text before the number in the response and in the answer, for example "####"; None for no marker.
        answer_marker: the text before the number in the answer, such as "####" in GSM8K's solutions; None if the answer
            has the same marker as the response.
        rel_tol: two numbers count as equal if they differ by at most `rel_tol` times the larger absolute value.
        abs_tol: two numbers count as equal if they differ by at most `abs_tol`, even if the difference exceeds
            `rel_tol`.

    Returns:
        1.0 if the number in the response equals the right number, else 0.0; None if `answer` is None. A response gets
        0.0 if it contains no number, or if a `marker` is given and the response does not contain the marker.

    Raises:
        ValueError: the answer does not contain exactly one number, or a tolerance is negative.
    """
    if rel_tol < 0 or abs_tol < 0:
        raise ValueError(f"rel_tol={rel_tol} and abs_tol={abs_tol} must be >= 0; use 0 for no tolerance")
    if answer is None:
        return None
    right, right_is_percent = _only_number(answer, answer_marker or marker)
    found = _stated(response, marker)
    if found is None:
        return 0.0
    value, is_percent = found
    candidates = [value]
    if is_percent != right_is_percent:
        candidates.append(value * 100 if is_percent else value / 100)
    same = any(math.isclose(v, right, rel_tol=rel_tol, abs_tol=abs_tol) for v in candidates)
    return float(same and math.isfinite(value))


def _stated(response: str, marker: str | None) -> tuple[float, bool] | None:
    """Return the number that the response states and whether it is a percentage, or None if there is no number."""
    if marker is not None:
        _, there, response = response.rpartition(marker)
        if not there:
            return None
    box = last_boxed(response)
    if box is not None:
        return _read(_last(_UNIT.sub(" ", box)))
    return _read(_NUMBER.search(_tidy(response[: 10 * _NEAR])) if marker is not None else _last(response))


def _last(text: str) -> re.Match[str] | None:
    """Return the regular-expression match of the last number in the text.

    To save time, `_last` first searches only the text around the last digit.
    """
    text = _tidy(text)
    end = len(text)
    while end > _NEAR and not _DIGIT.search(text, end - _NEAR, end):
        end -= _NEAR
    edge = max(0, end - 2 * _NEAR)
    if not _DIGIT.search(text, edge, end):
        return None
    last = _last_match(text, edge, end + _NEAR)
    # If no match was found, or if the match begins close to `edge`, the last number may begin before `edge`, so the
    # text is searched again from its start.
    if edge and (last is None or last.start() < edge + _NEAR):
        return _last_match(text, 0, len(text))
    return last


def _last_match(text: str, start: int, end: int) -> re.Match[str] | None:
    return next(iter(deque(_NUMBER.finditer(text, start, end), maxlen=1)), None)


def _tidy(text: str) -> str:
    r"""Rewrite LaTeX's 1{,}000 and \frac12 as 1,000 and \frac{1}{2}."""
    if "\\" not in text and "{,}" not in text:
        return text
    return _SHORT_FRACTION.sub(r"frac{\1}{\2}", _GROUPING.sub(",", text))


def _only_number(answer: str | float, marker: str | None) -> tuple[float, bool]:
    """Return the number in the answer, and whether the number is a percentage.

    An answer with several numbers raises ValueError, because choosing one of the numbers could silently misread the
    data.
    """
    text = str(answer)
    if marker is not None and marker in text:
        text = text.rpartition(marker)[2]
    box = last_boxed(text)
    numbers = list(_NUMBER.finditer(_tidy(_UNIT.sub(" ", text if box is None else box))))
    found = _read(numbers[0]) if len(numbers) == 1 else None
    if found is None or not math.isfinite(found[0]):
        raise ValueError(
            f"answer {str(answer)[:80]!r} must hold exactly one number, but {len(numbers)} were found; use "
            "math_answer or exact_match for other answers, or set answer_marker to the text before the number, such "
            "as ####"
        )
    return found


def _read(match: re.Match[str] | None) -> tuple[float, bool] | None:
    """Return the number that a regular-expression match stands for, and whether the number is a percentage.

    A percentage is divided by 100, so that 50% gives 0.5. A fraction with denominator zero gives NaN.
    """
    if match is None:
        return None
    part = match.groupdict()
    under = part["under"] or part["under2"]
    if under is not None:
        over, below = float(part["over"] or part["over2"]), float(under)
        value = float(part["whole"] or part["whole2"] or 0) + (over / below if below else math.nan)
    else:
        digits = re.sub("[,\u00a0\u2009\u202f]", "", part["decimal"])
        value = float(f"{digits}e{part['exponent'] or part['power'] or part['power2'] or 0}")
    if part["sign"] in ("-", "\u2212"):
        value = -value
    return (value / 100, True) if part["percent"] else (value, False)
