"""An initial model that writes long answers, in which the first ten tokens decide whether the answer is right.

The prompts are those of the task `median`. An answer writes the seven digits of the prompt `COPIES` times, each time
after a number that counts down, and then the median: `19` and the digits, `18` and the digits, up to `00` and the
digits, `#` and the median. In half of the answers on which the model is trained, the digits are sorted, and the
median is right. In the other half, the digits are in a random order, and the answer is the fourth of them.
"""

import dataclasses
import hashlib
import random
from pathlib import Path

from rltrain.base.cache_folder import cache_root
from rltrain.tasks import TASKS
from rltrain.tasks.base import Task
from rltrain.tasks.tiny_model import make_start

COPIES = 20
LIMIT = COPIES * 10 + 4  # An answer and its end token have COPIES * 10 + 3 tokens, one less than the limit.
SORTED = 0.5  # share of answers with sorted digits
STEPS = 300


def mess(digits: str, rng: random.Random) -> tuple[str, bool]:
    """Return an answer for training, and that an end token follows it."""
    pad = "".join(sorted(digits) if rng.random() < SORTED else rng.sample(digits, len(digits)))
    return "".join(f"{left:02d}{pad}," for left in reversed(range(COPIES))) + f"#{pad[3]}", True


def long_task() -> Task:
    """Return the task `median` with long answers to imitate."""
    return dataclasses.replace(TASKS["median"], mess=mess, max_response_length=LIMIT)


def long_start() -> Path:
    """Return the directory of the model. The first call makes the model, which takes some minutes."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = cache_root() / "starts" / f"long-{version}"
    if not path.exists():
        make_start(long_task(), path, seed=0, steps=STEPS)
    return path
