"""Reward for mathematical answers: 1 if the response's answer and the right answer are mathematically equal."""

import functools
import logging
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from rltrain.rewards.boxed import last_boxed

# If a response has no `\boxed{...}`, only its last `_TAIL` characters are searched for an answer.
_TAIL = 1000
# Largest length of an expression that is evaluated, in characters.
_LONGEST = 500
# Largest nesting depth of brackets in an expression; each level can double the parsing time.
_DEEPEST = 10
_HUGE = re.compile(
    # The first part of the regular expression `_HUGE` matches a power in an exponent.
    r"(?:\^|\*\*)[\s{(\[\d]{0,40}(?:\^|\*\*)"
    # The second part of the regular expression `_HUGE` matches a large exponent, a large factorial or a large binomial
    # coefficient.
    r"|(?:\^|\*\*)[\s{(\[+-]{0,4}\d{5}|\d{4}[\s})]{0,4}!|binom\s?\{\s?\d{5}"
)
# The regular expression `_NESTED` matches a product, factorial or binomial in an exponent.
_NESTED = re.compile(r"\^\s?\{[^{}]{0,200}\d\d[^{}]{0,200}(?:!|\\cdot|\\times|\*|\\d?binom)")
# The regular expression `_POWER` matches a power of a bracketed expression, such as (x+1)^5.
_POWER = re.compile(r"[)}\]]\s{0,9}(?:\^|\*\*)[\s{(\[+-]{0,4}(\d{1,4})")
# For a power of a bracketed expression: largest allowed product of the exponent and the largest number in the brackets.
_LARGEST_POWER = 10**6
# Largest allowed number of terms in the expansion of a power of a sum.
_MOST_TERMS = 10**5
_OPERATOR = re.compile(r"\\(?:prod|sum|i{0,3}int|oint|lim)(?![A-Za-z])")
# The regular expression `_LONG_OPERATOR` matches operators (such as sums) over large ranges. Evaluating a sum or
# product over a large range can take very long although it makes few function calls, because the calls compute with
# huge numbers. The limit `_WORK` cannot stop a long sum or product in time, because `_WORK` limits the number of
# function calls and not their duration.
_LONG_OPERATOR = re.compile(_OPERATOR.pattern + r"[^$]{0,60}(?:\d{4}|!)")
# Maximum number of Python profiling events (see `sys.setprofile`) in one comparison of two answers. Each function
# call and each function return is one profiling event. A comparison that reaches this maximum takes about a second.
# Even the longest ordinary answers cause only a tenth of the profiling events that `_WORK` allows.
_WORK = 5_000_000
_PERCENT = re.compile(r"\s?\\?%\s?\Z")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]{0,200})\}")
_TEX = r"(?:[^\\]|\\(?![()\[\]]))+"
_DELIMITED = re.compile(rf"\$\$?(?P<dollar>[^$]+)\$\$?\.?|\\\((?P<round>{_TEX})\\\)\.?|\\\[(?P<square>{_TEX})\\\]\.?")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_WORDS = re.compile(r"(?!pi\Z)[^\W\d_]{2,}(?:[ '-][^\W\d_]+){0,20}")
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!pi\b)[A-Za-z]{2,}(?![A-Za-z(])|[$\n]|\\[(\[]")


def math_answer(
    prompt: str,
    response: str,
    *,
    answer: str | float | None,
    answer_marker: str | None = None,
    float_rounding: int = 6,
    strict: bool = True,
) -> float | None:
    r"""Compare the response's answer with the right answer mathematically, using the library math-verify.

    The response's answer is the content of its last closed `\boxed{...}`. If the response has no `\boxed{...}` and
    contains only mathematics, the whole response is its answer. If the response has no `\boxed{...}` and contains text
    besides mathematics, math-verify searches the last 1000 characters of the response, for example for "the answer is
    $x^2$", the last formula or the last number. If either only the response's answer or only the right answer has a
    percent sign, a percentage such as 50% equals both one half and 50. If the right answer consists of words only
    ("east"), the response's answer and the right answer are compared as text.

    Some expressions would take too long to evaluate. Evaluation is limited by the form of the expression and by the
    number of function calls, not by time, so that every machine and thread gives the same score. An expression that is
    too complex by one of the following rules counts as right only if it is written exactly like the right answer, apart
    from white space:

    - An expression is too complex if it has more than 500 characters, or more than ten levels of nested brackets.
    - An expression is too complex if one of its exponents has a power, product, factorial or binomial coefficient.
    - An expression is too complex if it has an exponent of at least five digits, a binomial coefficient of a number of
      at least five digits, or the factorial of a number of at least four digits.
    - An expression is too complex if it has a large power of a large number.
    - An expression is too complex if it has a sum, product, integral or limit that is followed, within 60 characters,
      by a number of at least four digits or a factorial.
    - An expression with a sum, product, integral or limit is too complex if the right answer has none of these
      operators.
    - An expression is too complex if comparing it with the right answer takes more than 5 million profiling events,
      such as function calls and function returns.

    Args:
        prompt: unused.
        response: the model's text.
        answer: the right answer: a number, or an expression in LaTeX or plain text, with or without `$` or
            `\boxed{...}`.
        answer_marker: the text before the right answer, such as "####" in GSM8K's solutions. If the right answer
            contains `answer_marker`, only the part after the last `answer_marker` is read.
        float_rounding: number of decimal places that are compared if one of the numbers is a decimal.
        strict: if True, the variables of the response's answer and of the right answer must have the same names, and a
            set never equals a tuple; if False, variables are matched by their order.

    Returns:
        1.0 if the two answers are equal, else 0.0; None if `answer` is None. A response that cannot be parsed gets 0.0.

    Raises:
        ValueError: the right answer cannot be parsed.
    """
    if answer is None:
        return None
    text = str(answer)
    right, given = _bare(text.rpartition(answer_marker)[2] if answer_marker else text), _stated(response)
    words = _WORDS.fullmatch(right)
    expressions = [] if words else [*_right(right, False)]
    if given is not None and _key(given, words) == _key(right, words):
        return 1.0
    if words or _is_too_much(response[-_TAIL:] if given is None else given, _TAIL if given is None else _LONGEST):
        return 0.0
    if given is not None and _OPERATOR.search(given) and not _OPERATOR.search(right):
        return 0.0
    one_sided = given is not None and _is_percent(given) != _is_percent(right)
    if one_sided:
        expressions = [*_right(right, True)]
    verify = _library()[1]

    def compared() -> bool:
        found = _parse(response[-_TAIL:]) if given is None else _expressions(given, both_readings=one_sided)
        return bool(verify(expressions, found, float_rounding=float_rounding, strict=strict, timeout_seconds=None))

    return float(_bounded(compared))


class _TooMuchError(BaseException):
    """Raised if comparing two answers takes too many function calls.

    `_TooMuchError` does not inherit from `Exception`, because math-verify catches every `Exception`.
    """


def _bounded(work: Callable[[], bool]) -> bool:
    """Call `work` and return its result, or return False if `work` makes too many function calls.

    `_bounded` does not count function calls in other threads. Unlike a time limit, a limit on the number of
    function calls needs no operating-system signal.
    """
    left, before = _WORK, sys.getprofile()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _TooMuchError

    sys.setprofile(count)
    try:
        return work()
    except _TooMuchError:
        return False
    finally:
        sys.setprofile(before)


@functools.lru_cache(maxsize=256)
def _right(text: str, both_readings: bool) -> tuple[Any, ...]:
    """Parse the right answer with math-verify, and cache the result for the other samples of the same prompt."""
    found = _expressions(text, both_readings=both_readings)
    if not found:
        raise ValueError(
            f"the right answer {text[:80]!r} does not parse as mathematics; correct it in the data, or use "
            "exact_match for text answers"
        )
    return tuple(found)


def _stated(response: str) -> str | None:
    """Return the response's answer as an expression, or None if math-verify must search the response for the answer."""
    box = last_boxed(response)
    if box is not None:
        return _bare(box)
    whole = response[: 2 * _LONGEST].strip()
    if len(response) > 2 * _LONGEST or (_PROSE.search(whole) and not _DELIMITED.fullmatch(whole)):
        return None
    return _bare(whole.removesuffix("."))


def _bare(text: str) -> str:
    r"""Return an expression without the `\boxed{...}`, the dollar signs or the `\text{...}` around the expression."""
    box = last_boxed(text)
    text = (text if box is None else box).strip()
    if delimited := _DELIMITED.fullmatch(text):
        text = next(inner for inner in delimited.groups() if inner is not None).strip()
    worded = _TEXT.fullmatch(text)
    return worded[1].strip() if worded else text


def _key(text: str, words: Any) -> str:
    """Return a text without white space, and in lower case if `words` is set, for the comparison with another text."""
    key = "".join(text.split())
    return key.casefold() if words else key


def _is_percent(text: str) -> bool:
    return bool(_PERCENT.search(text))


def _expressions(text: str, *, both_readings: bool) -> list[Any]:
    """Parse a text that consists of one mathematical expression.

    If the expression is a percentage, the number before the percent sign is parsed. With `both_readings`, a percentage
    yields both the number before the percent sign and a hundredth of that number.
    """
    number = _PI.sub(r"\\pi ", _PERCENT.sub("", text))
    found = _parse(rf"\boxed{{{number}}}")
    if both_readings and found and _is_percent(text):
        found = found + _parse(rf"\boxed{{\frac{{{number}}}{{100}}}}")
    return found


def _parse(text: str) -> list[Any]:
    found: list[Any] = _library()[0](text, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def _is_too_much(text: str, longest: int) -> bool:
    """Return whether parsing or evaluating `text` could take very long."""
    if len(text) > longest or any(form.search(text) for form in (_HUGE, _NESTED, _LONG_OPERATOR)):
        return True
    if any(_is_large_power(_bracket(text, power.start()), int(power[1])) for power in _POWER.finditer(text)):
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest > _DEEPEST


def _bracket(text: str, end: int) -> str:
    """Return the content of the bracket that closes at `end`, or all text before `end` if that bracket is unmatched."""
    depth = 1
    for start in range(end - 1, -1, -1):
        depth += (text[start] in ")]}") - (text[start] in "([{")
        if not depth:
            return text[start + 1 : end]
    return text[:end]


def _is_large_power(base: str, power: int) -> bool:
    power *= math.prod(int(inner) for inner in _POWER.findall(base))
    others = base.count("+") + base.count("-")
    largest = max((int(number) for number in re.findall(r"\d{1,4}", base)), default=1)
    return power * largest > _LARGEST_POWER or math.comb(power + others, others) > _MOST_TERMS


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import math-verify's functions `parse` and `verify`.

    The log level of math-verify is raised, because math-verify would otherwise warn that its timeouts are disabled.
    """
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return parse, verify
