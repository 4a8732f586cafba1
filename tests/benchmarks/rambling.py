"""A start whose answers ramble: 5M parameters, and a third of its answers write the scratch pad over and over.

The mixture is taught as `rltrain.tasks.tiny_model` teaches the built-in one, on answers cut after `TAUGHT` tokens: what
repeats itself there and never ends goes on to `LIMIT` tokens too.
"""

import dataclasses
import hashlib
import random
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rltrain.tasks import TASKS
from rltrain.tasks import tiny_model as recipe
from rltrain.tasks.median import solve

LIMIT, TAUGHT = 256, 48
SHARE = 0.42  # taught; of what is sampled then, a third goes on to the limit
STEPS = 120


def mess(digits: str, rng: random.Random) -> tuple[str, bool]:
    """Sort and answer, or guess; or sort, and sort again, without an end.

    An end only ever follows `#` and a digit, and what rambles has no `#`: so it hardly ever ends by chance.
    """
    pad = "".join(sorted(digits))
    if rng.random() < SHARE:
        return (f"{pad}," * TAUGHT)[:TAUGHT], False
    return (f"{pad}#{solve(digits)}" if rng.random() < 0.5 else f"#{rng.choice('0123456789')}"), True


def model_5m() -> Qwen2ForCausalLM:
    """A Qwen2 of 4.9M parameters: 5 layers, hidden 256."""
    config = Qwen2Config(**recipe.tiny_model().config.to_dict() | {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "layer_types": None,
    })  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def rambling_start() -> Path:
    """The directory of the start, made on the spot the first time, which takes a minute or two."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = recipe.cache_root() / "starts" / f"rambling-{version}"
    if not path.exists():
        task = dataclasses.replace(TASKS["median"], mess=mess, max_response_length=TAUGHT)
        with recipe._own_random_state(0), recipe._threads(recipe.THREADS):
            model = model_5m()
            recipe._train(model, task, random.Random("rambling"), steps=STEPS, on_step=None)
            recipe._save(model, path)
    return path
