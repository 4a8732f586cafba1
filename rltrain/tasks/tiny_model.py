"""The tiny model that the built-in tasks start from: made on the spot, in seconds, the same every time."""

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
# Sums depend on how many threads share them, so the number is part of the recipe. It is one because two that wait for
# each other are at most a little faster on free cores and twenty times slower on busy ones.
THREADS = 1

OnStep = Callable[[int, int], None]


def tiny_model() -> Qwen2ForCausalLM:
    """Build a Qwen2 of 0.41M parameters, float32, 2 layers, hidden 128, with weights from torch's global generator.

    Four heads over two key-value heads, so that grouped attention and two-way tensor parallelism are exercised too.
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
        initializer_range=0.03,  # so narrow a model learns faster from wider weights than the usual 0.02
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model: Qwen2ForCausalLM = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model


def make_start(task: Task, path: str | Path, *, seed: int, steps: int = STEPS, on_step: OnStep | None = None) -> Path:
    """Teach a fresh tiny model the task's messy answers and save it, with its tokenizer, in Hugging Face form.

    Bitwise the same for the same arguments on the same machine; the caller's random state and thread count are left
    as they were. `path` appears whole or not at all. Where another process makes it first, that one stays.

    Args:
        task: what to learn.
        path: directory to create.
        seed: decides weights and data.
        steps: supervised optimizer steps.
        on_step: called as `on_step(done, steps)` after every step.

    Raises:
        FileExistsError: `path` is there already.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path}: a start is made only where nothing stands; remove it or choose another path")
    with _own_random_state(seed), _threads(THREADS):
        model = tiny_model()
        _train(model, task, Random(f"{task.name}/start/{seed}"), steps=steps, on_step=on_step)
        _save(model, path)
    return path


def cached_start(task: Task, *, seed: int = 0, steps: int = STEPS, on_step: OnStep | None = None) -> Path:
    """Return the directory of the task's start, making it first if this machine has not yet made it.

    The cache is `$RLTRAIN_CACHE`, else `$XDG_CACHE_HOME/rltrain`, else `~/.cache/rltrain`. The directory's name holds
    a hash of all that decides the weights, so a changed recipe makes a new start. Arguments as of `make_start`.
    """
    path = start_path(task, seed=seed, steps=steps)
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # another process was quicker
            make_start(task, path, seed=seed, steps=steps, on_step=on_step)
    return path


def start_path(task: Task, *, seed: int = 0, steps: int = STEPS) -> Path:
    """Return the directory of `cached_start`, which need not exist."""
    return cache_root() / "starts" / f"{task.name}-{seed}-{_recipe_hash(task, seed=seed, steps=steps)}"


def cache_root() -> Path:
    """Return the directory for what can be made again; it may not exist yet."""
    if own := os.environ.get("RLTRAIN_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "rltrain"


def messy_batch(task: Task, rng: Random, size: int) -> list[torch.Tensor]:
    """Draw `size` supervised rows: one (rows, tokens) int64 tensor for each length that occurs, shortest first.

    A row is the prompt, the messy answer, and the end token if the answer is finished. Rows of one length travel
    together, so there is neither padding nor a mask.
    """
    by_length: dict[int, list[list[int]]] = {}
    for row in task.prompts("train", rng.getrandbits(64), size):
        text, finished = task.messy_answer(row, rng)
        ids = list((row["prompt"] + text).encode("ascii")) + [EOS_ID] * finished
        by_length.setdefault(len(ids), []).append(ids)
    return [torch.tensor(by_length[length]) for length in sorted(by_length)]


def _train(model: Qwen2ForCausalLM, task: Task, rng: Random, *, steps: int, on_step: OnStep | None) -> None:
    """Run the supervised steps: AdamW, linear warm-up, then linear decay to zero."""
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
    """Sum the cross-entropy of the answers' tokens, in nats: ids (rows, tokens) -> 0-dim. Prompts are not learned."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, prompt_length - 1 :]
    return cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, prompt_length:].flatten(), reduction="sum")


def _save(model: Qwen2ForCausalLM, path: Path) -> None:
    """Write model, generation defaults and tokenizer beside `path`, then rename: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    # Engines take their sampling defaults from this file: say nothing but the ids, and plain sampling.
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    try:
        model.save_pretrained(draft)
        char_tokenizer().save_pretrained(draft)
        draft.rename(path)
    except OSError:
        # Renaming onto a filled directory fails: another process put the same start there meanwhile.
        if not path.is_dir():
            raise
        logger.debug("%s was made by another process; dropping ours", path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _recipe_hash(task: Task, *, seed: int, steps: int) -> str:
    """Hash this package's source and whatever else decides the weights' bits."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    versions = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability())
    digest.update(repr((task.name, seed, steps, versions)).encode())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and restore it after; no device's generator is touched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's thread count inside the block and restore it after."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
