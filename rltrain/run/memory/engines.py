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
from rltrain.settings.schema import Config

# Bytes of host memory that Python, torch and other libraries take in an engine process, before a model is loaded.
VLLM_BASE, HF_BASE, STORED_BASE = 800 * MIB, 370 * MIB, 200 * MIB
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
    count = config.placement.rollout_replicas * config.rollout.shards
    if config.rollout.engine == "stored":
        return ProcessMemory(name="engine", count=count, host=_always([Part("libraries", STORED_BASE)]), device={})
    base = Part("libraries", VLLM_BASE if config.rollout.engine == "vllm" else HF_BASE)
    if on_gpu and config.rollout.engine == "vllm":
        return ProcessMemory(
            name="engine",
            count=count,
            host=_always([base]),
            device=_vllm_on_gpu(config, shape, limits, gpu_memory or 0),
        )
    weights = Part("engine weights", shape.parameters * WIDTHS[config.model.dtype] / config.rollout.shards)
    cache = _vllm_cache(config) if config.rollout.engine == "vllm" else _hf_cache(config, shape)
    reserved = [cache] if config.rollout.engine == "vllm" else []
    working = _working(config, shape)
    phases = {phase: [weights, *([cache, *working] if phase == GENERATE else reserved)] for phase in PHASES}
    phases[SYNC] = [*phases[SYNC], *_received(config, shape, limits)]
    if on_gpu:
        return ProcessMemory(name="engine", count=count, host=_always([base]), device=phases)
    phases = {phase: [base, *parts] for phase, parts in phases.items()}
    return ProcessMemory(name="engine", count=count, host=phases, device={})


def _always(parts: list[Part]) -> dict[str, list[Part]]:
    return dict.fromkeys(PHASES, parts)


def _vllm_cache(config: Config) -> Part:
    assert config.rollout.vllm is not None, "a config that selects the vLLM engine must set `rollout.vllm`"
    size = config.rollout.vllm.kv_cache_mb
    return Part("KV cache", size * MIB, f"lower rollout.vllm.kv_cache_mb={size}")


def _hf_cache(config: Config, shape: ModelShape) -> Part:
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


def _vllm_on_gpu(config: Config, shape: ModelShape, limits: FixedSizes, gpu_memory: int) -> dict[str, list[Part]]:
    """Return the GPU memory of a vLLM engine, which takes a fixed share of the GPU except while the engine sleeps.

    With the transport `nccl`, the rollout worker receives buckets in GPU memory, from the first weight sync on.
    """
    assert config.rollout.vllm is not None, "a config that selects the vLLM engine must set `rollout.vllm`"
    share = config.rollout.vllm.gpu_memory_utilization
    weights = shape.parameters * WIDTHS[config.model.dtype] / config.rollout.shards
    remedy = f"lower rollout.vllm.gpu_memory_utilization={share:g}"
    awake = [Part("engine weights", weights), Part("KV cache", max(0.0, share * gpu_memory - weights), remedy)]
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
    """Return how many answers of the maximum length fit into the KV cache of a vLLM engine at a time."""
    phases = process.device or process.host
    room = total([part for part in phases[GENERATE] if part.what == "KV cache"])
    return room / (kv_token_bytes(config, shape) * longest_row(config))
