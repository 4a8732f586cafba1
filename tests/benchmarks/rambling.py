"""An initial model with 5M parameters, a third of whose answers ramble: they repeat the scratch pad over and over.

The model learns from a mixture as in `rltrain.tasks.tiny_model`, on answers cut after `TAUGHT` tokens; answers that
repeat without an end during teaching later go on to `LIMIT` tokens.
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
SHARE = 0.42  # share of rambling in the teaching; of sampled answers, a third goes on to the limit
STEPS = 120


def mess(digits: str, rng: random.Random) -> tuple[str, bool]:
    """Write an answer that sorts and solves, one that guesses, or one that repeats the sorted digits without an end.

    An end token only follows `#` and a digit, and rambling answers have no `#`, so they hardly ever end by chance.
    """
    pad = "".join(sorted(digits))
    if rng.random() < SHARE:
        return (f"{pad}," * TAUGHT)[:TAUGHT], False
    return (f"{pad}#{solve(digits)}" if rng.random() < 0.5 else f"#{rng.choice('0123456789')}"), True


def model_5m() -> Qwen2ForCausalLM:
    """Make a Qwen2 of 4.9M parameters: 5 layers, hidden size 256."""
    config = Qwen2Config(**recipe.tiny_model().config.to_dict() | {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "layer_types": None,
    })  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def rambling_start() -> Path:
    """Return the directory of the rambling model, which is made at the first call and takes a minute or two."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = recipe.cache_root() / "starts" / f"rambling-{version}"
    if not path.exists():
        task = dataclasses.replace(TASKS["median"], mess=mess, max_response_length=TAUGHT)
        with recipe._own_random_state(0), recipe._threads(recipe.THREADS):
            model = model_5m()
            recipe._train(model, task, random.Random("rambling"), steps=STEPS, on_step=None)
            recipe._save(model, path)
    return path
