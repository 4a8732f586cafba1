"""Training data for comparisons of methods, as in `data.train=tests/learning/rows.py:mixed`."""

from collections.abc import Iterator
from random import Random

from rltrain.tasks import TASKS

PROMPTS = 8192
FEW, FEWER = 64, 16
TRIVIAL, IMPOSSIBLE = 0.5, 0.25  # shares of the prompts


def mixed(seed: int) -> Iterator[dict[str, str]]:
    """Yield prompts of the task `median`: half are trivial, a quarter is impossible, and a quarter is as in the task.

    The digits of a trivial prompt are all equal, but for one. The right answer to an impossible prompt is no digit.
    """
    draws = Random(seed)
    for row in TASKS["median"].prompts("train", seed, PROMPTS):
        kind = draws.random()
        if kind < TRIVIAL:
            digits = [draws.choice("0123456789")] * 7
            digits[draws.randrange(7)] = draws.choice("0123456789")
            prompt = "".join(digits)
            yield {"prompt": f"{prompt}=", "answer": sorted(prompt)[3]}
        elif kind < TRIVIAL + IMPOSSIBLE:
            yield {"prompt": row["prompt"], "answer": "none"}
        else:
            yield row


def few(seed: int) -> Iterator[dict[str, str]]:
    """Yield `FEW` prompts of the task `median`."""
    yield from TASKS["median"].prompts("train", seed, FEW)


def fewer(seed: int) -> Iterator[dict[str, str]]:
    """Yield `FEWER` prompts of the task `median`."""
    yield from TASKS["median"].prompts("train", seed, FEWER)
