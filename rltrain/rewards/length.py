"""Penalties for long responses, from 0 to -1, in characters or words: a reward function gets text, not tokens."""

from typing import Literal

Unit = Literal["characters", "words"]


def length_penalty(
    prompt: str,
    response: str,
    *,
    target: float | None,
    unit: Unit = "characters",
    both_sides: bool = False,
) -> float | None:
    """Take more off the longer a response is beyond a target.

        -min(1, max(0, n - target) / target)        n: the response's length; |n - target| with `both_sides`

    So the score is 0 up to the target, -0.5 at one and a half of it, and -1 from twice its length on.

    Args:
        prompt: not looked at.
        response: the model's text.
        target: the length wanted; the same for all, or a column of the data.
        unit: "characters" (code points of Unicode) or "words" (between white space: for languages that write it).
        both_sides: too short counts as too long does.

    Returns:
        A score in [-1, 0]; None without a target.

    Raises:
        ValueError: the target is not above 0, or the unit is unknown.
    """
    if target is None:
        return None
    if not target > 0:
        raise ValueError(f"target={target} must be > 0; give the length wanted in {unit}")
    excess = _length(response, unit) - target
    return -min(1.0, abs(excess) / target) if excess > 0 or (both_sides and excess < 0) else 0.0


def overlong_penalty(
    prompt: str, response: str, *, max_length: float, buffer: float, unit: Unit = "characters"
) -> float:
    """Take nothing off up to a limit less a buffer, all beyond the limit, and in the buffer more with each unit.

        0                                        n <= max_length - buffer
        ((max_length - buffer) - n) / buffer     n <= max_length
        -1                                       else                         arXiv 2503.14476, eq. 13

    The paper counts tokens (16384 with a buffer of 4096, of 20480 in all); here n is the length of the text.

    Args:
        prompt: not looked at.
        response: the model's text.
        max_length: L_max, the limit.
        buffer: L_cache, the width of the slope before it; 0: no slope.
        unit: as of `length_penalty`.

    Returns:
        A score in [-1, 0].

    Raises:
        ValueError: the buffer is not between 0 and the limit, or the unit is unknown.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be from 0 to max_length={max_length}; make it a part of the limit")
    length, free = _length(response, unit), max_length - buffer
    if length <= free:
        return 0.0
    return (free - length) / buffer if length <= max_length else -1.0


def _length(text: str, unit: str) -> int:
    if unit == "characters":
        return len(text)
    if unit == "words":
        return len(text.split())
    raise ValueError(f"unit={unit!r} must be characters or words; a reward function knows no tokens")
