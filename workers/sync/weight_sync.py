"""The driver's part of a weight sync: the driver makes ranks and engines transfer the weights in buckets.

If all ranks and engines are on one host, the bytes of the buckets are in a shared file in memory. For each bucket, the
ranks that hold rows of the bucket write these rows, and then all engines load the bucket. Ranks write bucket n only
after every engine has loaded bucket n - 2. Ranks can write one bucket while engines load the previous bucket, and at
most two buckets exist at a time. The driver starts all calls of ranks and engines without waiting for their results.
The results of earlier calls are arguments of later calls, so that Ray runs the calls of ranks and engines in order. If
a call fails or a process dies, all later calls of the weight sync also fail, because each call needs the result of an
earlier call.

If the ranks and engines are on several hosts, they transfer the buckets through a process group, as
`workers.sync.process_group` describes. With `rollout.weight_transport=nccl` or `device_handles`, they form a process
group on one host too. With `rollout.weight_transport=object_store`, ranks and engines use neither a shared file nor a
process group. Each rank returns the bytes of its rows as the result of the call `export`, and Ray passes the bytes to
the engines as arguments of the call `load_bucket`.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Protocol

from rltrain.base.errors import ClusterLost, RLTrainError, SyncError, SyncStopped, WorkerLost, described
from rltrain.settings.schema import WeightTransport
from workers.cluster.processes import Pending, Role, WorkerProcess, results
from workers.sync.buckets import Bucket
from workers.sync.memory import new_path
from workers.sync.process_group import GroupPlan, GroupTransport, give_up, packed
from workers.sync.sender import SLOTS, Offer


class Sends(Protocol):
    """Interface of a training rank that sends its weights. See `workers.training.actor.ActorWorker`."""

    def start_export(self, path: str | None, version: int, check: bool) -> Offer:
        """Prepare to send the weights, and return a description of what this rank will send."""

    def export(self, number: int, path: str | None, *loaded: None) -> Bucket:
        """Write the rows that this rank holds into a bucket.

        Ray runs `export` only after the `load_bucket` calls whose results are passed as `loaded` have ended. The result
        of a `load_bucket` call is always None.
        """

    def serve_store(self) -> tuple[str, int]:
        """Start the store (TCPStore) of a process group, and return the store's host and port.

        The members of the process group find each other through the store, which runs until `end_export` is called.
        """

    def send_all(self, plan: GroupPlan, member: int) -> None:
        """Send this rank's parts of all buckets through a process group, in which the rank has the number `member`."""

    def end_export(self) -> None:
        """Free the memory that was used to send the weights."""


class Receives(Protocol):
    """Interface of an engine that receives weights. See `workers.rollout.worker.RolloutWorker`."""

    def start_load(self, sync: str, version: int) -> str | None:
        """Stop generating responses until `finish_load` is called.

        Return a string that identifies the host and the shared-memory folder of the engine's process, as returned by
        `memory.whereabouts`.
        """

    def load_bucket(self, sync: str, before: None, *parts: Bucket) -> None:
        """Load a bucket from the parts that the ranks wrote.

        The argument `before` is the result of the engine's previous `load_bucket` call, which is always None. Ray runs
        a `load_bucket` call only after the engine's previous `load_bucket` call has ended, so the engine loads the
        buckets in order.
        """

    def gpu(self) -> str | None:
        """Return the identifier of the engine's first GPU, or None without a GPU."""

    def receive_all(self, sync: str, plan: GroupPlan, engine: int) -> None:
        """Receive all buckets through a process group, and load the weights in the buckets into the engine.

        `engine` is the index of the engine among the engines of the process group, from 0.
        """

    def finish_load(self, sync: str, before: None) -> None:
        """Resume generating responses, with the weights that the engine has received."""

    def give_up_load(self, sync: str, reason: str) -> None:
        """Mark the weight sync as failed, and store the reason."""


async def sync(
    ranks: Sequence[Role[Sends]],
    engines: Sequence[Role[Receives]],
    version: int,
    *,
    check: bool,
    transport: WeightTransport = "auto",
) -> None:
    """Send the actor's weights to the engines.

    Args:
        ranks: the actor's ranks.
        engines: the engines that receive the weights.
        version: version of the weights.
        check: whether to verify that the engines compute with the sent weights.
        transport: how to transfer the weights. "auto" chooses shared memory if all processes are on one host with room
            for two buckets in its shared memory. Otherwise "auto" chooses a process group or, if ranks and engine are
            in the driver's process, the same calls as "object_store".

    Raises:
        WorkerLost: the process of a rank or of an engine died or hung. After a WorkerLost, the surviving engines
            generate no responses until another weight sync succeeds.
        SyncError: the engines did not receive all weights, or do not compute with the sent weights. After a SyncError,
            the engines generate no responses until another weight sync succeeds.
    """
    path = new_path()
    senders, receivers = _processes(ranks), _processes(engines)
    try:
        concurrent = receivers[0].concurrent  # False if ranks and engine are in the driver's process.
        file = path if transport in ("auto", "shared_memory") and concurrent else None
        begun = [rank.start(Sends.start_export, file, version, check) for rank in ranks]
        told = [engine.start(Receives.start_load, path, version) for engine in engines]
        # The ranks run `start_export` while the engines run `start_load`.
        offers, hosts = await results(begun), await results(told, depends_on=senders)
        one_host = len({*(offer.where for offer in offers), *hosts}) == 1 and offers[0].where is not None
        shared = one_host and all(offer.has_file for offer in offers)
        if transport == "shared_memory" and not shared:
            raise SyncError(
                f"weight sync {version}: rollout.weight_transport=shared_memory needs all ranks and engines on one "
                "host, and room for two buckets in its shared memory; use rollout.weight_transport=auto"
            )
        if transport == "auto":
            transport = "shared_memory" if shared else "process_group" if concurrent else "object_store"
        if transport == "shared_memory" or transport == "object_store":
            await _stream(ranks, engines, path, offers, shared=shared)
        else:
            await _through_group(transport, ranks, engines, path, version, offers, hosts)
    except BaseException as error:
        await _give_up(engines, path, described(error))
        if isinstance(error, RLTrainError) and not isinstance(error, ClusterLost | SyncError | WorkerLost):
            raise SyncError(f"weight sync {version} failed: {error}") from error
        raise
    finally:
        # If a rank was lost, the driver does not call `end_export`, because the surviving ranks may be waiting for the
        # lost rank and would never run `end_export`.
        if not any(process.how_lost for process in senders):
            with contextlib.suppress(RLTrainError):
                await results([rank.start(Sends.end_export) for rank in ranks], depends_on=receivers)
        with contextlib.suppress(OSError):  # The shared file may still exist if `end_export` did not run.
            os.unlink(path)


async def _stream(
    ranks: Sequence[Role[Sends]],
    engines: Sequence[Role[Receives]],
    path: str,
    offers: Sequence[Offer],
    *,
    shared: bool,
) -> None:
    """Transfer all buckets with one call per bucket and process, and then make the engines finish loading.

    Args:
        ranks: the actor's ranks.
        engines: the engines.
        path: path of the shared file. The path also identifies the weight sync, even if no shared file is used.
        offers: one `Offer` per rank, which says for each bucket whether the rank takes part in writing the bucket.
        shared: whether the bytes of the buckets go through the shared file. If `shared` is False, each rank returns its
            bytes as the result of `export`, and Ray passes the bytes to the engines as arguments of `load_bucket`.
    """
    file = path if shared else None
    loaded: list[list[Pending[None]]] = []
    for number in range(len(offers[0].takes_part)):
        free = [pending.later for pending in loaded[number - SLOTS]] if number >= SLOTS else []
        writers = [rank for rank, offer in zip(ranks, offers, strict=True) if offer.takes_part[number]]
        written = [rank.start(Sends.export, number, file, *free) for rank in writers]
        parts = [pending.later for pending in written]
        before = [pending.later for pending in loaded[-1]] if loaded else [None] * len(engines)
        loaded.append(
            [e.start(Receives.load_bucket, path, own, *parts) for e, own in zip(engines, before, strict=True)]
        )
    finished = [e.start(Receives.finish_load, path, own.later) for e, own in zip(engines, loaded[-1], strict=True)]
    await results(finished, depends_on=_processes(ranks))


async def _through_group(
    transport: GroupTransport,
    ranks: Sequence[Role[Sends]],
    engines: Sequence[Role[Receives]],
    path: str,
    version: int,
    offers: Sequence[Offer],
    hosts: Sequence[str | None],
) -> None:
    """Transfer all buckets with one call per process, and then make the engines finish loading.

    In a chain of engines, the engines of a host follow one another, so that each host receives the weights only once.
    The engines on the host of rank 0 come first.

    Args:
        transport: how the bytes of the buckets travel.
        ranks: the actor's ranks.
        engines: the engines.
        path: name of the weight sync.
        version: version of the weights, for error messages.
        offers: one `Offer` per rank.
        hosts: for each engine, the string that identifies its host.

    Raises:
        SyncError: the processes do not have the GPUs that the transport needs.
    """
    order, partners = list(range(len(engines))), tuple[int, ...]()
    takes_part = [offer.takes_part for offer in offers]
    gpus: list[str | None] = []
    if transport != "process_group":
        gpus = await results([engine.start(Receives.gpu) for engine in engines], depends_on=_processes(ranks))
    if transport == "device_handles":
        partners = _partners(version, offers, list(zip(hosts, gpus, strict=True)))
        takes_part = [[True] * len(parts) for parts in takes_part]  # The ranks gather each bucket together.
    else:
        order.sort(key=lambda n: (hosts[n] != offers[0].where, hosts[n] or "", n))
    writers = [n for n, parts in enumerate(takes_part) if any(parts)]
    if transport == "nccl":
        _require_separate_gpus(version, [*(offers[n].gpu for n in writers), *gpus])
    parts = packed([takes_part[n] for n in writers])
    host, port = await ranks[0].call(Sends.serve_store)
    plan = GroupPlan(path, host, port, len(writers), len(order), parts, len(parts), transport, partners)
    shared = ranks[0].process.share(plan)
    sent = [ranks[n].start(Sends.send_all, shared, member) for member, n in enumerate(writers)]
    loaded = [engines[n].start(Receives.receive_all, path, shared, index) for index, n in enumerate(order)]
    involved = _processes([*ranks, *engines])
    try:
        await results([*sent, *loaded], depends_on=involved)
    except BaseException as error:
        await asyncio.to_thread(give_up, plan, described(error))
        # A process raises SyncStopped if the weight sync ended because another process failed. If the failed process
        # has raised an error of its own, `_through_group` raises that error instead of SyncStopped.
        if isinstance(error, SyncStopped):
            for call in [*sent, *loaded]:
                with contextlib.suppress(SyncStopped):
                    await results([call], depends_on=involved)
        raise
    finished = [engine.start(Receives.finish_load, path, None) for engine in engines]
    await results(finished, depends_on=_processes(ranks))


def _partners(
    version: int, offers: Sequence[Offer], engines: Sequence[tuple[str | None, str | None]]
) -> tuple[int, ...]:
    """Return for each engine, given its host and its GPU, the index of a rank on the same host and GPU.

    Raises SyncError if an engine has no such rank.
    """
    ranks: dict[tuple[str | None, str | None], int] = {}
    for number, offer in enumerate(offers):
        ranks.setdefault((offer.where, offer.gpu), number)
    if any(engine not in ranks or engine[0] is None for engine in engines):
        raise SyncError(
            f"weight sync {version}: rollout.weight_transport=device_handles needs a training rank on the GPU of each "
            "engine (without GPUs, on the machine of each engine); use rollout.weight_transport=auto"
        )
    return tuple(ranks[engine] for engine in engines)


def _require_separate_gpus(version: int, gpus: Sequence[str | None]) -> None:
    """Raise SyncError unless each process of the weight sync has a GPU of its own."""
    if None in gpus or len(set(gpus)) < len(gpus):
        raise SyncError(
            f"weight sync {version}: rollout.weight_transport=nccl needs a separate GPU for each training rank and "
            "each engine; use rollout.weight_transport=auto"
        )


async def _give_up(engines: Sequence[Role[Receives]], path: str, reason: str) -> None:
    """Tell the surviving engines that the sync has failed and that no further buckets will arrive."""
    for engine in engines:
        if not engine.process.how_lost:
            with contextlib.suppress(RLTrainError):
                await engine.call(Receives.give_up_load, path, reason)


def _processes(roles: Sequence[Role[object]]) -> list[WorkerProcess]:
    return [role.process for role in roles]
