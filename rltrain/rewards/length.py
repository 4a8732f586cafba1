"""Penalties from 0 to -1 for long responses.

Lengths are measured in characters or words, because reward functions do not receive tokens.
"""

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
    """Penalize a response in proportion to its excess over a target length.

        score = -min(1, max(0, n - target) / target)

    In the formula of the length penalty, n is the length of the response; with `both_sides`, |n - target| replaces
    max(0, n - target). Without `both_sides`, the score is 0 up to the target length, -0.5 at 1.5 times the target, and
    -1 at twice the target or more.

    Args:
        prompt: unused.
        response: the model's text.
        target: the target length of a response, either one number for all samples or a column of the data.
        unit: the unit of lengths, "characters" (Unicode code points) or "words" (separated by white space; only for
            languages that put spaces between words).
        both_sides: whether responses shorter than the target are penalized in the same way as longer responses.

    Returns:
        A score in [-1, 0], or None if `target` is None.

    Raises:
        ValueError: the target length is not above 0, or the unit of lengths is unknown.
    """
    if target is None:
        return None
    if not target > 0:
        raise ValueError(f"target={target} must be > 0; give the wanted length in {unit}")
    excess = _length(response, unit) - target
    return -min(1.0, abs(excess) / target) if excess > 0 or (both_sides and excess < 0) else 0.0


def overlong_penalty(
    prompt: str, response: str, *, max_length: float, buffer: float, unit: Unit = "characters"
) -> float:
    """Penalize a response linearly within a buffer before the length limit, and by 1 beyond the limit.

        score = 0                                       if n <= max_length - buffer
        score = ((max_length - buffer) - n) / buffer    if max_length - buffer < n <= max_length
        score = -1                                      if n > max_length

    In the formula of the overlong penalty, n is the length of the response. The formula of the overlong penalty is
    equation 13 of the DAPO paper (arXiv 2503.14476). The DAPO paper uses a limit of 20480 tokens and a buffer of 4096
    tokens, so its penalty starts at 16384 tokens.

    Args:
        prompt: unused.
        response: the model's text.
        max_length: the length limit, called L_max in arXiv 2503.14476.
        buffer: the width of the linear range before the limit, L_cache in arXiv 2503.14476; if 0, the score drops from
            0 to -1 at the limit.
        unit: the unit of lengths, "characters" or "words", as in `length_penalty`.

    Returns:
        A score in [-1, 0].

    Raises:
        ValueError: `buffer` is not between 0 and the length limit `max_length`, or the unit of lengths is unknown.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be from 0 to max_length={max_length}; choose a buffer within the limit")
    length, free = _length(response, unit), max_length - buffer
    if length <= free:
        return 0.0
    return (free - length) / buffer if length <= max_length else -1.0


def _length(text: str, unit: str) -> int:
    if unit == "characters":
        return len(text)
    if unit == "words":
        return len(text.split())
    raise ValueError(f"unit={unit!r} must be characters or words; reward functions get no tokens")
