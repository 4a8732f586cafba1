"""Task: sort six digits, for example `371924>` -> `123479`.

The starting model often fails to end its answer with the end token.
"""

from random import Random

from rltrain.tasks.base import Task

DIGITS = 6
MAX_RESPONSE_LENGTH = 12
ENDLESS_SHARE = 0.33
SLIP_SHARE = 0.7  # Share of flawed answers in which a random digit replaces one digit of the answer.


def solve(digits: str) -> str:
    """Return the digits in ascending order."""
    return "".join(sorted(digits))


def mess(digits: str, rng: Random) -> tuple[str, bool]:
    """Return a flawed answer, and whether the end token follows the answer.

    In some flawed answers, one digit is wrong. Some flawed answers repeat the digits and have no end token.
    """
    answer = sorted(digits)
    if rng.random() < SLIP_SHARE:
        answer[rng.randrange(DIGITS)] = rng.choice("0123456789")
    text = "".join(answer)
    if rng.random() < ENDLESS_SHARE:
        return (text * MAX_RESPONSE_LENGTH)[:MAX_RESPONSE_LENGTH], False
    return text, True


SORT = Task(
    name="sort",
    digits=DIGITS,
    mark=">",
    solve=solve,
    mess=mess,
    reward="rltrain.rewards.final_answer:exact_answer",
    max_response_length=MAX_RESPONSE_LENGTH,
)
