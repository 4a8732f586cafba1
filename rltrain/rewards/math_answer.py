"""1 where a response's mathematical answer equals the right one, whichever way both are written."""

import functools
import logging
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from rltrain.rewards.boxed import last_boxed

_TAIL = 1000  # characters at the end of a response that are searched where it has no box
_LONGEST = 500  # characters of an expression
_DEEPEST = 10  # brackets in brackets; the parser's time may double with each
_HUGE = re.compile(
    r"(?:\^|\*\*)[\s{(\[\d]{0,40}(?:\^|\*\*)"  # a power in an exponent
    r"|(?:\^|\*\*)[\s{(\[+-]{0,4}\d{5}|\d{4}[\s})]{0,4}!|binom\s?\{\s?\d{5}"  # a large exponent, factorial, binomial
)
_NESTED = re.compile(r"\^\s?\{[^{}]{0,200}\d\d[^{}]{0,200}(?:!|\\cdot|\\times|\*|\\d?binom)")  # in an exponent
_POWER = re.compile(r"[)}\]]\s{0,9}(?:\^|\*\*)[\s{(\[+-]{0,4}(\d{1,4})")  # of a bracket
_LARGEST_POWER = 10**6  # times the largest number in the bracket
_MOST_TERMS = 10**5  # that a power of a sum is expanded to
_OPERATOR = re.compile(r"\\(?:prod|sum|i{0,3}int|oint|lim)(?![A-Za-z])")
_LONG_OPERATOR = re.compile(_OPERATOR.pattern + r"[^$]{0,60}(?:\d{4}|!)")  # whose numbers outgrow any count of calls
_WORK = 5_000_000  # calls and returns of functions: a second, and ten times what the longest ordinary answers take
_PERCENT = re.compile(r"\s?\\?%\s?\Z")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]{0,200})\}")
_TEX = r"(?:[^\\]|\\(?![()\[\]]))+"
_DELIMITED = re.compile(rf"\$\$?(?P<dollar>[^$]+)\$\$?\.?|\\\((?P<round>{_TEX})\\\)\.?|\\\[(?P<square>{_TEX})\\\]\.?")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_WORDS = re.compile(r"(?!pi\Z)[^\W\d_]{2,}(?:[ '-][^\W\d_]+){0,20}")
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!pi\b)[A-Za-z]{2,}(?![A-Za-z(])|[$\n]|\\[(\[]")


def math_answer(
    prompt: str, response: str, *, answer: str | float | None, float_rounding: int = 6, strict: bool = True
) -> float | None:
    r"""Compare the response's answer with the right one as mathematics, with the library math-verify.

    The response's answer is its last closed `\boxed{...}`; without one, the response if it is nothing but mathematics,
    else what math-verify finds in its last 1000 characters ("the answer is $x^2$", the last formula, the last number).
    Where only one side has a percent sign, 50% is one half or 50. Answers of words alone ("east") are compared as text.

    What a model writes must not take for ever, and nothing here watches the clock, so that every machine and thread
    gives the same score. An expression of over 500 characters, or with brackets ten deep in others, a power or product
    in an exponent, an exponent or binomial of five digits, a factorial of four, a large power of a large number, a sum,
    product, integral or limit over thousands or factorials, or any of these where the answer has none, is right only if
    it is written as the answer is. So is one that takes sympy more than some million function calls.

    Args:
        prompt: not looked at.
        response: the model's text.
        answer: the right answer, in LaTeX or plain, with or without `$` or a box around it; or a number.
        float_rounding: decimal places to which numbers are compared where one is a decimal.
        strict: letters are their names, and a set is no tuple; False: letters are matched by their order.

    Returns:
        1.0 or 0.0, which a response that does not parse gets too; None without an answer.

    Raises:
        ValueError: the answer does not parse.
    """
    if answer is None:
        return None
    right, given = _bare(str(answer)), _stated(response)
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
    """The work is used up; no Exception, since the libraries catch those and go on."""


def _bounded(work: Callable[[], bool]) -> bool:
    """What it returns; False if it makes too many calls. In this thread only, and without a signal."""
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
    """Parse the right answer; the samples of a group share it."""
    found = _expressions(text, both_readings=both_readings)
    if not found:
        raise ValueError(
            f"answer {text[:80]!r} does not parse as mathematics; correct it, or use exact_match for answers of text"
        )
    return tuple(found)


def _stated(response: str) -> str | None:
    """Return the expression that the response states; None where it has to be searched for."""
    box = last_boxed(response)
    if box is not None:
        return _bare(box)
    whole = response[: 2 * _LONGEST].strip()
    if len(response) > 2 * _LONGEST or (_PROSE.search(whole) and not _DELIMITED.fullmatch(whole)):
        return None
    return _bare(whole.removesuffix("."))


def _bare(text: str) -> str:
    r"""Take an expression out of its box, dollars or `\text`."""
    box = last_boxed(text)
    text = (text if box is None else box).strip()
    if delimited := _DELIMITED.fullmatch(text):
        text = next(inner for inner in delimited.groups() if inner is not None).strip()
    worded = _TEXT.fullmatch(text)
    return worded[1].strip() if worded else text


def _key(text: str, words: Any) -> str:
    """Return what two texts share that are the same but for white space, and for words the case."""
    key = "".join(text.split())
    return key.casefold() if words else key


def _is_percent(text: str) -> bool:
    return bool(_PERCENT.search(text))


def _expressions(text: str, *, both_readings: bool) -> list[Any]:
    """Parse a whole expression; of a percentage the number before the sign, and its hundredth with `both_readings`."""
    number = _PI.sub(r"\\pi ", _PERCENT.sub("", text))
    found = _parse(rf"\boxed{{{number}}}")
    if both_readings and found and _is_percent(text):
        found = found + _parse(rf"\boxed{{\frac{{{number}}}{{100}}}}")
    return found


def _parse(text: str) -> list[Any]:
    found: list[Any] = _library()[0](text, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def _is_too_much(text: str, longest: int) -> bool:
    """Whether parsing or computing this could take long."""
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
    """What stands in the bracket that closes at `end`; all before it where none opens."""
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
    """Import math-verify's two functions; it warns once in a process that its timeouts, which need signals, are off."""
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return parse, verify
