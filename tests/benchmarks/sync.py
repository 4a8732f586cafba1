"""Times a weight sync of 120M parameters from two FSDP2 ranks to a vLLM engine, and times gathering and loading alone.

The time for gathering alone is measured by calling `full_tensor()` on each tensor on both ranks and discarding the
results. The time for loading alone is the time that the engine takes to reload its weights from tensors in its own
memory. A weight sync gathers, transfers and loads the weights. Weight syncs are timed both with and without the checks
that the engine computes with exactly the weights that the ranks sent.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from rltrain.tasks.tokenizer import char_tokenizer
from tests.benchmarks.row import Row
from workers.cluster.processes import Pending, Role, results
from workers.cluster.ray_connection import connect, disconnect
from workers.placement import Workers
from workers.placement import start as start_workers
from workers.sync.weight_sync import sync

COMMAND = "python -m tests.benchmarks.sync"
ROUNDS, PAIRS = 15, 100
SHAPE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 11,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "dtype": "float32", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SETTINGS = [
    "placement.actor_ranks=2", "placement.rollout_replicas=1", "placement.threads_per_worker=1", "model.dtype=float32",
    "rollout.vllm.process=inprocess",
]  # fmt: skip


def make_model(folder: Path) -> int:
    """Save a random model in Hugging Face form, and return its size in bytes."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


# Functions that run in the workers' processes.


def gather(host: Any) -> None:
    """Gather each of the model's tensors in full on the calling rank, one after the other."""
    for parameter in host.roles["actor"].model.parameters():
        parameter.detach().full_tensor()


def own_tensors(host: Any, path: str) -> None:
    """Keep the weights in the engine's memory."""
    host.weights = {name: p.detach() for name, p in Qwen2ForCausalLM.from_pretrained(path).named_parameters()}


def reload(host: Any) -> None:
    """Reload the engine's weights from tensors in the engine's memory."""
    from vllm.config import set_current_vllm_config

    role = host.roles["rollout"]

    def run() -> None:
        worker = role.engine.engine.model_executor.driver_worker.worker
        transfer = worker.weight_transfer_engine
        with set_current_vllm_config(worker.vllm_config):
            transfer.start_weight_update()
            transfer.model.load_weights(host.weights.items())
            transfer.finish_weight_update()

    role._run("benchmark", run)


def forget_peak(host: Any) -> int:
    """Reset the process's peak memory (VmHWM), and return its current memory (VmRSS) in kB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory(host, "VmRSS")


def memory(host: Any, which: str) -> int:
    """Return the value of the line `which` of /proc/self/status, in kB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[which].split()[0])


# Functions that measure the times and the memory of a weight sync.


async def on(roles: Sequence[Role[Any]], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function` in the process of each role, with the process's `Host` as the first argument."""
    processes: list[Any] = [role.process for role in roles]
    return await results([Pending(one, one.actor.__ray_call__.remote(function, *args)) for one in processes])


def engines(workers: Workers) -> list[Role[Any]]:
    """Return the engine of each replica."""
    return [replica.role for replica in workers.rollout.replicas]


async def seconds(function: Callable[[], Awaitable[Any]]) -> float:
    """Return how many seconds a call of `function` takes."""
    begin = time.perf_counter()
    await function()
    return time.perf_counter() - begin


async def measure(workers: Workers) -> dict[str, list[float]]:
    """Time each kind of operation in turn, and return the seconds of each round by kind."""

    def send(check: bool) -> Callable[[], Awaitable[None]]:
        return lambda: sync(workers.actor.ranks, engines(workers), 1, check=check)

    kinds: dict[str, Callable[[], Awaitable[Any]]] = {
        "gather": lambda: on(workers.actor.ranks, gather),
        "checked": send(True),
        "load": lambda: on(engines(workers), reload),
        "unchecked": send(False),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS + 1):  # The first round is a warm-up and is not recorded.
        for kind, function in kinds.items():
            taken = await seconds(function)
            if number:
                found[kind].append(taken)
    for number in range(PAIRS):  # Many syncs are timed, because syncs vary by more than the checks cost.
        for kind in ("checked", "unchecked")[:: 1 if number % 2 else -1]:
            found[kind].append(await seconds(kinds[kind]))
    return found


async def peak(workers: Workers) -> int:
    """Return the difference in bytes between rank 0's peak memory during a weight sync and its memory before."""
    first = workers.actor.ranks[:1]
    (before,) = await on(first, forget_peak)
    await sync(workers.actor.ranks, engines(workers), 2, check=True)
    (highest,) = await on(first, memory, "VmHWM")
    return (highest - before) * 1024


def rows(found: dict[str, list[float]], size: int, extra: int) -> list[Row]:
    """Make the rows of the benchmark table."""
    middle = {kind: statistics.median(values[:ROUNDS]) for kind, values in found.items()}
    alone = [gathered + loaded for gathered, loaded in zip(found["gather"], found["load"], strict=True)]
    notes = (
        f"{size / 1e6:.0f} MB, float32, 2 FSDP2 ranks (gloo) to 1 vLLM in its own process, 1 thread each, medians of "
        f"{ROUNDS} rounds; gather {middle['gather']:.2f} s, load {middle['load']:.2f} s; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    ours = f"{middle['checked']:.2f} s"
    ratio = statistics.median(c / a for c, a in zip(found["checked"][:ROUNDS], alone, strict=True))
    quiet = {kind: statistics.quantiles(found[kind][ROUNDS:])[0] for kind in ("checked", "unchecked")}
    largest = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 4
    return [
        Row("weight sync", ratio, "of gathering and loading alone", "<= 1.5", ours,
            f"{statistics.median(alone):.2f} s", notes, COMMAND, {f"{kind}_s": s for kind, s in middle.items()}),
        Row("weight sync: time of the checks", 1 - quiet["unchecked"] / quiet["checked"], "of the sync", "< 0.05",
            f"{quiet['checked']:.3f} s", f"{quiet['unchecked']:.3f} s without checks",
            f"lower quartiles of {PAIRS} syncs of each kind in turn, because other programs only add time; "
            f"{(quiet['checked'] - quiet['unchecked']) / statistics.median(alone):.1%} of gathering and loading alone",
            COMMAND),
        Row("weight sync: memory of rank 0", extra / size, "of the model", "about two buckets",
            f"{extra / 1e6:.0f} MB", f"{2 * largest / 1e6:.0f} MB are two buckets (the largest tensor sets their size)",
            notes, COMMAND),
    ]  # fmt: skip


def run() -> list[Row]:
    """Measure on a Ray cluster that the benchmark starts and stops."""
    config, _ = compose(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        size = make_model(Path(folder))
        connect(config)
        try:
            found, extra = asyncio.run(measured(config, folder))
        finally:
            disconnect()
    return rows(found, size, extra)


async def measured(config: Config, folder: str) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each round by kind of operation, and the bytes that rank 0 additionally uses in a sync."""
    async with (
        BackgroundTasks() as tasks,
        await start_workers(config, folder, [1], tasks, needs_critic=False) as workers,
    ):
        await on(engines(workers), own_tensors, folder)
        return await measure(workers), await peak(workers)


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
