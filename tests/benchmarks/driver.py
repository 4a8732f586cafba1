"""Measures how much CPU time the driver needs for a training step, for different numbers of training ranks.

A measured step has 1,024 sequences. The step has the parts of `train_step`: reference log-probs, old log-probs, credit
assignment, the split into mini-batches, and the update with its metrics. The workers compute nothing and return columns
of zeros. By default, the workers are objects in the benchmark's process, whose arguments and results are pickled and
copied as Ray would do. Small numbers of ranks are also measured with real Ray actors, because calling a Ray actor also
costs the driver CPU time. All times are CPU seconds of the driver, without the CPU seconds of the workers, so that
other programs on the machine hardly affect the results. The benchmark also counts the bytes that the driver sends to
the workers in a step.

    python -m tests.benchmarks.driver
"""

import asyncio
import collections
import contextlib
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rltrain.batch.data_proto import DataProto, jagged, offsets_of
from rltrain.batch.partial_batches import joined_rows
from rltrain.batch.row_assignment import minibatches
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from rltrain.trajectories.token_rewards import assign_rewards, choose_trained, estimate_advantages, kl_controller
from tests.benchmarks.row import Row
from workers.cluster.processes import RayProcess, Role, Shared, results
from workers.cluster.worker_process import Host
from workers.training.dispatch import Minibatch, UpdateResult
from workers.training.shared_columns import FORWARD, log_probs_columns, update_columns
from workers.training.worker_group import WorkerGroup

COMMAND = "python -m tests.benchmarks.driver"
RANKS, RAY_RANKS = (1, 8, 64, 256), (1, 8)
PROMPTS, SAMPLES, SHORTEST, LONGEST, ROUNDS = 128, 8, 16, 256, 5
OVERRIDES = [
    "algorithm=grpo", f"trainer.prompts_per_step={PROMPTS}", f"trainer.prompts_per_minibatch={PROMPTS // 4}",
    f"rollout.samples_per_prompt={SAMPLES}", f"rollout.max_response_length={LONGEST}",
]  # fmt: skip
SUMS = ("clip_fraction", "ratio_mean", "ppo_kl", "entropy", "ref_kl")


class Idle:
    """A worker role that computes nothing and returns zeros in the shapes of real results."""

    def compute(self, batch: DataProto, microbatches: list[list[int]], name: str) -> DataProto:
        """Return a batch whose only column `name` has a zero for each response token of the micro-batches' rows."""
        part = batch[[row for rows in microbatches for row in rows]]
        return part.with_values("responses", **{name: torch.zeros(len(part.values("responses")))}).select([name])

    def compute_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Return a batch whose column `old_log_probs` contains only zeros."""
        return self.compute(batch, microbatches, "old_log_probs")

    def compute_ref_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Return a batch whose column `ref_log_probs` contains only zeros."""
        return self.compute(batch, microbatches, "ref_log_probs")

    def update(self, batch: DataProto, plan: list[Minibatch], entropy_coef: float) -> UpdateResult:
        """Return an update result whose metrics are all zero."""
        steps = [{"grad_norm": 0.0, "lr": 0.0, "skipped": 0.0} for _ in plan]
        tokens = sum(minibatch.num_tokens for minibatch in plan)
        return UpdateResult(dict.fromkeys(SUMS, 0.0), {"policy_loss": 0.0}, tokens, steps)


@dataclass
class Stored:
    """A pickled value whose buffers were copied once, like a value in Ray's object store."""

    stream: bytes
    buffers: list[bytes]

    @classmethod
    def of(cls, value: Any) -> "Stored":
        """Pickle a value and copy its buffers."""
        import ray.cloudpickle

        buffers: list[pickle.PickleBuffer] = []
        stream = ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return cls(stream, [bytes(buffer.raw()) for buffer in buffers])

    @property
    def size(self) -> int:
        """Return the number of bytes of the pickled value."""
        return len(self.stream) + sum(map(len, self.buffers))

    def get(self) -> Any:
        """Unpickle the value."""
        return pickle.loads(self.stream, buffers=self.buffers)


class PickledProcess:
    """A simulated rank in the driver's process, whose arguments and results are pickled as Ray would pickle them.

    Attributes:
        elsewhere: CPU seconds spent on work that a real rank would do in its own process.
        received: bytes that the driver has sent, as arguments of calls and as values in the simulated object store.
    """

    concurrent, how_lost = True, ""

    def __init__(self) -> None:
        self.role, self.elsewhere, self.received = Idle(), 0.0, 0

    def share(self, value: Any) -> Any:
        """Put a value into the simulated object store."""
        return self._send(value)

    def start(self, role: str, method: str, *args: Any) -> "Answered":
        """Pickle the arguments, call the role's method immediately, and return the call with its pickled result."""
        sent = [arg if isinstance(arg, Shared) else self._send(arg) for arg in args]
        begin = time.process_time()
        given = [joined(arg) if isinstance(arg, Shared) else arg.get() for arg in sent]
        result = Stored.of(getattr(self.role, method)(*given))
        self.elsewhere += time.process_time() - begin
        return Answered(self, result)

    def _send(self, value: Any) -> Stored:
        stored = Stored.of(value)
        self.received += stored.size
        return stored


def joined(shared: Shared) -> DataProto:
    """Join the stored parts of a batch into the rows and columns that a rank reads."""
    parts: list[DataProto] = [reference.get() for reference in shared.references]
    return joined_rows(parts, shared.rows_of_parts, shared.rows, shared.columns)


@dataclass
class Answered:
    """A finished call of a simulated rank, with the interface of `processes.Pending`."""

    process: PickledProcess
    result: Stored

    @property
    def outcome(self) -> Any:
        """Return the unpickled result of the call."""
        return self.result.get()


Ranks = Sequence[Role[Idle]]


def pickled(count: int) -> Ranks:
    """Return `count` simulated ranks, each with the role `Idle`."""
    return [Role(PickledProcess(), "idle") for _ in range(count)]


def rollouts(prompts: int = PROMPTS, shortest: int = SHORTEST, longest: int = LONGEST) -> DataProto:
    """Return a scored batch with log-uniform response lengths, like a batch of the rollout collector.

    Args:
        prompts: number of prompts, each with SAMPLES answers.
        shortest, longest: range of the response lengths, in tokens.
    """
    rows = prompts * SAMPLES
    draws = torch.rand(rows, generator=torch.Generator().manual_seed(0))
    lengths = (shortest * (longest / shortest) ** draws).long()
    tokens = int(lengths.sum())
    nested = torch.nested.nested_tensor_from_jagged(torch.ones(tokens, dtype=torch.int64), offsets_of(lengths))
    batch = DataProto.from_dict(
        {
            "prompts": jagged([[1] * (8 + row // SAMPLES % 32) for row in range(rows)], torch.int64),
            "responses": nested, "uid": torch.arange(prompts).repeat_interleave(SAMPLES),
            "valid": torch.ones(rows, dtype=torch.bool), "failed": torch.zeros(rows, dtype=torch.bool),
            "scores": draws, "reward_components": draws[:, None],
        },
        {"finish_reason": ["stop"] * rows, "prompt_text": ["what is the median of 3 1 2?"] * rows,
         "response_text": ["it is two, since one is less and three is more"] * rows, "reward_error": [None] * rows},
    )  # fmt: skip
    return batch.with_values(
        "responses", rollout_log_probs=torch.zeros(tokens), policy_version=torch.zeros(tokens, dtype=torch.int64),
        response_mask=torch.ones(tokens, dtype=torch.bool),
    )  # fmt: skip


Clock = Callable[[str], Any]


async def step(batch: DataProto, ranks: Ranks, config: Config, clock: Clock) -> None:
    """Run the driver's part of one training step, with each phase inside the context manager `clock(phase)`."""
    group = WorkerGroup(ranks)  # The store has no columns of a new group yet.
    budget = 4 * config.rollout.max_response_length
    read, trained_on = log_probs_columns(config.algorithm), update_columns(config.algorithm)
    with clock("log-probs"):
        batch = batch.union(await group.rows(Idle.compute_ref_log_probs, batch, FORWARD, max_tokens=budget))
        batch = batch.union(await group.rows(Idle.compute_log_probs, batch, read, max_tokens=budget))
    with clock("credit"):
        batch, _ = assign_rewards(batch, config, kl_controller(config.algorithm.kl_in_reward))
        batch, _ = estimate_advantages(batch, config.algorithm)
        batch = choose_trained(batch, config.algorithm)
    with clock("mini-batches"):
        uids = batch.batch["uid"].tolist()
        plan = minibatches(uids, config.minibatches_per_epoch, config.trainer.epochs_per_step, seed=0, step=0)
    with clock("update"):
        await group.update(Idle.update, batch, trained_on, plan, budget, 0.0)


async def measured(ranks: Ranks, batch: DataProto, config: Config, rounds: int = ROUNDS) -> dict[str, float]:
    """Run `rounds + 1` steps, and return the driver's median CPU seconds per phase and per step ("all").

    The first step is a warm-up, which the medians do not include.
    """
    seen: dict[str, list[float]] = collections.defaultdict(list)

    def elsewhere() -> float:
        return sum(rank.process.elsewhere for rank in ranks if isinstance(rank.process, PickledProcess))

    @contextlib.contextmanager
    def clock(phase: str) -> Iterator[None]:
        begin, before = time.process_time(), elsewhere()
        yield
        seen[phase].append(time.process_time() - begin - (elsewhere() - before))

    for _ in range(rounds + 1):
        await step(batch, ranks, config, clock)
    phases = {phase: statistics.median(times[1:]) for phase, times in seen.items()}
    return phases | {"all": statistics.median([sum(times) for times in zip(*seen.values(), strict=True)][1:])}


def bytes_per_step(count: int, batch: DataProto, config: Config) -> int:
    """Return the number of bytes that the driver sends to `count` simulated ranks in one step."""
    ranks = pickled(count)
    asyncio.run(step(batch, ranks, config, lambda _: contextlib.nullcontext()))
    return sum(rank.process.received for rank in ranks if isinstance(rank.process, PickledProcess))


async def on_ray(batch: DataProto, config: Config) -> dict[int, dict[str, float]]:
    """Measure the driver's CPU seconds with Ray actors as ranks, and return the results by number of ranks."""
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    ray.init(address="local", include_dashboard=False, num_cpus=2, logging_level="error", log_to_driver=False)
    try:
        environment = {"OMP_NUM_THREADS": "1"}
        actors = [ray.remote(num_cpus=0)(Host).remote(environment) for _ in range(max(RAY_RANKS))]
        processes = [RayProcess(actor, f"idle rank {number}") for number, actor in enumerate(actors)]
        await results([process.build("idle", "tests.benchmarks.driver:Idle") for process in processes])
        ranks: Ranks = [Role(process, "idle") for process in processes]
        return {count: await measured(ranks[:count], batch, config) for count in RAY_RANKS}
    finally:
        ray.shutdown()


def slope(times: dict[int, float]) -> tuple[float, float]:
    """Fit a least-squares line to seconds against the number of ranks, and return its intercept and its slope."""
    per_rank, base = np.polyfit(list(times), list(times.values()), 1)
    return float(base), float(per_rank)


def table(results: dict[str, dict[str, float]]) -> str:
    """Format the measured times as a text table with one line per number of ranks and one column per phase."""
    phases = list(next(iter(results.values())))
    lines = [f"{'ranks':>10}" + "".join(f"{phase:>14}" for phase in phases) + "   (driver CPU ms per step)"]
    lines += [f"{name:>10}" + "".join(f"{1e3 * t[p]:14.1f}" for p in phases) for name, t in results.items()]
    return "\n".join(lines)


def run() -> list[Row]:
    """Print the table of all times, and return a row with the driver's time for 256 ranks relative to one rank."""
    torch.set_num_threads(1)
    config, batch = compose(OVERRIDES)[0], rollouts()
    simulated = {ranks: asyncio.run(measured(pickled(ranks), batch, config)) for ranks in RANKS}
    actors = asyncio.run(on_ray(batch, config))
    sys.stdout.write(
        table({str(n): t for n, t in simulated.items()} | {f"{n} (Ray)": t for n, t in actors.items()}) + "\n"
    )
    totals = {ranks: times["all"] for ranks, times in simulated.items()}
    base, per_rank = slope(totals)
    few, many = totals[RANKS[0]], totals[RANKS[-1]]
    extra = {f"ms_{n}_ranks": 1e3 * t for n, t in totals.items()} | {"ms_per_rank": 1e3 * per_rank}
    extra |= {f"ms_{n}_ray_actors": 1e3 * times["all"] for n, times in actors.items()}
    notes = (
        f"{len(batch)} sequences, {len(batch.values('responses')):,} response tokens, GRPO, 4 mini-batches; "
        f"the ranks compute nothing; CPU time, fitted: {1e3 * base:.0f} ms + {1e3 * per_rank:.2f} ms per rank"
    )
    sent = {ranks: bytes_per_step(ranks, batch, config) for ranks in RANKS}
    fewest, most = sent[RANKS[0]], sent[RANKS[-1]]
    return [
        Row("CPU time of the driver in a step, 256 ranks against 1", many / few, "times the time with 1 rank",
            "", f"{1e3 * many:.0f} ms", f"{1e3 * few:.0f} ms", notes, COMMAND, extra),
        Row("bytes that the driver sends in a step, 256 ranks against 1", most / fewest, "times the bytes with 1 rank",
            "", f"{most / 1e6:.2f} MB", f"{fewest / 1e6:.2f} MB", "arguments of calls, and values in the object store; "
            "the same step", COMMAND, {f"bytes_{n}_ranks": size for n, size in sent.items()}),
    ]  # fmt: skip


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
