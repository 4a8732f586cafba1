"""The tiny starting model of the built-in tasks.

A run that needs the tiny model trains it within seconds and caches it. The trained weights of the tiny model are always
the same on one machine.
"""

import contextlib
import hashlib
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from rltrain import environments, tasks
from rltrain.base.cache_folder import cache_root
from rltrain.tasks.base import Example, Imitated
from rltrain.tasks.digit import SIZE, PictureTask, picture_of
from rltrain.tasks.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE
from rltrain.tasks.vision_processor import IMAGE_ID, PATCH, SHUFFLE

logger = logging.getLogger(__name__)

STEPS = 250
LEARNING_RATE = 2e-3
WARMUP_STEPS = 10
# The result of a floating-point sum depends on the number of threads that compute the sum, so the number of threads
# is fixed to 1. On idle cores, training with two threads would be only slightly faster than training with one thread.
# On busy cores, training with two threads would be twenty times slower than training with one thread, because the two
# threads wait for each other.
THREADS = 1
IGNORED = -100  # Label that `cross_entropy` ignores, for tokens that the model is not trained to predict.

OnStep = Callable[[int, int], None]


def tiny_model() -> Qwen2ForCausalLM:
    """Build a Qwen2 model with 0.41M float32 parameters, 2 layers and hidden size 128.

    The initial weights are drawn from torch's global random generator.

    The model has four attention heads and two key-value heads, so that runs with the tiny model use grouped-query
    attention and can use two-way tensor parallelism.
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


def tiny_vision_model() -> Idefics3ForConditionalGeneration:
    """Build an Idefics3 model with 0.5M float32 parameters: two layers for images and two for text.

    The initial weights are drawn from torch's global random generator.
    """
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_ID,
        scale_factor=SHUFFLE,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model: Idefics3ForConditionalGeneration = Idefics3ForConditionalGeneration._from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    # With the usual standard deviation of 0.02, so narrow a model learns nothing about pictures in the first minutes.
    for name, parameter in model.named_parameters():
        if "text_model" not in name and parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


# For each name of a built-in model, the function that builds the model with random weights.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {"builtin": tiny_model, "builtin-vision": tiny_vision_model}


def make_start(
    task: Imitated, path: str | Path, *, seed: int, steps: int = STEPS, on_step: OnStep | None = None
) -> Path:
    """Train a new tiny model on the task's flawed answers, and save it with its tokenizer in Hugging Face format.

    The trained weights are bitwise the same for the same arguments on the same machine. The caller's torch random state
    and number of torch threads do not change. The directory `path` is created completely or not at all. If another
    process creates the directory `path` during the training, `make_start` keeps that directory and discards its own
    model.

    Args:
        task: the task on whose flawed answers the model is trained.
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
            f"{path}: already exists, but the starting model needs a new path; remove this path, or choose another"
        )
    with _own_random_state(seed), _threads(THREADS):
        model = MODELS[task.model]()
        _train(model, task, Random(f"{task.name}/start/{seed}"), steps=steps, on_step=on_step)
        _save(model, task, path)
    return path


def cached_start(task: Imitated, *, seed: int = 0, steps: int = STEPS, on_step: OnStep | None = None) -> Path:
    """Return the directory of the task's starting model.

    If the model is not in the cache directory yet, `cached_start` first trains the model. The cache directory is
    `$RLTRAIN_CACHE` if the variable is set, else `$XDG_CACHE_HOME/rltrain`, else `~/.cache/rltrain`. The name of the
    model's directory contains a hash of everything that decides the weights, so a changed training recipe leads to a
    new directory. The arguments of `cached_start` have the same meaning as the arguments of `make_start`.
    """
    path = start_path(task, seed=seed, steps=steps)
    if not path.exists():
        # `make_start` raises FileExistsError if another process has created the directory since the check of
        # `path.exists()`.
        with contextlib.suppress(FileExistsError):
            make_start(task, path, seed=seed, steps=steps, on_step=on_step)
    return path


def start_path(task: Imitated, *, seed: int = 0, steps: int = STEPS) -> Path:
    """Return the directory that `cached_start` would return, without training the model.

    `start_path` does not create the model's directory, which may not exist yet.
    """
    return cache_root() / "starts" / f"{task.name}-{seed}-{_recipe_hash(task, seed=seed, steps=steps)}"


@dataclass(frozen=True)
class MessyRows:
    """Prompts with flawed answers, all of the same length, so that neither padding nor an attention mask is needed.

    Attributes:
        ids: (rows, tokens) int64 token ids.
        labels: (rows, tokens) int64: the token's id if the model is trained to predict the token, else `IGNORED`.
        images: content of the image file that each row shows; empty if the rows show none.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    images: Sequence[bytes] = ()


def messy_batch(task: Imitated, tokenizer: Qwen2Tokenizer, rng: Random, size: int) -> list[MessyRows]:
    """Draw `size` random prompts with flawed answers for supervised training: one result for each length of rows."""
    by_length: dict[int, list[Example]] = {}
    for example in task.examples(tokenizer, rng, size):
        by_length.setdefault(len(example.ids), []).append(example)
    return [_tensors(by_length[length]) for length in sorted(by_length)]


def _tensors(examples: list[Example]) -> MessyRows:
    ids = torch.tensor([example.ids for example in examples])
    trained = torch.tensor([example.trained for example in examples])
    images = [example.image for example in examples if example.image is not None]
    return MessyRows(ids, ids.masked_fill(~trained, IGNORED), images)


def _train(model: PreTrainedModel, task: Imitated, rng: Random, *, steps: int, on_step: OnStep | None) -> None:
    """Train the model with AdamW to imitate the task's flawed answers.

    The learning rate warms up linearly and then decays linearly to zero.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    tokenizer, processor = task.tokenizer(), task.processor() if isinstance(task, PictureTask) else None
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1 - step / steps)
        batch = messy_batch(task, tokenizer, rng, task.examples_per_step)
        num_tokens = sum(int((rows.labels != IGNORED).sum()) for rows in batch)
        optimizer.zero_grad()
        for rows in batch:
            (_answer_loss(model, rows, processor) / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step + 1, steps)
    model.eval()


def _answer_loss(model: Any, rows: MessyRows, processor: Any) -> torch.Tensor:
    """Return the summed cross-entropy of the tokens that have a label, in nats, as a 0-dim tensor.

    The output head is not applied to the tokens before the first label.
    """
    first = int((rows.labels != IGNORED).any(0).nonzero()[0])
    pixels = {}
    if rows.images:
        pictures = [[picture_of(file)] for file in rows.images]
        pixels = processor.image_processor(pictures, return_tensors="pt")
    hidden = model.model(input_ids=rows.ids[:, :-1], use_cache=False, **pixels).last_hidden_state[:, first - 1 :]
    labels = rows.labels[:, first:]
    return cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _save(model: PreTrainedModel, task: Imitated, path: Path) -> None:
    """Write the model, its generation defaults, and its tokenizer or processor to the directory `path`.

    The model files are first written to a temporary directory, which is then renamed to `path`, so that a reader never
    sees an incomplete directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    # Inference engines read sampling defaults from the generation config, so the generation config sets nothing but
    # token ids.
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    try:
        model.save_pretrained(draft)
        task.tokenizer().save_pretrained(draft)
        if isinstance(task, PictureTask):
            task.processor().save_pretrained(draft)
        draft.rename(path)
    except OSError:
        # Renaming a directory fails if the target is a non-empty directory. If `path` is a directory, another process
        # has created the same model while this process trained.
        if not path.is_dir():
            raise
        logger.debug("another process has already created %s, so the model that this process trained is deleted", path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _recipe_hash(task: Imitated, *, seed: int, steps: int) -> str:
    """Hash the source code of tasks and environments, and everything else on which the bits of the weights depend."""
    digest = hashlib.sha256()
    for package in (tasks, environments):
        for source in sorted(Path(package.__path__[0]).glob("*.py")):
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
