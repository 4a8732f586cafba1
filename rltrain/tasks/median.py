"""Task: find the median of seven digits, for example `2299907=` -> `7`.

A response gives the answer at once (`#7`) or after the sorted digits (`0227999#7`).
"""

from random import Random

from rltrain.tasks.base import Task

DIGITS = 7
MAX_RESPONSE_LENGTH = 16
# The starting model has learned to imitate flawed answers. SCRATCH_SHARE is the fraction of flawed answers in which the
# digits are sorted first, and ENDLESS_SHARE is the fraction of flawed answers that never end. Most flawed answers only
# guess the median, so reinforcement learning has to discover that sorting the digits first earns more reward.
SCRATCH_SHARE = 0.22
ENDLESS_SHARE = 0.11
GUESS_RIGHT = 0.07  # Probability that a guessed answer is the median instead of a random digit.


def solve(digits: str) -> str:
    """Return the middle digit of the sorted digits."""
    return sorted(digits)[len(digits) // 2]


def mess(digits: str, rng: Random) -> tuple[str, bool]:
    """Return an answer that the starting model imitates, and whether the end token follows the answer.

    The answer has one of three forms: many guesses of the median without an end token, the sorted digits followed by
    the correct median, or one guess of the median.
    """
    draw = rng.random()
    if draw < ENDLESS_SHARE:
        return "".join(f"#{_guess(digits, rng)}" for _ in range(MAX_RESPONSE_LENGTH // 2)), False
    if draw < ENDLESS_SHARE + SCRATCH_SHARE:
        return f"{''.join(sorted(digits))}#{solve(digits)}", True
    return f"#{_guess(digits, rng)}", True


def _guess(digits: str, rng: Random) -> str:
    """Return the median with probability GUESS_RIGHT, else a random digit."""
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
