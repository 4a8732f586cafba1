"""The tiny starting model of the built-in tasks.

The tiny model is trained within seconds when a run needs the model, always with the same result.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rltrain.tasks.base import Task
from rltrain.tasks.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, char_tokenizer

logger = logging.getLogger(__name__)

STEPS = 250
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
WARMUP_STEPS = 10
# Floating-point sums depend on the number of threads that compute them, so the number of threads is fixed to 1.
# Two threads would be at most a little faster than one thread on free cores.
# On busy cores, two threads would be twenty times slower than one thread, because the threads wait for each other.
THREADS = 1

OnStep = Callable[[int, int], None]


def tiny_model() -> Qwen2ForCausalLM:
    """Build a Qwen2 model with 0.41M float32 parameters, 2 layers and hidden size 128.

    The weights are drawn from torch's global random generator.

    The model has four attention heads and two key-value heads, so that it also exercises grouped-query attention and
    two-way tensor parallelism.
    """
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # A narrow model learns faster if its weights start with a standard deviation of 0.03 instead of the usual 0.02.
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model: Qwen2ForCausalLM = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model


def make_start(task: Task, path: str | Path, *, seed: int, steps: int = STEPS, on_step: OnStep | None = None) -> Path:
    """Train a new tiny model on the task's flawed answers, and save it with its tokenizer in Hugging Face format.

    The weights are bitwise the same for the same arguments on the same machine. The caller's torch random state and
    number of torch threads do not change. The directory `path` is created completely or not at all. If another process
    creates `path` during the training, the directory that the other process has created is kept.

    Args:
        task: task to learn.
        path: directory to create.
        seed: seed of the weights and the data.
        steps: number of supervised optimizer steps.
        on_step: function that is called as `on_step(done, steps)` after every optimizer step.

    Raises:
        FileExistsError: `path` already exists.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(
            f"{path}: the starting model needs a path that does not exist; remove this path or choose another one"
        )
    with _own_random_state(seed), _threads(THREADS):
        model = tiny_model()
        _train(model, task, Random(f"{task.name}/start/{seed}"), steps=steps, on_step=on_step)
        _save(model, path)
    return path


def cached_start(task: Task, *, seed: int = 0, steps: int = STEPS, on_step: OnStep | None = None) -> Path:
    """Return the directory of the task's starting model.

    If the model is not in the cache directory yet, `cached_start` first trains the model. The cache directory is
    `$RLTRAIN_CACHE` if the variable is set, else `$XDG_CACHE_HOME/rltrain`, else `~/.cache/rltrain`. The directory's
    name contains a hash of everything that decides the weights, so a changed training recipe leads to a new directory.
    The arguments have the same meaning as in `make_start`.
    """
    path = start_path(task, seed=seed, steps=steps)
    if not path.exists():
        # `make_start` raises FileExistsError if another process has created the directory in the meantime.
        with contextlib.suppress(FileExistsError):
            make_start(task, path, seed=seed, steps=steps, on_step=on_step)
    return path


def start_path(task: Task, *, seed: int = 0, steps: int = STEPS) -> Path:
    """Return the directory that `cached_start` would return, without training the model.

    The returned directory does not have to exist.
    """
    return cache_root() / "starts" / f"{task.name}-{seed}-{_recipe_hash(task, seed=seed, steps=steps)}"


def cache_root() -> Path:
    """Return the path of the cache directory, which holds only files that can be created again.

    The returned directory does not have to exist.
    """
    if own := os.environ.get("RLTRAIN_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "rltrain"


def messy_batch(task: Task, rng: Random, size: int) -> list[torch.Tensor]:
    """Draw `size` random prompts with flawed answers for supervised training.

    Return one int64 tensor (rows, tokens) for each row length, shortest first. A row consists of the prompt, the flawed
    answer and, if the answer is finished, the end token. Only rows of equal length are put into one tensor, so neither
    padding nor a mask is needed.
    """
    by_length: dict[int, list[list[int]]] = {}
    for row in task.prompts("train", rng.getrandbits(64), size):
        text, finished = task.messy_answer(row, rng)
        ids = list((row["prompt"] + text).encode("ascii")) + [EOS_ID] * finished
        by_length.setdefault(len(ids), []).append(ids)
    return [torch.tensor(by_length[length]) for length in sorted(by_length)]


def _train(model: Qwen2ForCausalLM, task: Task, rng: Random, *, steps: int, on_step: OnStep | None) -> None:
    """Train the model with AdamW to imitate the task's flawed answers.

    The learning rate warms up linearly and then decays linearly to zero.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1 - step / steps)
        batch = messy_batch(task, rng, BATCH_SIZE)
        num_tokens = sum(ids[:, task.max_prompt_length :].numel() for ids in batch)
        optimizer.zero_grad()
        for ids in batch:
            (_answer_loss(model, ids, task.max_prompt_length) / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step + 1, steps)
    model.eval()


def _answer_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Return the summed cross-entropy of the answers' tokens, in nats: ids (rows, tokens) -> 0-dim tensor.

    The tokens of the prompts do not count towards the loss.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, prompt_length - 1 :]
    return cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, prompt_length:].flatten(), reduction="sum")


def _save(model: Qwen2ForCausalLM, path: Path) -> None:
    """Write the model, its generation defaults and the tokenizer to the directory `path`.

    The files are first written to another directory beside `path`, which is then renamed to `path`, so that a reader
    never sees an incomplete directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    # Engines read sampling defaults from the generation config, so the generation config sets nothing but token ids.
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    try:
        model.save_pretrained(draft)
        char_tokenizer().save_pretrained(draft)
        draft.rename(path)
    except OSError:
        # Renaming a directory fails if the target is a non-empty directory. If `path` is a directory, another process
        # has created the same model in the meantime.
        if not path.is_dir():
            raise
        logger.debug("%s was made by another process; the copy of this process is deleted", path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _recipe_hash(task: Task, *, seed: int, steps: int) -> str:
    """Hash the source code of `rltrain.tasks` and everything else on which the bits of the weights depend."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    versions = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability())
    digest.update(repr((task.name, seed, steps, versions)).encode())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for the duration of the `with` block, and restore the generator's state afterwards.

    The states of torch's GPU random generators do not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's number of threads for the duration of the `with` block, and restore the old number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
