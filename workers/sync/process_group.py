"""Transfers weights between hosts through a process group (gloo), in which the engines form a chain.

Each actor rank sends its part of each bucket of weights to the first engine of the chain. The first engine joins the
parts of a bucket into the whole bucket. Each engine sends the whole bucket to the next engine of the chain, and then
loads the bucket. Different processes work on different buckets at the same time. If the engines of each host follow one
another in the chain, the weights are sent over the network to each host only once.

The driver starts only one call per process for all buckets together, so the driver's work does not grow with the size
of the model. Ranks and engines wait for each other's buckets directly, without messages from the driver. The members of
the process group find each other through a store (TCPStore). A member that fails sets the key `GIVEN_UP` in the store,
and each member looks for this key once a second. If a process or a machine is lost, the driver sets the key `GIVEN_UP`.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from rltrain.base.errors import RLTrainError, SyncError, SyncStopped, described
from workers.cluster.node_settings import listener_at, own_address
from workers.cluster.progress import tick, waiting
from workers.sync.buckets import Bucket, Piece, Place, join

CONNECT_S = 60.0  # Time limit in seconds for connecting to the store.
# Time limit of one transfer in seconds. If a process is lost, the driver notices the loss long before `TRANSFER_S`
# seconds have passed.
TRANSFER_S = 3600.0
GIVE_UP_S = 10.0  # Time limit in seconds for marking a weight sync as failed.
LOOK_S = 1.0  # Seconds between two checks whether the weight sync was marked as failed.
TAG = 0
GIVEN_UP = "given up"  # Key in the store that marks a failed sync.
T = TypeVar("T")


@dataclass(frozen=True)
class Chain:
    """Description of a weight sync through a process group. All members of the process group get the same `Chain`.

    The members of the process group are numbered from 0. The first members are the actor's ranks that send weights. The
    members after the actor's ranks are the engines, in the order in which the buckets pass through them.

    Attributes:
        name: name of the weight sync.
        host, port: address of the store (TCPStore) through which the members find each other. The store runs in the
            process of the actor's rank 0.
        ranks: number of ranks that send weights.
        engines: number of engines.
        takes_part: uint8 array with one row for each bucket. Each row has one bit for each rank, packed into bytes by
            `numpy.packbits`. Bit r of row b says whether rank r sends a part of bucket b.
        buckets: number of buckets.
    """

    name: str
    host: str
    port: int
    ranks: int
    engines: int
    takes_part: np.ndarray
    buckets: int

    def senders(self, number: int) -> list[int]:
        """Return the indices of the ranks that send a part of the bucket with the index `number`."""
        bits = np.unpackbits(self.takes_part[number], count=self.ranks)
        return [int(rank) for rank in np.flatnonzero(bits)]

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


def give_up(chain: Chain, reason: str) -> None:
    """Mark a weight sync as failed in the store, so that the members of the sync stop waiting for each other.

    If the store cannot be reached, the process that runs it (the actor's rank 0) is lost. `give_up` then does nothing,
    because all members of the sync stop by themselves when their connections to the store are closed.
    """
    with contextlib.suppress(RuntimeError):
        _mark(_connect(chain, GIVE_UP_S), reason)


def _connect(chain: Chain, limit_s: float) -> PrefixStore:
    store = TCPStore(chain.host, chain.port, None, False, timedelta(seconds=limit_s), wait_for_workers=False)
    return PrefixStore(chain.name, store)


def _mark(store: PrefixStore, reason: str) -> None:
    # If the store already has a reason for the failure of the sync, `compare_set` does not overwrite this reason.
    store.compare_set(GIVEN_UP, "", reason or "failed")


class Member:
    """Connection of this process to the other members of the process group of one weight sync.

    Args:
        chain: description of the weight sync.
        number: index of this process among the members of the process group.

    Raises:
        SyncError: the store cannot be reached.
    """

    def __init__(self, chain: Chain, number: int) -> None:
        self.chain, self.number = chain, number
        try:
            # The process group has its own connection to the store, because a connection on which a thread waits for
            # a key cannot be used for other requests.
            self.store = _connect(chain, CONNECT_S)
            meeting = PrefixStore("members", _connect(chain, CONNECT_S))
        except RuntimeError as error:
            raise SyncError(
                f"{socket.gethostname()} cannot connect to {chain.host}:{chain.port}, where rank 0 of the actor "
                f"listens: open the ports between the machines, or set rollout.weight_transport=object_store"
            ) from error
        # The variable has the type `Any`, because PyTorch's annotations lack most methods of `ProcessGroupGloo`.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=TRANSFER_S)
        # With `lazy_init`, a member connects only to the members to which it sends or from which it receives data.
        # Without `lazy_init`, each member would connect to all other members.
        options._devices = [gloo.create_device(hostname=own_address(), lazy_init=True)]
        self.group = gloo(meeting, number, chain.size, options)

    def send(self, bucket: Bucket, to: int) -> None:
        """Send a bucket to the member `to`, and return when the bytes have left this process.

        The bytes of the bucket must be in `bucket.data`, not in a shared file.
        """
        header, probes = encoded(bucket)
        data = np.zeros(0, np.uint8) if bucket.data is None else bucket.data
        parts = [_tensor(part) for part in (header, data, probes)]
        for part in (torch.tensor([part.numel() for part in parts]), *parts):
            if part.numel():
                self.group.send([part], to, TAG).wait()

    def receive(self, sender: int) -> Bucket:
        """Wait for the next bucket from another member, and return the bucket."""
        sizes = torch.zeros(3, dtype=torch.int64)
        self.group.recv([sizes], sender, TAG).wait()
        try:
            parts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        except RuntimeError as error:
            raise SyncError(f"no memory for a bucket of {int(sizes.sum()):,} bytes: {error}") from error
        for part in parts:
            if part.numel():
                self.group.recv([part], sender, TAG).wait()
        header, data, probes = (part.numpy() for part in parts)
        return decoded(header, data, probes)

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
                self._look()
        tick()
        try:
            return future.result()
        except RLTrainError:
            raise
        except RuntimeError as error:
            closed = f"another process of the weight sync closed its connection ({described(error)})"
            raise SyncStopped(closed) from error

    def _look(self) -> None:
        try:
            if not self.store.check([GIVEN_UP]):
                return
            reason = self.store.get(GIVEN_UP).decode()
        except RuntimeError:
            reason = "the connection to rank 0 of the actor was closed"
        raise SyncStopped(f"the weight sync was given up: {reason}")

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the connections to the other members of the process group.

        If the `with` block raised an exception, `__exit__` first marks the weight sync as failed, so that the other
        members of the process group stop. The connections are closed when no thread uses the process group any more.
        """
        if error is not None:
            with contextlib.suppress(RuntimeError):
                _mark(self.store, described(error))
        del self.group, self.store


def send_parts(chain: Chain, rank: int, write: Callable[[int], Bucket]) -> None:
    """Send one rank's parts of all buckets to the first engine of the chain.

    While the rank's part of one bucket is being sent, `write` creates the rank's part of a later bucket.

    Args:
        chain: description of the weight sync.
        rank: index of the rank among the members of the process group.
        write: function that takes the index of a bucket, and returns this rank's part of the bucket.

    Raises:
        SyncStopped: another process of the weight sync failed.
        SyncError: the rank cannot join the process group.
    """
    with Member(chain, rank) as member:
        sent: Future[None] | None = None
        for number in range(chain.buckets):
            if rank not in chain.senders(number):
                continue
            part = write(number)
            if sent is not None:
                member.result(sent)
            sent = member.begin(partial(member.send, part, chain.ranks))
        if sent is not None:
            member.result(sent)


def receive_buckets(chain: Chain, place: int, load: Callable[[Bucket], None]) -> None:
    """Receive each bucket of a weight sync, send the bucket to the next engine of the chain, and then load the bucket.

    While a bucket is loaded, the next bucket is received.

    Args:
        chain: description of the weight sync.
        place: index of this engine in the chain of engines, from 0.
        load: function that loads a bucket into this engine.

    Raises:
        SyncStopped: another process of the weight sync failed.
        SyncError: the engine cannot join the process group, has no memory for a bucket, or received parts of a bucket
            that do not fit together.
    """
    own = chain.ranks + place
    with Member(chain, own) as member:

        def transfer(number: int) -> Bucket:
            bucket = member.receive(own - 1) if place else join([member.receive(r) for r in chain.senders(number)])
            if own + 1 < chain.size:
                member.send(bucket, own + 1)
            return bucket

        coming = member.begin(partial(transfer, 0))
        for number in range(chain.buckets):
            bucket = member.result(coming)
            if number + 1 < chain.buckets:
                coming = member.begin(partial(transfer, number + 1))
            load(bucket)


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


def decoded(header: np.ndarray, data: np.ndarray, probes: np.ndarray) -> Bucket:
    """Rebuild a bucket from its bytes `data`, and from the description and the probes that `encoded` returned."""
    description = json.loads(header.tobytes())
    values, pieces, at = probes.view(np.float32), [], 0
    for name, start, size, checksum, length in description.pop("pieces"):
        probe = None if length is None else values[at : at + length]
        at += length or 0
        pieces.append(Piece(name, start, size, checksum, probe))
    places = [Place(**{**place, "shape": tuple(place["shape"])}) for place in description.pop("places")]
    return Bucket(**{**description, "places": places, "pieces": pieces, "data": data})


def packed(takes_part: Sequence[Sequence[bool]]) -> np.ndarray:
    """Return the array for `Chain.takes_part`, in which eight bools are packed into one byte.

    The argument's element `takes_part[r][b]` says whether rank r sends a part of bucket b.
    """
    return np.packbits(np.asarray(takes_part, dtype=bool).T, axis=1)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values if values.flags.writeable else values.copy())
