"""The memory plan of a run: the processes, their machines and GPUs, and whether the processes fit into memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rltrain.base.errors import ConfigError
from rltrain.run.memory.engines import cache_rows, engine
from rltrain.run.memory.parts import (
    LOG_PROBS,
    MIB,
    PHASES,
    UPDATE,
    WIDTHS,
    FixedSizes,
    ModelShape,
    Node,
    Part,
    ProcessMemory,
    peak,
    said,
    total,
)
from rltrain.run.memory.training import hidden_columns, roles_of, training_ranks
from rltrain.settings.schema import Config

# Largest relative difference between the estimated and the measured peaks of memory.
TOLERANCE = 0.15
# Memory of the driver together with Ray's daemons, and memory of one reward worker, both in bytes.
DRIVER, REWARD_WORKER = 500 * MIB, 80 * MIB


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about the models of a run that the memory plan needs.

    Attributes:
        shape: sizes of the model that is trained.
        others: maps the roles of reward models and teachers to the sizes of their models.
        adapters: number of parameters of the adapters, or None if the whole model is trained.
        needs_critic: whether the run has a critic.
        limits: constant sizes of weight-sync buckets and logits chunks.
    """

    shape: ModelShape
    limits: FixedSizes
    others: Mapping[str, ModelShape]
    adapters: int | None = None
    needs_critic: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory that processes use: either the memory of one GPU, or the total host memory of all machines of the run.

    Attributes:
        name: description of the memory, such as "GPU of each engine".
        capacity: size of the memory in bytes; None if unknown.
        needs: maps each phase of the run to the parts of memory, such as activations, that all processes together need
            in the phase.
    """

    name: str
    capacity: float | None
    needs: Mapping[str, Sequence[Part]]

    @property
    def phase(self) -> str:
        """The phase in which the processes need the most memory."""
        return peak(self.needs)

    @property
    def size(self) -> float:
        """Bytes that the processes need in the phase with the highest memory use."""
        return total(self.needs[self.phase])

    @property
    def fits(self) -> bool:
        """Whether the processes may fit into the memory, given the tolerance of the estimate."""
        return self.capacity is None or self.size * (1 - TOLERANCE) <= self.capacity


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory plan of a run.

    Attributes:
        processes: the memory needs of each kind of process: first the training ranks, then the engine, the reward
            workers and the driver.
        places: size and use of GPU memory, with one `MemoryUse` for all GPUs on which the same kinds of process run,
            followed by the size and use of the total host memory of all machines.
        cache_rows: number of rows (a prompt and its answer, both of the maximum length) that fit into the KV cache that
            an engine reserves; None if the engine reserves none, or if the GPU memory is unknown.
    """

    processes: Sequence[ProcessMemory]
    places: Sequence[MemoryUse]
    cache_rows: float | None


def memory_plan(config: Config, models: ModelFacts, nodes: Sequence[Node]) -> MemoryPlan:
    """Return the memory plan of a run.

    Args:
        config: the whole config.
        models: facts about the models of the run.
        nodes: the machines on which the run takes place.
    """
    on_gpu = any(node.gpus for node in nodes)
    gpu_memory = min((node.gpu_memory for node in nodes if node.gpus and node.gpu_memory), default=None)
    roles = roles_of(config, models.shape, models.others, adapters=models.adapters, needs_critic=models.needs_critic)
    ranks = training_ranks(config, roles, models.limits, on_gpu=on_gpu)
    answers = engine(config, models.shape, models.limits, gpu_memory=gpu_memory, on_gpu=on_gpu)
    others = [_fixed("reward worker", config.placement.reward_workers, REWARD_WORKER), _driver(config, models)]
    processes = [*ranks, answers, *others]
    places = _gpus(config, ranks, answers, gpu_memory) if on_gpu else []
    kind = config.rollout.description
    reserves = bool(kind.gpu_share and gpu_memory) if on_gpu else kind.cache_mb is not None
    rows = cache_rows(config, answers, models.shape) if reserves else None
    return MemoryPlan(processes=processes, places=[*places, _machines(processes, nodes)], cache_rows=rows)


def _fixed(name: str, count: int, size: float) -> ProcessMemory:
    return ProcessMemory(name=name, count=count, host=dict.fromkeys(PHASES, (Part("process", size),)), device={})


def _driver(config: Config, models: ModelFacts) -> ProcessMemory:
    """Return the memory of the driver together with Ray's daemons.

    For exact KLs, the driver's batch contains the hidden states of all response tokens if all roles run in the driver's
    process. Otherwise the hidden states stay in the processes of the training ranks.
    """
    here = config.placement.launcher == "inprocess"
    rollout, rows = config.rollout, config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    widths = sum(hidden_columns(config, models.shape, models.others))
    size = here * rows * rollout.max_response_length * widths * WIDTHS[config.model.dtype]
    hidden = Part("hidden states of a step", size, f"lower trainer.prompts_per_step={config.trainer.prompts_per_step}")
    own = Part("process", DRIVER)
    phases = {phase: (own, hidden) if size and phase in (LOG_PROBS, UPDATE) else (own,) for phase in PHASES}
    return ProcessMemory(name="driver and Ray", count=1, host=phases, device={})


def _gpus(
    config: Config, ranks: Sequence[ProcessMemory], answers: ProcessMemory, capacity: int | None
) -> list[MemoryUse]:
    """Return one `MemoryUse` for each group of GPUs on which the same kinds of process run.

    The attribute `needs` of the `MemoryUse` describes the memory that the processes on one GPU of the group need
    together. If each rank shares its GPU with an engine, all GPUs are in one group. If ranks and engines have separate
    GPUs, each GPU has only one process, and the GPUs form one group for each kind of process.
    """
    if not config.placement.share_ranks or not answers.device:
        alone = [MemoryUse(name=f"GPU of each {one.name}", capacity=capacity, needs=one.device) for one in ranks]
        if answers.device:
            alone.append(MemoryUse(name="GPU of each engine", capacity=capacity, needs=answers.device))
        return alone
    (rank,) = ranks
    if config.takes_turns:
        needs = {phase: [*rank.device[phase], *answers.device[phase]] for phase in PHASES}
    else:
        # If training ranks and engines do not take turns on a GPU, the engine never frees its GPU memory, so the
        # engine's peak memory counts in every phase of the run.
        needs = {phase: [*rank.device[phase], *answers.device[peak(answers.device)]] for phase in PHASES}
    return [MemoryUse(name="GPU of each rank and engine", capacity=capacity, needs=needs)]


def _machines(processes: Sequence[ProcessMemory], nodes: Sequence[Node]) -> MemoryUse:
    """Return a `MemoryUse` for the host memory of all machines together, with the memory that all processes need.

    A process does not return freed memory to the system, so the peaks of all processes add up.
    """
    parts = [
        Part(part.what, part.size * process.count, part.remedy)
        for process in processes
        for part in process.host[peak(process.host)]
    ]
    known = [node.memory for node in nodes]
    capacity = None if None in known else float(sum(memory or 0 for memory in known))
    name = nodes[0].name if len(nodes) == 1 else f"{len(nodes)} nodes"
    return MemoryUse(name=f"memory of {name}", capacity=capacity, needs=dict.fromkeys(PHASES[:1], parts))


def require_room(config: Config, plan: MemoryPlan) -> None:
    """Raise ConfigError if the run certainly does not fit into memory.

    Raises:
        ConfigError: a GPU or the machines have too little memory, or the KV cache is too small for one answer.
    """
    for place in plan.places:
        if not place.fits:
            raise ConfigError(_refusal(place))
    rows, rollout = plan.cache_rows, config.rollout
    if rows is not None and rows < 1:
        engine, on_gpu = rollout.description, any(process.device for process in plan.processes)
        if on_gpu and engine.gpu_share is not None:
            way = f"raise {engine.gpu_share(rollout)}"
        else:
            assert engine.cache_mb is not None, "`cache_rows` is None unless the engine reserves its KV cache"
            size = engine.cache_mb(rollout)
            way = f"use {size.key}={math.ceil(size.value / rows)} or more"
        longest = rollout.max_prompt_length + rollout.max_response_length
        raise ConfigError(
            f"memory: the KV cache of an engine has room for only {rows * longest:,.0f} tokens, but a prompt and its "
            f"answer have up to {longest:,} tokens; {way}, or lower rollout.max_response_length="
            f"{rollout.max_response_length}"
        )


def _refusal(place: MemoryUse) -> str:
    assert place.capacity is not None, "memory of unknown size always counts as large enough"
    parts = place.needs[place.phase]
    # The error message gives the remedy for only one part of the memory: the largest part that has a remedy, because
    # reducing the largest part can save the most memory.
    best = max((part for part in parts if part.remedy), key=lambda part: part.size, default=None)
    what = f"; {best.what} take {said(best.size)}: {best.remedy}" if best else "; use a smaller model"
    when = f" in the phase {place.phase}" if len(place.needs) > 1 else ""
    return (
        f"memory: {place.name}: the run needs about {said(place.size)}{when}, but there is {said(place.capacity)}{what}"
    )
