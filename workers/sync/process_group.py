"""Transfers weights through a process group of the actor's ranks and the engines.

With the transports "process_group" and "nccl", the engines form a chain. Each actor rank sends its part of each bucket
of weights to the first engine of the chain. The first engine joins the parts of a bucket into the whole bucket. Each
engine sends the whole bucket to the next engine of the chain, and then loads the bucket. Different processes work on
different buckets at the same time. If the engines of each host follow one another in the chain, the weights are sent
over the network to each host only once. With "process_group", the weights go through the memory of the hosts; with
"nccl", they go from GPU to GPU.

With the transport "device_handles", each engine has a partner: a rank on its GPU or, without GPUs, on its host. The
ranks gather each bucket, so that each rank has the whole bucket. A rank sends its engines only a description of where
the bucket's bytes are: in GPU memory or, without GPUs, in a shared file. Each engine loads the bucket from there, and
sends an acknowledgement. Then the rank frees the memory.

The driver starts only one call per process for all buckets together, so the driver's work does not grow with the size
of the model. Ranks and engines wait for each other's buckets directly, without messages from the driver. The members of
the process group find each other through a store (TCPStore). A member that fails sets the key `GIVEN_UP` in the store,
and each member looks for this key once a second. If a process or a machine is lost, the driver sets the key `GIVEN_UP`.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from rltrain.base.errors import RLTrainError, SyncError, SyncStopped, WorkerLost, described
from workers.cluster.node_settings import listener_at, own_address
from workers.cluster.progress import tick, waiting
from workers.sync.buckets import Bucket, Piece, Place, as_tensor, join
from workers.sync.device_memory import free_cached
from workers.sync.memory import readable_elsewhere

CONNECT_S = 60.0  # Time limit in seconds for connecting to the store.
# Time limit of one transfer in seconds. If a process is lost, the driver notices the loss long before `TRANSFER_S`
# seconds have passed.
TRANSFER_S = 3600.0
GIVE_UP_S = 10.0  # Time limit in seconds for marking a weight sync as failed.
LOOK_S = 1.0  # Seconds between two checks whether the weight sync was marked as failed.
POLL_S = 0.0005  # Seconds between two checks whether a transfer between GPUs has ended.
GPU = "cuda:0"  # Device on which "nccl" receives buckets: the first GPU that this process may use.
BUCKET_TAG, ACKNOWLEDGED_TAG = 0, 1  # Tags of the bytes of buckets and of acknowledgements.
# Variables that a process group (NCCL) reads when it is created.
WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
GIVEN_UP = "given up"  # Key in the store that marks a failed sync.
GroupTransport = Literal["process_group", "nccl", "device_handles"]
T = TypeVar("T")


@dataclass(frozen=True)
class GroupPlan:
    """Description of a weight sync through a process group. All members of the process group get the same `GroupPlan`.

    The members of the process group are numbered from 0. The first members are the actor's ranks that write buckets.
    The engines follow the ranks. In a chain, the engines are numbered in the order in which the buckets pass through
    them.

    Attributes:
        name: name of the weight sync.
        host, port: address of the store (TCPStore) through which the members find each other. The store runs in the
            process of the actor's rank 0.
        ranks: number of ranks that write buckets.
        engines: number of engines.
        takes_part: uint8 array with one row for each bucket. Each row has one bit for each rank, packed into bytes by
            `numpy.packbits`. Bit r of row b says whether rank r writes a part of bucket b.
        buckets: number of buckets.
        transport: how the bytes of the buckets travel.
        partners: with "device_handles", the index of each engine's partner among the ranks; otherwise empty.
    """

    name: str
    host: str
    port: int
    ranks: int
    engines: int
    takes_part: np.ndarray
    buckets: int
    transport: GroupTransport = "process_group"
    partners: tuple[int, ...] = ()

    def writers(self, number: int) -> list[int]:
        """Return the indices of the ranks that write a part of the bucket with the index `number`."""
        bits = np.unpackbits(self.takes_part[number], count=self.ranks)
        return [int(rank) for rank in np.flatnonzero(bits)]

    def sources(self, number: int, engine: int) -> list[int]:
        """Return the members that send the bucket with the index `number`, or parts of it, to an engine.

        `engine` is the index of the engine among the engines, from 0.
        """
        if self.lends:
            return [self.partners[engine]]
        return self.writers(number) if engine == 0 else [self.ranks + engine - 1]

    def targets(self, member: int) -> list[int]:
        """Return the members to which a rank or an engine sends buckets."""
        if self.lends:
            return [self.ranks + engine for engine, rank in enumerate(self.partners) if rank == member]
        following = max(member + 1, self.ranks)  # Each rank sends to the first engine.
        return [following] if following < self.size else []

    @property
    def lends(self) -> bool:
        """Return whether engines read buckets in the memory of ranks, so that ranks must wait for the engines."""
        return self.transport == "device_handles"

    @property
    def size(self) -> int:
        """Return the number of members of the process group."""
        return self.ranks + self.engines


def serve_store(host: str) -> TCPStore:
    """Start a store (TCPStore) in this process; the store listens only at the address `host`, on a free port."""
    listener = listener_at(host)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, None, True, timedelta(seconds=CONNECT_S), wait_for_workers=False, master_listen_fd=listener.detach()
    )


def give_up(plan: GroupPlan, reason: str) -> None:
    """Mark a weight sync as failed in the store, so that the members of the sync stop waiting for each other.

    If the store cannot be reached, the process that runs it (the actor's rank 0) is lost. `give_up` then does nothing,
    because all members of the sync stop by themselves when their connections to the store are closed.
    """
    with contextlib.suppress(RuntimeError):
        _mark(_connect(plan, GIVE_UP_S), reason)


def _connect(plan: GroupPlan, limit_s: float) -> PrefixStore:
    store = TCPStore(plan.host, plan.port, None, False, timedelta(seconds=limit_s), wait_for_workers=False)
    return PrefixStore(plan.name, store)


def _mark(store: PrefixStore, reason: str) -> None:
    # If the store already has a reason for the failure of the sync, `compare_set` does not overwrite this reason.
    store.compare_set(GIVEN_UP, "", reason or "failed")


class Member:
    """Connection of this process to the other members of the process group of one weight sync.

    Args:
        plan: description of the weight sync.
        number: index of this process among the members of the process group.

    Raises:
        SyncError: the store cannot be reached.
    """

    def __init__(self, plan: GroupPlan, number: int) -> None:
        self.plan, self.number = plan, number
        try:
            # Each process group has its own connection to the store, because a connection on which a thread waits for
            # a key cannot be used for other requests.
            self.store, *others = (_connect(plan, CONNECT_S) for _ in range(3 if plan.transport == "nccl" else 2))
        except RuntimeError as error:
            raise SyncError(
                f"{socket.gethostname()} cannot connect to {plan.host}:{plan.port}, where rank 0 of the actor "
                f"listens: open the ports between the machines, or set rollout.weight_transport=object_store"
            ) from error
        meeting, *more = (PrefixStore(f"members {n}", one) for n, one in enumerate(others))
        # The variable has the type `Any`, because PyTorch's annotations lack most methods of `ProcessGroupGloo`.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=TRANSFER_S)
        # With `lazy_init`, a member connects only to the members to which it sends or from which it receives data.
        # Without `lazy_init`, each member would connect to all other members.
        options._devices = [gloo.create_device(hostname=own_address(), lazy_init=True)]
        self.group = gloo(meeting, number, plan.size, options)
        # The process group through which the bytes of buckets travel from GPU to GPU.
        self.gpu_group = nccl_group(more[0], number, plan.size) if more else None

    def send(self, bucket: Bucket, to: int) -> None:
        """Send a bucket to the member `to`, and return when the bytes have left this process.

        If `bucket.data` is None, only the description of the bucket is sent.
        """
        header, probes = map(as_tensor, encoded(bucket))
        data = torch.zeros(0, dtype=torch.uint8) if bucket.data is None else bucket.data
        self._send(torch.tensor([part.numel() for part in (header, data, probes)]), to)
        self._send(header, to)
        if self.gpu_group is None:
            self._send(data, to)
        elif data.numel():
            _wait_for_transfer(self.gpu_group.send([data], to, BUCKET_TAG))
        self._send(probes, to)

    def lend(self, bucket: Bucket, to: Sequence[int]) -> None:
        """Let other members read the memory of a bucket, and return when all of them have loaded the bucket."""
        if not to:
            return
        with readable_elsewhere(bucket) as lent:
            for member in to:
                self.send(lent, member)
            for member in to:
                self._receive(torch.zeros(1, dtype=torch.uint8), member, ACKNOWLEDGED_TAG)

    def acknowledge(self, lender: int) -> None:
        """Tell another member that this member has loaded the bucket that the other member lent."""
        self._send(torch.ones(1, dtype=torch.uint8), lender, ACKNOWLEDGED_TAG)

    def receive(self, sender: int) -> Bucket:
        """Wait for the next bucket from another member, and return the bucket."""
        sizes = torch.zeros(3, dtype=torch.int64)
        self._receive(sizes, sender)
        devices = "cpu", "cpu" if self.gpu_group is None else GPU, "cpu"
        try:
            header, data, probes = (
                torch.empty(size, dtype=torch.uint8, device=device)
                for size, device in zip(sizes.tolist(), devices, strict=True)
            )
        except RuntimeError as error:
            raise SyncError(f"no memory for a bucket of {int(sizes.sum()):,} bytes: {error}") from error
        self._receive(header, sender)
        if self.gpu_group is None:
            self._receive(data, sender)
        elif data.numel():
            _wait_for_transfer(self.gpu_group.recv([data], sender, BUCKET_TAG))
        self._receive(probes, sender)
        return decoded(header.numpy(), data, probes.numpy())

    def _send(self, part: Tensor, to: int, tag: int = BUCKET_TAG) -> None:
        if part.numel():
            self.group.send([part], to, tag).wait()

    def _receive(self, part: Tensor, sender: int, tag: int = BUCKET_TAG) -> None:
        if part.numel():
            self.group.recv([part], sender, tag).wait()

    def begin(self, transfer: Callable[[], T]) -> "Future[T]":
        """Start a transfer in a new thread, and return a future of the transfer's result.

        A transfer runs in a daemon thread, so that this process can end even if the transfer never ends, for example
        because a machine was lost.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(transfer())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="weight-transfer", daemon=True).start()
        return future

    def result(self, future: "Future[T]") -> T:
        """Wait until a transfer ends, and return the transfer's result.

        Raises SyncStopped if another member closed its connection, if the weight sync was marked as failed, or if the
        store cannot be reached.
        """
        with waiting():
            while not wait([future], timeout=LOOK_S).done:
                self.raise_if_given_up()
        tick()
        try:
            return future.result()
        except RLTrainError:
            raise
        except RuntimeError as error:
            closed = f"another process of the weight sync closed its connection ({described(error)})"
            raise SyncStopped(closed) from error

    def raise_if_given_up(self) -> None:
        """Raise SyncStopped if the weight sync was marked as failed, or if the store cannot be reached."""
        try:
            if not self.store.check([GIVEN_UP]):
                return
            reason = self.store.get(GIVEN_UP).decode()
        except RuntimeError:
            reason = "the connection to rank 0 of the actor was closed"
        raise SyncStopped(f"the weight sync was given up: {reason}")

    def give_up(self, error: BaseException) -> None:
        """Mark the weight sync as failed, with the error as the reason."""
        with contextlib.suppress(RuntimeError):
            _mark(self.store, described(error))

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the connections to the other members of the process group.

        If the `with` block raised an exception, `__exit__` first marks the weight sync as failed, so that the other
        members of the process group stop. The connections are closed when no thread uses the process group any more.
        """
        if error is not None:
            self.give_up(error)
        if self.gpu_group is not None:
            # Without `abort`, a transfer from a failed member would keep this process's GPU busy forever.
            self.gpu_group.abort() if error is not None else self.gpu_group.shutdown()
        del self.group, self.gpu_group, self.store


def nccl_group(store: PrefixStore, number: int, size: int) -> Any:
    """Return a process group (NCCL) that sends tensors between the GPUs of its members.

    Two members connect to each other when the first tensor is sent between them. No two members may use the same GPU.
    """
    from torch._C import _distributed_c10d

    # The variable has the type `Any`, because builds of PyTorch for CPUs have no class `ProcessGroupNCCL`.
    nccl: Any = _distributed_c10d.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = nccl.Options()
    options._timeout = timedelta(seconds=TRANSFER_S)
    with _without_watchdog():
        return nccl(store, number, size, options)


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Let a process survive failed transfers of a process group that it creates in the `with` block.

    By default, a thread of the process group ends the process after a failed transfer. A training rank must outlive an
    engine on another machine.
    """
    before = {name: os.environ.get(name) for name in WATCHDOG_OFF}
    os.environ.update(WATCHDOG_OFF)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait_for_transfer(work: Any) -> None:
    """Wait for the end of a transfer between GPUs. The transfer's own method `wait` does not wait for the GPU."""
    while not work.is_completed():
        time.sleep(POLL_S)
    work.wait()


def send_parts(
    plan: GroupPlan,
    rank: int,
    write: Callable[[int], Bucket],
    *,
    agree: Callable[[Exception | None], None] | None = None,
) -> None:
    """Send one rank's parts of all buckets to the first engine of a chain, or to the engines whose partner the rank is.

    While the rank's part of one bucket is being sent, `write` creates the rank's part of a later bucket.

    Args:
        plan: description of the weight sync.
        rank: index of the rank among the members of the process group.
        write: function that takes the index of a bucket, and returns this rank's part of the bucket.
        agree: function that all ranks call before each bucket and after the last one, with this rank's exception, or
            None. If any rank passes an exception, `agree` raises an exception on all ranks. If `write` calls no
            collective operations, `agree` can be None, and the ranks do not wait for each other.

    Raises:
        SyncStopped: another process of the weight sync failed.
        SyncError: the rank cannot join the process group.
    """
    agree = agree or _raise
    sent: Future[None] | None = None
    with _joined(plan, rank, agree) as member:
        agree(None)
        for number in range(plan.buckets):
            failure: Exception | None = None
            try:
                if rank in plan.writers(number):
                    part = write(number)
                    if sent is not None:
                        member.result(sent)
                    sent = member.begin(partial(_send, member, part))
            except Exception as error:
                failure = error
                # Ranks that wait in a collective operation cannot agree, but the engines can say what happened.
                member.give_up(error)
            agree(failure)
        if sent is not None:
            member.result(sent)


def _send(member: Member, part: Bucket) -> None:
    """Send a rank's part of a bucket to all members that receive it from this rank."""
    targets = member.plan.targets(member.number)
    if member.plan.lends:
        member.lend(part, targets)
        return
    for target in targets:
        member.send(part, target)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _joined(plan: GroupPlan, rank: int, agree: Callable[[Exception | None], None]) -> Member:
    """Join the process group. If this rank cannot join, make all ranks give up the weight sync (see `send_parts`)."""
    try:
        return Member(plan, rank)
    except Exception as error:
        agree(error)
        raise  # `agree` has already raised `error`, which type checkers do not know.


def receive_buckets(plan: GroupPlan, engine: int, load: Callable[[Bucket], None]) -> None:
    """Receive and load each bucket of a weight sync. In a chain, first send the bucket to the next engine.

    While a bucket is loaded, the next bucket is received.

    Args:
        plan: description of the weight sync.
        engine: index of this engine among the engines, from 0.
        load: function that loads a bucket into this engine.

    Raises:
        SyncStopped: another process of the weight sync failed.
        SyncError: the engine cannot join the process group, has no memory for a bucket, or received parts of a bucket
            that do not fit together.
    """
    own = plan.ranks + engine
    with Member(plan, own) as member:

        def transfer(number: int) -> Bucket:
            parts = [member.receive(source) for source in plan.sources(number, engine)]
            try:
                bucket = join(parts)
            except RuntimeError as error:
                raise SyncError(f"cannot join the parts of a bucket ({described(error)})") from error
            for target in plan.targets(own):
                member.send(bucket, target)
            return bucket

        coming = member.begin(partial(transfer, 0))
        for number in range(plan.buckets):
            bucket = member.result(coming)
            if number + 1 < plan.buckets:
                coming = member.begin(partial(transfer, number + 1))
            try:
                load(bucket)
            except Exception as error:
                # A partner that gave up may have freed the memory of this bucket, or removed its file.
                if plan.lends and not isinstance(error, WorkerLost):
                    member.raise_if_given_up()
                raise
            if plan.lends:
                member.result(member.begin(partial(member.acknowledge, plan.partners[engine])))
    if plan.transport == "nccl":
        free_cached()


def encoded(bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
    """Return two uint8 arrays: the bytes of a bucket's description in JSON, and the bytes of the bucket's probes.

    A probe is a vector with which an engine verifies its weights (see `Piece.probe`). The description is not pickled,
    because unpickling data from a network connection can run arbitrary code.
    """
    probes = [piece.probe for piece in bucket.pieces if piece.probe is not None]
    pieces = [
        [one.name, one.start, one.size, one.checksum, None if one.probe is None else len(one.probe)]
        for one in bucket.pieces
    ]
    description = asdict(replace(bucket, pieces=[], data=None)) | {"pieces": pieces}
    joined = np.concatenate(probes) if probes else np.zeros(0, np.float32)
    return np.frombuffer(json.dumps(description).encode(), np.uint8), joined.view(np.uint8)


def decoded(header: np.ndarray, data: Tensor, probes: np.ndarray) -> Bucket:
    """Rebuild a bucket from the description and the probes that `encoded` returned, and from the bytes `data` (n,).

    If the description names a file or GPU memory, that memory holds the bucket's bytes, and `data` is not used.
    """
    description = json.loads(header.tobytes())
    values, pieces, at = probes.view(np.float32), [], 0
    for name, start, size, checksum, length in description.pop("pieces"):
        probe = None if length is None else values[at : at + length]
        at += length or 0
        pieces.append(Piece(name, start, size, checksum, probe))
    places = [Place(**{**place, "shape": tuple(place["shape"])}) for place in description.pop("places")]
    elsewhere = description["path"] is not None or description["handle"] is not None
    return Bucket(**{**description, "places": places, "pieces": pieces, "data": None if elsewhere else data})


def packed(takes_part: Sequence[Sequence[bool]]) -> np.ndarray:
    """Return the array for `GroupPlan.takes_part`, in which eight bools are packed into one byte.

    The argument's element `takes_part[r][b]` says whether rank r sends a part of bucket b.
    """
    return np.packbits(np.asarray(takes_part, dtype=bool).T, axis=1)
