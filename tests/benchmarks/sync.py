"""A weight sync of 120M parameters, two FSDP2 ranks to one vLLM, against gathering and loading alone.

Gathering alone: each tensor's `full_tensor()` on both ranks, nothing kept. Loading alone: the engine's own reload from
tensors that lie in its memory. The sync does both and what is between them, with and without the proofs of E5.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from tests.benchmarks.row import Row
from workers.placement import Workers, connect, disconnect
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
    """A random model in Hugging Face form; returns its bytes."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


# What runs in the workers' processes


def gather(host: Any) -> None:
    """Every tensor as a whole on this rank, one after the other."""
    for parameter in host.roles["actor"].model.parameters():
        parameter.detach().full_tensor()


def own_tensors(host: Any, path: str) -> None:
    """Keep the weights in the engine's memory."""
    host.weights = {name: p.detach() for name, p in Qwen2ForCausalLM.from_pretrained(path).named_parameters()}


def reload(host: Any) -> None:
    """The engine's reload of the weights in its memory."""
    from vllm.config import set_current_vllm_config

    role = host.roles["rollout"]

    def run() -> None:
        worker = role.engine.engine.model_executor.driver_worker.worker
        transfer = worker.weight_transfer_engine
        with set_current_vllm_config(worker.vllm_config):
            transfer.start_weight_update()
            transfer.model.load_weights(host.weights.items())
            transfer.finish_weight_update()

    role._run(run)


def forget_peak(host: Any) -> int:
    """Start a new peak of this process's memory; returns the kB in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory(host, "VmRSS")


def memory(host: Any, which: str) -> int:
    """A line of /proc/self/status in kB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[which].split()[0])


# The measurement


def seconds(function: Callable[[], Any]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(workers: Workers) -> dict[str, list[float]]:
    """Seconds by kind and round, the kinds in turn."""
    ranks, engine = workers.actor.hosts.actors, workers.rollout.hosts.actors[0]

    def send(check: bool) -> Callable[[], None]:
        return lambda: sync(workers.actor, workers.rollout.hosts, 1, check=check)

    kinds = {
        "gather": lambda: ray.get([rank.__ray_call__.remote(gather) for rank in ranks]),
        "checked": send(True),
        "load": lambda: ray.get(engine.__ray_call__.remote(reload)),
        "unchecked": send(False),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS + 1):  # the first warms up
        for kind, function in kinds.items():
            taken = seconds(function)
            if number:
                found[kind].append(taken)
    for number in range(PAIRS):  # the checks are a small part, and each sync's time changes by more than that
        for kind in ("checked", "unchecked")[:: 1 if number % 2 else -1]:
            found[kind].append(seconds(kinds[kind]))
    return found


def peak(workers: Workers) -> int:
    """Bytes that rank 0 takes more during a sync."""
    rank = workers.actor.hosts.actors[0]
    before = ray.get(rank.__ray_call__.remote(forget_peak))
    sync(workers.actor, workers.rollout.hosts, 2, check=True)
    return (ray.get(rank.__ray_call__.remote(memory, "VmHWM")) - before) * 1024


def rows(found: dict[str, list[float]], size: int, extra: int) -> list[Row]:
    """The table's lines."""
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
        Row("weight sync", ratio, "of gather + engine load alone", "<= 1.5", ours,
            f"{statistics.median(alone):.2f} s", notes, COMMAND, {f"{kind}_s": s for kind, s in middle.items()}),
        Row("weight sync: checks", 1 - quiet["unchecked"] / quiet["checked"], "of the sync", "< 0.05",
            f"{quiet['checked']:.3f} s", f"{quiet['unchecked']:.3f} s without",
            f"lower quartiles of {PAIRS} of each in turn: what else the machine does only ever adds; "
            f"{(quiet['checked'] - quiet['unchecked']) / statistics.median(alone):.1%} of gather + engine load alone",
            COMMAND),
        Row("weight sync: memory of rank 0", extra / size, "of the model", "about two buckets",
            f"{extra / 1e6:.0f} MB", f"{2 * largest / 1e6:.0f} MB are two buckets (the largest tensor sets their size)",
            notes, COMMAND),
    ]  # fmt: skip


def run() -> list[Row]:
    """Measure; starts and ends its own Ray."""
    config, _ = compose(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        size = make_model(Path(folder))
        connect(config)
        try:
            workers = start_workers(config, folder, [1], needs_critic=False)
            engine = workers.rollout.hosts.actors[0]
            ray.get(engine.__ray_call__.remote(own_tensors, folder))
            found = measure(workers)
            extra = peak(workers)
            workers.close()
        finally:
            disconnect()
    return rows(found, size, extra)


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
