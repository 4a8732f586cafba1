"""A 5M-parameter initial model that rambles in a third of its answers: it repeats its scratch pad without end.

The model is trained on a mixture, as in `rltrain.tasks.tiny_model`, with answers cut after `TAUGHT` tokens. When the
trained model samples, rambling answers continue up to `LIMIT` tokens.
"""

import dataclasses
import hashlib
import random
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rltrain.base.cache_folder import cache_root
from rltrain.tasks import TASKS
from rltrain.tasks import tiny_model as recipe
from rltrain.tasks.median import solve

LIMIT, TAUGHT = 256, 48
SHARE = 0.42  # share of rambling answers in training; a third of the trained model's answers reach `LIMIT`
STEPS = 120


def mess(digits: str, rng: random.Random) -> tuple[str, bool]:
    """Return a random answer for training, and whether an end token follows it.

    The answer is a worked solution, a guess, or the sorted digits repeated without end.

    In training, an end token follows only `#` and a digit. Rambling answers contain no `#`, so they hardly ever end by
    chance.
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
    """Return the directory of the rambling model.

    The first call makes the model, which takes a minute or two.
    """
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = cache_root() / "starts" / f"rambling-{version}"
    if not path.exists():
        task = dataclasses.replace(TASKS["median"], mess=mess, max_response_length=TAUGHT)
        with recipe._own_random_state(0), recipe._threads(recipe.THREADS):
            model = model_5m()
            recipe._train(model, task, random.Random("rambling"), steps=STEPS, on_step=None)
            recipe._save(model, task.tokenizer(), path)
    return path
