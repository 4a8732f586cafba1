"""Program that runs the phases of one training rank on random rows, and writes the memory peak of each phase.

    python -m tests.memory.peaks MODEL RANK RANKS ADDRESS OVERRIDE...

Rank 0 of several ranks gets the empty text as ADDRESS, and first writes the address that the other ranks need.

The peak is the kernel's `VmHWM`. Before each phase, memory that glibc keeps for reuse is returned to the kernel, and
the peak is set back to the current size. Within a phase, glibc keeps freed memory as in a run.
"""

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.batch.contexts import row_tokens
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.row_assignment import assign_minibatch
from rltrain.batch.shared_starts import shared_starts
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from workers.cluster.worker_process import Host
from workers.sync.memory import new_path
from workers.training.actor import ActorWorker
from workers.training.dispatch import Minibatch


def main() -> None:
    path, rank, ranks, address, *overrides = sys.argv[1:]
    config = compose([f"model.path={path}", *overrides])[0]
    here = Host({}, verbose=True)
    meeting = None
    if address:
        host, _, port = address.partition(":")
        meeting = (host, int(port))
    elif int(ranks) > 1:
        meeting = here.address(loopback=True)
        sys.stdout.write(json.dumps({"address": f"{meeting[0]}:{meeting[1]}"}) + "\n")
        sys.stdout.flush()
    here.join(int(rank), int(ranks), meeting, 600.0)
    forget_peak()
    write("base", peak())
    for name, run in phases(config, path, int(ranks)):
        forget_peak()
        run()
        write(name, peak())


def write(phase: str, size: int) -> None:
    sys.stdout.write(json.dumps({"phase": phase, "peak": size}) + "\n")
    sys.stdout.flush()


def peak() -> int:
    """Return the largest number of bytes that this process has occupied since the last call of `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def forget_peak() -> None:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def rows_of(config: Config, count: int, words: int) -> DataProto:
    """Return `count` rows in groups of the config's size, with random tokens and the config's maximum lengths."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[list[int]]:
        return [torch.randint(words, (length,), generator=generator).tolist() for _ in range(count)]

    prompts, responses = ids(config.rollout.max_prompt_length), ids(config.rollout.max_response_length)
    uids = [row // config.rollout.samples_per_prompt for row in range(count)]
    prompts = [prompts[uid] for uid in uids]
    tokens = count * config.rollout.max_response_length
    columns = {"prompts": jagged(prompts, torch.int64), "responses": jagged(responses, torch.int64)}
    return DataProto.from_dict(columns | {"uid": torch.tensor(uids)}).with_values(
        "responses",
        response_mask=torch.ones(tokens, dtype=torch.bool),
        advantages=torch.randn(tokens, generator=generator),
        rollout_log_probs=torch.full((tokens,), -1.0),
        policy_version=torch.zeros(tokens, dtype=torch.int64),
    )


def phases(config: Config, path: str, ranks: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each phase, and a function that runs the phase. The first update creates optimizer states."""
    made: list[ActorWorker] = []
    yield "start", lambda: made.append(ActorWorker(config, path))
    together = config.placement.ranks_per_pack
    (actor,), count = made, config.sequences_per_step * together // ranks
    batch = rows_of(config, count, actor.model.config.vocab_size)
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    budget = config.actor.max_tokens_per_microbatch * config.placement.token_ranks
    (lists,) = assign_minibatch(lengths, list(range(count)), 1, budget, starts=starts)
    tokens = config.sequences_per_step * config.rollout.max_response_length
    minibatch = Minibatch(lists, tokens, config.sequences_per_step)

    def log_probs() -> None:
        nonlocal batch
        found = actor.compute_log_probs(batch, lists)
        names = [name for name in batch.keys() if name not in found]  # noqa: SIM118 (iterating gives rows)
        batch = batch.select(names).union(found)

    for _ in range(2):
        yield "log-probs", log_probs
        yield "update", lambda: actor.update(batch, [minibatch], 0.0, [None])
    yield "sync", lambda: sync(actor, shares=ranks == 1)
    yield "save", lambda: save(actor)


def sync(actor: ActorWorker, *, shares: bool) -> None:
    path = new_path() if shares else None
    offer = actor.start_export(path, 1, True)
    for number, takes_part in enumerate(offer.takes_part):
        if takes_part:
            actor.export(number, path)
    actor.end_export()
    if path is not None:
        Path(path).unlink(missing_ok=True)


def save(actor: ActorWorker) -> None:
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)  # all ranks write into the folder of rank 0
        actor.save_state(shared[0])
        while (found := actor.saved_state()) is None:
            time.sleep(0.01)
        assert found.error == "", found.error
        dist.barrier()


if __name__ == "__main__":
    main()
