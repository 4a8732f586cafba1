"""Data classes of the memory plan: sizes of a model, the parts of a process's memory, and the machines of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20  # Bytes of a mebibyte.
# Phases of a run, in the order in which they begin. A training step consists of the phases "generate" to "sync".
START, GENERATE, LOG_PROBS, UPDATE, SYNC, SAVE = PHASES = ("start", "generate", "log-probs", "update", "sync", "save")
WIDTHS = {"float32": 4, "bfloat16": 2}  # Size in bytes of one number of each dtype.
# Bytes per parameter: of the master weight, of the gradient, and of AdamW's two moments together. Master weights,
# gradients and AdamW's moments are float32, whatever the model's dtype.
MASTER, GRADIENT, MOMENTS = 4, 4, 8
# GPU memory in bytes that CUDA and NCCL use in each process.
GPU_CONTEXT = 700 * MIB


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model that determine how much memory the model needs. Sizes are numbers of elements, not of bytes.

    Attributes:
        parameters: number of all parameters; tied parameters count once.
        layer: number of parameters of the largest decoder layer.
        outside: number of parameters outside the decoder layers: embeddings, last norm and output head.
        largest: number of elements of the largest parameter tensor.
        layers: number of decoder layers.
        hidden: width of the hidden states.
        queries, keys: width of all query heads together, and of all key heads together.
        feed_forward: feed-forward width for one token; with experts (MoE), summed over the experts that a token uses.
        vocabulary: number of rows of the output head.
        gated: whether the feed-forward part has a gate.
        norms_heads: whether queries and keys are normalised.
        tied: whether the output head and the input embedding share one weight matrix.
        capped: whether the attention has soft caps or sinks.
        divisible: number of parameters of the largest decoder layer that tensor parallelism divides.
        experts: number of parameters of the experts of the largest decoder layer.
        divides_heads: whether tensor parallelism divides attention heads.
    """

    parameters: int
    layer: int
    outside: int
    largest: int
    layers: int
    hidden: int
    queries: int
    keys: int
    feed_forward: int
    vocabulary: int
    gated: bool = True
    norms_heads: bool = False
    tied: bool = False
    capped: bool = False
    divisible: int = 0
    experts: int = 0
    divides_heads: bool = True

    @property
    def head(self) -> int:
        """Number of elements of the output head."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """Sizes of weight-sync buckets, logits chunks and attention scores, which are constants in rltrain's code.

    Attributes:
        bucket_bytes: size of a weight-sync bucket in bytes. If a tensor is larger than `bucket_bytes`, a bucket is as
            large as this tensor.
        buckets: number of weight-sync buckets in memory at a time.
        chunk: number of logits that the output head computes at a time.
        scores: number of attention scores that are computed at a time in layers with soft caps or attention sinks.
    """

    bucket_bytes: int
    buckets: int
    chunk: int
    scores: int = 0


@dataclass(frozen=True)
class Part:
    """One part of a process's memory.

    Attributes:
        what: description of this part of the process's memory, such as "activations".
        size: bytes.
        remedy: what the user can do to make this part of the process's memory smaller, such as "lower
            rollout.vllm.kv_cache_mb=4096"; "" if the user can do nothing.
    """

    what: str
    size: float
    remedy: str = ""


Phases = Mapping[str, Sequence[Part]]


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """The memory that each process of one kind needs, and the number of processes of that kind.

    Attributes:
        name: kind of the process, such as "training rank".
        count: number of processes whose kind is `name`.
        host: maps each phase to the parts of the process's memory that are in host memory.
        device: maps each phase to what the process holds in GPU memory, such as parameters and activations; {} for a
            process without a GPU.
    """

    name: str
    count: int
    host: Phases
    device: Phases


@dataclass(frozen=True)
class Node:
    """One machine of a cluster: a real machine, or a machine that the config describes for `--plan`.

    Attributes:
        name: name of the machine, for messages.
        memory: bytes of the machine's memory; None if unknown.
        gpus: number of the machine's GPUs.
        gpu_memory: bytes of memory of the machine's smallest GPU; None if the machine has no GPU, or if unknown.
    """

    name: str
    memory: int | None
    gpus: int = 0
    gpu_memory: int | None = None


def total(parts: Sequence[Part]) -> float:
    """Return the sum of the sizes of all parts in bytes."""
    return sum(part.size for part in parts)


def peak(phases: Phases) -> str:
    """Return the phase in which a process needs the most memory."""
    return max(PHASES, key=lambda phase: total(phases.get(phase, ())))


def said(size: float) -> str:
    """Return a number of bytes as text, such as "1.5 GB"."""
    unit, name = (2**30, "GB") if size >= 2**30 else (2**20, "MB")
    return f"{size / unit:,.1f} {name}"
