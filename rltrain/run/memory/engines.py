"""The memory of a rollout engine: weights, KV cache and the activations of a generation step."""

from rltrain.run.memory.parts import (
    GENERATE,
    GPU_CONTEXT,
    LOG_PROBS,
    MASTER,
    MIB,
    PHASES,
    SAVE,
    START,
    SYNC,
    UPDATE,
    WIDTHS,
    FixedSizes,
    ModelShape,
    Part,
    ProcessMemory,
    total,
)
from rltrain.settings.engine_description import Setting
from rltrain.settings.schema import Config

# GPU memory in bytes that CUDA still uses while an engine sleeps.
ASLEEP = 700 * MIB
# Bytes that a generation step stores for each logit: the logit, the scaled logit and the probability in float32, and a
# cumulative sum in float64.
LOGIT_BYTES = 4 + 4 + 4 + 8


def kv_token_bytes(config: Config, shape: ModelShape) -> float:
    """Return the bytes that one token takes in the KV cache of one shard of an engine."""
    return 2 * shape.layers * shape.keys * WIDTHS[config.model.dtype] / config.rollout.shards


def longest_row(config: Config) -> int:
    """Return the maximum number of tokens of a prompt and its answer."""
    return config.rollout.max_prompt_length + config.rollout.max_response_length


def rows_at_once(config: Config) -> int:
    """Return the largest number of answers that one engine generates at a time."""
    step = config.sequences_per_step * (1 + config.trainer.steps_ahead)
    evaluation = config.data.val_size * config.trainer.eval_samples if config.data.evaluations else 0
    return min(config.rollout.max_concurrent_sequences, -(-max(step, evaluation) // config.placement.rollout_replicas))


def engine(
    config: Config, shape: ModelShape, limits: FixedSizes, *, gpu_memory: int | None, on_gpu: bool
) -> ProcessMemory:
    """Return the memory of one engine shard in each phase, and the number of engine shards of the run.

    Args:
        config: the whole config.
        shape: sizes of the model.
        limits: constant sizes of weight-sync buckets and logits chunks.
        gpu_memory: memory of one GPU in bytes; None on a CPU, or if unknown.
        on_gpu: whether engines run on GPUs.
    """
    count, kind = config.placement.rollout_replicas * config.rollout.shards, config.rollout.description
    base = Part("libraries", kind.library_bytes)
    if not kind.generates:
        return ProcessMemory(name="engine", count=count, host=_always([base]), device={})
    if on_gpu and kind.gpu_share is not None:
        return ProcessMemory(
            name="engine",
            count=count,
            host=_always([base]),
            device=_share_of_gpu(config, shape, limits, kind.gpu_share(config.rollout), gpu_memory or 0),
        )
    weights = Part("engine weights", shape.parameters * WIDTHS[config.model.dtype] / config.rollout.shards)
    size = None if on_gpu or kind.cache_mb is None else kind.cache_mb(config.rollout)
    cache = _growing_cache(config, shape) if size is None else Part("KV cache", size.value * MIB, f"lower {size}")
    reserved = [] if size is None else [cache]
    working = _working(config, shape)
    phases = {phase: [weights, *([cache, *working] if phase == GENERATE else reserved)] for phase in PHASES}
    phases[SYNC] = [*phases[SYNC], *_received(config, shape, limits)]
    if on_gpu:
        return ProcessMemory(name="engine", count=count, host=_always([base]), device=phases)
    phases = {phase: [base, *parts] for phase, parts in phases.items()}
    return ProcessMemory(name="engine", count=count, host=phases, device={})


def _always(parts: list[Part]) -> dict[str, list[Part]]:
    return dict.fromkeys(PHASES, parts)


def _growing_cache(config: Config, shape: ModelShape) -> Part:
    rows = rows_at_once(config)
    # When a layer's KV cache grows, the old tensor is copied into a larger one, so one layer's KV cache exists twice.
    size = rows * longest_row(config) * kv_token_bytes(config, shape) * (1 + 1 / shape.layers)
    most = config.rollout.max_concurrent_sequences
    return Part("KV cache", size, f"lower rollout.max_concurrent_sequences={most} below {rows}")


def _working(config: Config, shape: ModelShape) -> list[Part]:
    """Return the memory of the activations and the logits in a generation step.

    The engine computes a prompt only once for all answers to the prompt.
    """
    rows, width = rows_at_once(config), WIDTHS[config.model.dtype]
    prompts = -(-rows // config.rollout.samples_per_prompt) * config.rollout.max_prompt_length
    activations = prompts * (3 * shape.hidden + 3 * shape.feed_forward) * width
    return [Part("activations", activations), Part("logits", rows * shape.vocabulary * LOGIT_BYTES)]


def _received(config: Config, shape: ModelShape, limits: FixedSizes) -> list[Part]:
    """Return the memory in which an engine receives the buckets of a weight sync.

    On a single machine, the engine reads the weight-sync buckets from a shared file. The memory plan counts the shared
    file with the weight-sync buckets as memory of the training ranks, not of the engine.
    """
    if not config.placement.on_cluster:
        return []
    return [_received_buckets(config, shape, limits)]


def _received_buckets(config: Config, shape: ModelShape, limits: FixedSizes) -> Part:
    bucket = max(limits.bucket_bytes, shape.largest * MASTER)
    if config.rollout.weight_transport == "object_store":
        return Part("sync buckets", bucket)
    # While an engine loads one bucket of weights, the engine already receives the next bucket, so two buckets are in
    # memory. With several training ranks, the memory must also hold the ranks' parts of the next bucket, which the
    # engine joins into the whole bucket. The parts are together as large as one bucket, so three buckets are counted.
    return Part("sync buckets", bucket * (2 if config.placement.actor_ranks == 1 else 3))


def _share_of_gpu(
    config: Config, shape: ModelShape, limits: FixedSizes, share: Setting, gpu_memory: int
) -> dict[str, list[Part]]:
    """Return the GPU memory of an engine that takes a fixed share of the GPU, except while the engine sleeps.

    With the transport `nccl`, the rollout worker receives buckets in GPU memory, from the first weight sync on.
    """
    weights = shape.parameters * WIDTHS[config.model.dtype] / config.rollout.shards
    cache = Part("KV cache", max(0.0, share.value * gpu_memory - weights), f"lower {share}")
    awake = [Part("engine weights", weights), cache]
    if config.rollout.weight_transport == "nccl":
        receiving = [*awake, Part("CUDA and NCCL of the weight sync", GPU_CONTEXT)]
        syncing = [*receiving, _received_buckets(config, shape, limits)]
        return _always(receiving) | {START: awake, SYNC: syncing}
    if not config.takes_turns:
        return _always(awake)
    asleep = [Part("CUDA", ASLEEP)]
    loading = [Part("CUDA", ASLEEP), Part("engine weights", weights)]
    return {START: awake, GENERATE: awake, LOG_PROBS: asleep, UPDATE: asleep, SYNC: loading, SAVE: awake}


def cache_rows(config: Config, process: ProcessMemory, shape: ModelShape) -> float:
    """Return how many answers of the maximum length fit at a time into the KV cache that an engine reserves."""
    phases = process.device or process.host
    room = total([part for part in phases[GENERATE] if part.what == "KV cache"])
    return room / (kv_token_bytes(config, shape) * longest_row(config))
