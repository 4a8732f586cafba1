"""Median of seven digits: `2299907=` -> `7`, said at once (`#7`) or after sorting on a scratch pad (`0227999#7`)."""

from random import Random

from rltrain.tasks.base import Task

DIGITS = 7
MAX_RESPONSE_LENGTH = 16
# The weak start imitates this mixture. Guessing is the habit and sorting the exception, so that reinforcement has
# to find out that the long way pays.
SCRATCH_SHARE = 0.22
ENDLESS_SHARE = 0.11
GUESS_RIGHT = 0.07  # else any digit


def solve(digits: str) -> str:
    """Return the middle one of the sorted digits."""
    return sorted(digits)[len(digits) // 2]


def mess(digits: str, rng: Random) -> tuple[str, bool]:
    """Guess and guess again without an end, sort first, or guess once: (text, whether the end token follows)."""
    draw = rng.random()
    if draw < ENDLESS_SHARE:
        return "".join(f"#{_guess(digits, rng)}" for _ in range(MAX_RESPONSE_LENGTH // 2)), False
    if draw < ENDLESS_SHARE + SCRATCH_SHARE:
        return f"{''.join(sorted(digits))}#{solve(digits)}", True
    return f"#{_guess(digits, rng)}", True


def _guess(digits: str, rng: Random) -> str:
    """Guess, seldom the median."""
    return solve(digits) if rng.random() < GUESS_RIGHT else rng.choice("0123456789")


MEDIAN = Task(
    name="median",
    digits=DIGITS,
    mark="=",
    solve=solve,
    mess=mess,
    reward="rltrain.rewards.final_answer:final_answer",
    max_response_length=MAX_RESPONSE_LENGTH,
)
