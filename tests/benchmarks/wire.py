"""Measures the time for sending a large batch through Ray, compared with verl's DataProto.

The batch is put into Ray's store and scattered to 8 actors, and one new column is gathered.

The batch has 8 columns and 512 rows of up to 16,384 response tokens: 0.71 GB when padded to (512, 16384). Row lengths
are log-uniform between a sixteenth of the maximum and the maximum, so that two thirds of the padded batch are padding.
On rltrain's side, the jagged batch is put into Ray's store once, and each actor reads its own rows. On verl's side
(verl 0.9), the tensors are padded, and the steps are the steps of verl's dispatch: split the batch into chunks, put the
chunks into Ray's store from several threads, call each actor with its chunk, and concatenate the results. If verl is
not installed, the padded tensors are split into chunks, and Ray pickles each chunk.

    pip install --no-deps --target FOLDER verl
    VERL_PATH=FOLDER python -m tests.benchmarks.wire
"""

import asyncio
import importlib.util
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from rltrain.batch.data_proto import DataProto, offsets_of
from rltrain.batch.row_assignment import balance
from tests.benchmarks.row import Row
from workers.cluster.processes import RayProcess, Role, results
from workers.cluster.worker_process import Host
from workers.training.dispatch import collect_rows

Way = Callable[[], Awaitable[Any]]
COMMAND = "VERL_PATH=FOLDER python -m tests.benchmarks.wire"
ROWS, SLOTS, ACTORS, ROUNDS, HIDDEN = 512, 16_384, 8, 5, 13
COLUMNS = {
    "responses": torch.int64, "policy_version": torch.int64, "response_mask": torch.bool,
    "rollout_log_probs": torch.float32, "old_log_probs": torch.float32, "ref_log_probs": torch.float32,
    "advantages": torch.float32, "ref_hidden": torch.float32,
}  # fmt: skip


class Receiver:
    """An actor that copies its rows into its own tensors and returns one new column."""

    def __init__(self) -> None:
        find_verl()

    def jagged(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Take the given rows of the shared jagged batch, and return a new column for the rows."""
        part = batch[microbatches[0]]
        return part.with_values("responses", log_probs=torch.zeros(len(part.values("responses")))).select(["log_probs"])

    def verl(self, chunk: Any) -> Any:
        """Return a new column for a chunk of verl's DataProto."""
        return type(chunk).from_dict({"log_probs": torch.zeros(chunk.batch["responses"].shape)})

    def tensors(self, chunk: dict[str, Tensor]) -> Tensor:
        """Return a new column for a chunk of padded tensors."""
        return torch.zeros(chunk["responses"].shape)


def make_batch(rows: int = ROWS, slots: int = SLOTS) -> DataProto:
    """Make a batch of random values.

    The longest row has the maximum number of tokens, `SLOTS`.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = (slots / 16 * 16 ** torch.rand(rows, generator=generator)).long()
    lengths[0] = slots
    offsets, tokens = offsets_of(lengths), int(lengths.sum())
    shapes = {name: (tokens, HIDDEN) if name == "ref_hidden" else (tokens,) for name in COLUMNS}
    values = {name: torch.randint(2, shapes[name], generator=generator).to(kind) for name, kind in COLUMNS.items()}
    return DataProto.from_dict({name: nested_tensor_from_jagged(column, offsets) for name, column in values.items()})


def make_padded(batch: DataProto) -> dict[str, Tensor]:
    """Return the batch's columns as tensors padded on the right, of shape (B, T) or (B, T, H)."""
    mask, padded = batch.padding_mask("responses"), {}
    for name, kind in COLUMNS.items():
        values = batch.values(name)
        padded[name] = torch.zeros((*mask.shape, *values.shape[1:]), dtype=kind)
        padded[name][mask] = values
    return padded


Ranks = Sequence[Role[Receiver]]


async def ours(ranks: Ranks, batch: DataProto) -> DataProto:
    """Put the batch into Ray's store once, and let each actor compute a new column for its rows.

    The rows are balanced over actors by length. The new column is returned in the batch's row order.
    """
    plan = [[rows] for rows in balance(batch.lengths("responses").tolist(), list(range(len(batch))), len(ranks))]
    shared = ranks[0].process.share(batch)
    calls = [rank.start(Receiver.jagged, shared, part) for rank, part in zip(ranks, plan, strict=True)]
    return collect_rows(await results(calls), plan)


async def of_verl(ranks: Ranks, batch: Any) -> Any:
    """Send the batch as verl's `dispatch_nd_compute_dataproto` and `collect_nd_compute_dataproto` do, for 8 ranks."""
    from verl.utils.ray_utils import parallel_put

    chunks = batch.chunk(chunks=len(ranks))
    sent = parallel_put(chunks, max_workers=max(1, min(len(chunks), os.cpu_count() or 1)))
    calls = [rank.start(Receiver.verl, chunk) for rank, chunk in zip(ranks, sent, strict=True)]
    return type(batch).concat(await results(calls))


async def of_tensors(ranks: Ranks, padded: dict[str, Tensor]) -> Tensor:
    """Send each actor its chunk of the padded tensors, pickled by Ray."""
    parts: dict[str, tuple[Tensor, ...]] = {name: column.chunk(len(ranks)) for name, column in padded.items()}
    chunks = [{name: pieces[number].clone() for name, pieces in parts.items()} for number in range(len(ranks))]
    sent = [rank.process.share(chunk) for rank, chunk in zip(ranks, chunks, strict=True)]
    calls = [rank.start(Receiver.tensors, chunk) for rank, chunk in zip(ranks, sent, strict=True)]
    return torch.cat(await results(calls))


async def seconds(call: Way) -> float:
    """Return the wall-clock seconds of one call."""
    begin = time.perf_counter()
    await call()
    return time.perf_counter() - begin


def private_bytes() -> int:
    """Return the private memory of the current process in bytes, without Ray's shared object store."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


async def peak_bytes(call: Way) -> int:
    """Return the largest growth of the current process's private memory during a call, in bytes.

    The memory is sampled every 2 ms.
    """
    start, ended, peaks = private_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.002):
            peaks.append(private_bytes() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        await call()
    finally:
        ended.set()
        thread.join()
    return max(peaks)


def find_verl() -> bool:
    """Return whether verl can be imported.

    If the variable VERL_PATH is set, its folder is added to the search path first.
    """
    folder = os.environ.get("VERL_PATH", "")
    if folder and folder not in sys.path:
        sys.path.append(folder)  # The path is appended at the end, because VERL_PATH also has a package `tests`.
    return importlib.util.find_spec("verl") is not None


async def start_actors() -> Ranks:
    """Start 8 actors, and wait until they are ready."""
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    size = 3 * ROWS * SLOTS * 85  # Bytes of Ray's object store, enough for every way of sending the batch.
    ray.init(
        address="local", include_dashboard=False, num_cpus=2, logging_level="error", log_to_driver=False,
        object_store_memory=size,
    )  # fmt: skip
    actors = [ray.remote(num_cpus=0)(Host).remote({"OMP_NUM_THREADS": "1"}) for _ in range(ACTORS)]
    processes = [RayProcess(actor, f"receiver {number}") for number, actor in enumerate(actors)]
    await results([process.build("receiver", "tests.benchmarks.wire:Receiver") for process in processes])
    return [Role(process, "receiver") for process in processes]


def run() -> list[Row]:
    """Measure each way of sending the batch `ROUNDS` times, after a warm-up round."""
    batch = make_batch()
    padded = make_padded(batch)
    times, peaks = asyncio.run(measured(batch, padded))
    return [_row(batch, padded, {name: statistics.median(each[1:]) for name, each in times.items()}, peaks)]


async def measured(batch: DataProto, padded: dict[str, Tensor]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of each round and the driver's memory in bytes, each keyed by the way of sending the batch."""
    import ray

    has_verl, ranks = find_verl(), await start_actors()
    ways: dict[str, Way] = {"ours": lambda: ours(ranks, batch)}
    if has_verl:
        from verl import DataProto as VerlProto

        theirs = VerlProto.from_dict(padded)
        ways["verl"] = lambda: of_verl(ranks, theirs)
    else:
        ways["plain"] = lambda: of_tensors(ranks, padded)
    try:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, way in ways.items():
                times[name].append(await seconds(way))
        return times, {name: await peak_bytes(way) for name, way in ways.items()}
    finally:
        ray.shutdown()


def _row(batch: DataProto, padded: dict[str, Tensor], times: dict[str, float], peaks: dict[str, int]) -> Row:
    name = next(name for name in times if name != "ours")
    sent = sum(batch.values(column).nbytes for column in COLUMNS)
    full = sum(column.nbytes for column in padded.values())
    other = "verl's DataProto" if name == "verl" else "Ray's pickle of the padded tensors (verl is not installed)"
    notes = (
        f"{ROWS} rows of up to {SLOTS:,} tokens, 8 columns, lengths 1:16: {full / 1e9:.2f} GB padded, "
        f"{sent / 1e9:.2f} GB of tokens; put, scatter to {ACTORS} actors, gather of one float32 column; the driver's "
        f"own memory grows by {peaks['ours'] / 1e6:.0f} MB at most (theirs {peaks[name] / 1e6:.0f} MB)"
    )
    return Row(
        "a 0.7 GB batch through Ray", times[name] / times["ours"], f"times faster than {other}", ">= 10",
        f"{times['ours']:.2f} s", f"{times[name]:.2f} s", notes, COMMAND,
        {"driver_mb": peaks["ours"] / 1e6, "driver_mb_theirs": peaks[name] / 1e6, "sent_mb": sent / 1e6},
    )  # fmt: skip


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
