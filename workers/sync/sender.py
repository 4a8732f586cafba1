"""The part of a weight sync that runs on an actor rank: the rank copies the rows that it holds into buckets.

Tensors that are sharded by rows are sent without being gathered. Each rank converts the rows that it holds to the
engine's dtype and copies the rows into a bucket. Each rank computes the checksum of the copied rows, and their product
with a fixed random vector, while the copied rows are still in the CPU's cache (see `workers.sync.checks`). Tensors that
are sharded, but not by rows, are gathered, and rank 0 writes the gathered tensors. With the transport `device_handles`,
the ranks gather all tensors, and each rank writes whole tensors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rltrain.base.errors import SyncStopped
from workers.cluster.node_settings import own_address
from workers.cluster.progress import tick, waiting
from workers.models.adapter_weights import merge
from workers.models.fsdp import full, on_all_ranks, tied_names
from workers.models.lora import adapter_tensors, adapters_of, plain_parameters
from workers.sync.buckets import Bucket, Piece, Place, aligned, end, layout
from workers.sync.checks import checksum, probe
from workers.sync.device_memory import free_cached, own_gpu
from workers.sync.memory import SharedFile, remove_stale, whereabouts
from workers.sync.process_group import GroupPlan, send_parts, serve_store

SLOTS = 2  # The shared file has room for at most two buckets: engines read one bucket while ranks write the next one.
# Rows are processed in chunks of about CHUNK_BYTES bytes on a CPU, so that a chunk fits into a core's cache, and of
# about GPU_CHUNK_BYTES bytes on a GPU.
CHUNK_BYTES, GPU_CHUNK_BYTES = 1 << 20, 64 << 20


@dataclass(frozen=True)
class Offer:
    """Message from a rank to the driver at the start of a weight sync.

    Attributes:
        takes_part: for each bucket of the sync, whether the rank takes part in writing the bucket. A rank that
            sends no part of a bucket takes part in writing the bucket only if it must help to gather a tensor. If there
            are several replicas of the model, the ranks of only one replica send rows.
        where: string that shows which processes can share files: two processes that can map each other's shared files
            have the same string. `where` is None if it is unknown with which processes the rank can share files (see
            `memory.whereabouts`).
        has_file: True if the driver gave a path for the shared file of the weights and, on rank 0, the shared file was
            created.
        gpu: identifier of the rank's GPU (see `device_memory.own_gpu`), or None without a GPU.
    """

    takes_part: Sequence[bool]
    where: str | None
    has_file: bool = False
    gpu: str | None = None


class Sender:
    """Sender of one rank's part of the weights in one weight sync.

    All ranks must call the same methods of their senders in the same order, except that `write` is called only where
    `takes_part` returns True. If `whole` is True, all ranks call `write` for each bucket.

    Args:
        model: the model whose parameters are sent; the parameters may be sharded. Tied parameters are sent once.
        version: version of the weights.
        dtype: dtype of the weights in the engine, "float32" or "bfloat16".
        check: whether to send the checksums and probes of `workers.sync.checks`, with which the engines verify the
            weights.

    Attributes:
        device: device on which `write` collects the rows of a bucket.
        whole: whether this rank gathers all tensors and sends whole tensors. If `whole` is False, this rank sends the
            rows that it holds.
    """

    def __init__(self, model: nn.Module, *, version: int, dtype: str, check: bool) -> None:
        self.parameters = self.tensors(model)
        self.device, self.whole = torch.device("cpu"), False
        self.aliases, self.version, self.dtype, self.check = tied_names(model), version, dtype, check
        self.torch_dtype: torch.dtype = getattr(torch, dtype)
        self.itemsize = self.torch_dtype.itemsize
        shapes = ((name, parameter.shape) for name, parameter in self.parameters.items())
        self.layout = layout(shapes, itemsize=self.itemsize)
        self.slot = max(map(end, self.layout))
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self.path: str | None = None
        self.file: SharedFile | None = None
        self.store: TCPStore | None = None

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a dict that maps names to the tensors to send; the tensors may be sharded."""
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def offer(self, path: str | None) -> Offer:
        """Prepare the weight sync on this rank, and return the message (`Offer`) that the rank sends to the driver.

        If `path` is given, rank 0 creates the shared file at `path`. If there is no room for the shared file,
        `Offer.has_file` is False in rank 0's offer.
        """
        has_file = path is not None
        if path and self.first:
            remove_stale()
            try:
                self.file = SharedFile(path, min(SLOTS, len(self.layout)) * self.slot)
            except OSError:
                has_file = False
        takes_part = [self.takes_part(number) for number in range(len(self.layout))]
        return Offer(takes_part, whereabouts(), has_file, own_gpu())

    def takes_part(self, number: int) -> bool:
        """Return whether this rank must call `write` for the bucket with the index `number`.

        A rank must call `write` for a bucket if the rank has rows in the bucket, or if all ranks must gather a tensor
        of the bucket.
        """
        held = [self.parameters[place.name] for place in self.layout[number]]
        return any(is_gathered(one) or row_range(one, self.first) for one in held)

    def serve_store(self) -> tuple[str, int]:
        """Start the store (TCPStore) of a process group, and return the store's host and port.

        The members of the process group find each other through the store, which runs until `close` is called.
        """
        self._close_file()  # No shared file is needed if a process group transfers the weights.
        self.store = serve_store(own_address())
        return self.store.host, self.store.port

    def send(self, plan: GroupPlan, member: int) -> None:
        """Send this rank's parts of all buckets through a process group, in which this rank has the index `member`.

        With the transports "nccl" and "device_handles", this rank writes the buckets into the memory of the device that
        holds the model.
        """
        self.whole = plan.transport == "device_handles"
        if plan.transport != "process_group":
            self.device = next(iter(self.parameters.values())).device
        agree = raise_on_all_ranks if self.gathers() else None
        send_parts(plan, member, partial(self.write, path=None), agree=agree)
        if self.device.type != "cpu":
            free_cached()

    def gathers(self) -> bool:
        """Return whether `write` calls collective operations, so that all ranks must call it for the same buckets."""
        return self.whole or any(map(is_gathered, self.parameters.values()))

    @torch.no_grad()
    def write(self, number: int, path: str | None) -> Bucket:
        """Write this rank's part of a bucket to the file at `path` or, if `path` is None, into the returned bucket.

        Each rank for which `takes_part` is True must call this method.
        """
        places = self.layout[number]
        held = [(place, self._rows(self.parameters[place.name])) for place in places]
        rows = [(place, *own) for place, own in held if own]
        bucket = Bucket(self.version, self.dtype, places, self.aliases, path=path)
        if path is None:
            size = sum(aligned(own.numel() * self.itemsize) for _, own, _ in rows)
            bucket.data = torch.zeros(size, dtype=torch.uint8, device=self.device)
        else:
            bucket.offset = number % SLOTS * self.slot
        at = 0
        for place, own, first_row in rows:
            start = place.start + first_row * (place.size // (place.shape[0] if place.shape else 1))
            size = own.numel() * self.itemsize
            target = bucket.data[at : at + size] if bucket.data is not None else self._slot(bucket, start, size)
            bucket.pieces.append(self._write(place, own, start, target))
            at += aligned(size)
        # By now, every process has opened the shared file to access the first bucket, so the file's name can be
        # removed.
        if number == SLOTS and self.file:
            self.file.unlink()
        return bucket

    def _rows(self, parameter: Tensor) -> tuple[Tensor, int] | None:
        """Return the rows of a tensor that this rank sends and the index of the first row; None without such rows."""
        return (full(parameter), 0) if self.whole else own_rows(parameter, self.first)

    def _slot(self, bucket: Bucket, start: int, size: int) -> Tensor:
        assert bucket.path is not None, "a bucket without data in memory must have the path of a shared file"
        if self.file is None:
            self.file = SharedFile(bucket.path)
        return self.file.memory[bucket.offset + start : bucket.offset + start + size]

    def _write(self, place: Place, rows: Tensor, start: int, target: Tensor) -> Piece:
        """Copy rows of a tensor to `target` (n,) uint8, and return a `Piece` with the rows' checksum and probe."""
        if rows.device != target.device:
            rows = rows.to(self.torch_dtype).to(target.device)
        # A tensor with more than two dimensions is a stack of matrices, whose rows are smaller than the tensor's own.
        rows = rows.reshape(1) if rows.ndim == 0 else rows.flatten(0, -2) if rows.ndim > 2 else rows
        row = len(target) // max(1, len(rows))
        tick()
        # The number of rows in a chunk is a multiple of 8, so that the length of a chunk in bytes is a multiple of 8.
        # If the length of a chunk were not a multiple of 8 bytes, the sum of the chunks' checksums could differ from
        # the checksum of all rows.
        chunk = CHUNK_BYTES if target.device.type == "cpu" else GPU_CHUNK_BYTES
        step = max(8, chunk // max(1, row) // 8 * 8)
        out = target.view(self.torch_dtype).view(rows.shape)
        total, probes = 0, []
        for number, (source, written) in enumerate(zip(rows.split(step), out.split(step), strict=True)):
            written.copy_(source)
            if self.check:
                begin = number * step * row
                total += checksum(target[begin : begin + len(written) * row])
                probes.append(probe(written))
        if not self.check:
            return Piece(place.name, start, len(target))
        products = torch.cat(probes).cpu().numpy() if probes else np.zeros(0, np.float32)
        return Piece(place.name, start, len(target), total % 2**64, products)

    def close(self) -> None:
        """Remove the name of the shared file, unmap the file from this process, and end the store."""
        self._close_file()
        self.store = None

    def _close_file(self) -> None:
        if self.file:
            self.file.unlink()
        self.file = None


class AdapterSender(Sender):
    """Sender of the matrices A and B of a model's adapters in float32.

    If `check` is True, `AdapterSender` sends, besides the matrices A and B, the products of the engine's weight
    matrices and a fixed random vector. An engine uses the products that it receives to verify its weights (see
    `checks.probe`).

    Each engine has its own copy of the base weights, and merges the adapters into them or applies the adapters beside
    them (`rollout.vllm.adapters`).

    Args:
        model: the model with the adapters; the parameters may be sharded.
        version: version of the weights.
        dtype: dtype of the weights in the engine, "float32" or "bfloat16".
        check: whether to send checksums and products.
        merged: whether the engines merge the adapters into the base weights. If not, the products are those of the base
            weights. An engine can calculate the products of the adapters from A and B.
    """

    def __init__(self, model: nn.Module, *, version: int, dtype: str, check: bool, merged: bool = True) -> None:
        super().__init__(model, version=version, dtype="float32", check=check)
        self.adapters, self.base = adapters_of(model) if merged else {}, plain_parameters(model)
        scales = {adapter.scale for adapter in adapters_of(model).values()}
        self.engine_dtype: torch.dtype = getattr(torch, dtype)
        (self.scale,) = scales

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a dict that maps names to the matrices A and B of every adapter; the matrices may be sharded."""
        return adapter_tensors(model)

    def takes_part(self, number: int) -> bool:
        """Return whether this rank must call `write` for the bucket with the index `number`.

        If `check` is True, all ranks take part in writing the last bucket, because they must gather the adapters to
        compute the probes of merged weights.
        """
        return super().takes_part(number) or (self.check and number == len(self.layout) - 1)

    @torch.no_grad()
    def write(self, number: int, path: str | None) -> Bucket:
        """Write this rank's part of a bucket, as `Sender.write` does.

        If `check` is True, the last bucket contains, besides adapter matrices, the results of `checks.probe` for the
        engine's weights.
        """
        bucket = super().write(number, path)
        bucket.scale = self.scale
        bucket.pieces = [replace(piece, probe=None) for piece in bucket.pieces]
        if self.check and number == len(self.layout) - 1:
            bucket.pieces += self._proofs()
        return bucket

    def gathers(self) -> bool:
        """Return whether `write` calls collective operations: the ranks gather the adapters for the probes."""
        return self.check or super().gathers()

    @torch.no_grad()
    def _proofs(self) -> Iterator[Piece]:
        """Yield for each parameter of the engine's model a `Piece` with a probe of the rows that this rank holds.

        Each yielded `Piece` contains only the probe, and not the bytes of the rows. The probe of a matrix is its
        product with a fixed random vector (see `checks.probe`).

        All ranks must run the generator to its end, because gathering the adapters is a collective operation.

        The merged weights are rounded to the engine's dtype before `checks.probe` computes their probes.
        """
        for name, parameter in self.base.items():
            adapter, own = self.adapters.get(name), own_rows(parameter, self.first)
            a = None if adapter is None else full(adapter.a.detach())
            b = None if adapter is None else own_rows(adapter.b.detach(), self.first)
            if own is None:
                continue
            rows = own[0].reshape(1) if own[0].ndim == 0 else own[0]
            step = max(1, CHUNK_BYTES // max(1, rows[:1].nbytes))
            chunks: Iterable[Tensor] = rows.split(step)
            if a is not None:
                assert b, "the matrix B of an adapter must be sharded by rows, like the adapted matrix"
                chunks = map(partial(merge, a=a, scale=self.scale), chunks, b[0].split(step))
            products = [probe(chunk.to(self.engine_dtype).cpu()).numpy() for chunk in chunks]
            yield Piece(name, own[1], 0, None, np.concatenate(products))


def raise_on_all_ranks(failure: Exception | None) -> None:
    """Raise an exception on all ranks if any rank passes an exception. All ranks must call this function together.

    Before ranks gather a tensor together, they call `raise_on_all_ranks`. Otherwise a rank would wait for a rank that
    has given up the weight sync.

    Raises:
        Exception: `failure`, if it is not None.
        SyncStopped: another rank passed an exception.
    """
    with waiting():
        good = on_all_ranks(failure is None)
    if failure is not None:
        raise failure
    if not good:
        raise SyncStopped("another rank gave up the weight sync")


def own_rows(parameter: Tensor, first: bool) -> tuple[Tensor, int] | None:
    """Return the rows of a tensor that this rank sends and the index of the first row; None if this rank sends no rows.

    All ranks must call this function for a tensor that is gathered.

    Args:
        parameter: tensor of the model, either whole or sharded over the ranks.
        first: whether this rank sends the tensors that are not sharded by rows.
    """
    if is_gathered(parameter):
        whole = full(parameter)
        return (whole, 0) if first else None
    own = row_range(parameter, first)
    if own is None:
        return None
    local, (start, count) = parameter.to_local() if isinstance(parameter, DTensor) else parameter, own
    assert local.ndim == 0 or len(local) == count, (
        f"this rank holds {len(local)} rows from row {start} on, but must hold {count} rows"
    )
    return local, start


def is_gathered(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor must be gathered before it is sent.

    A tensor need not be gathered if each rank holds consecutive whole rows of the tensor.
    """
    return isinstance(parameter, DTensor) and any(
        not one.is_replicate() and not _by_rows(one) for one in parameter.placements
    )


def row_range(parameter: Tensor, first: bool) -> tuple[int, int] | None:
    """Return the index of the first row of a tensor that this rank sends, and the number of rows that this rank sends.

    If this rank sends no row of the tensor, `row_range` returns None. If several groups of ranks hold copies of a
    tensor, the ranks of one group send the tensors that are sharded by rows. A tensor that is not sharded by rows is
    sent by a single rank, for which `first` is True. A tensor without dimensions counts as one row.
    """
    rows = parameter.size(0) if parameter.ndim else 1
    if not isinstance(parameter, DTensor) or is_gathered(parameter):
        return (0, rows) if first else None
    mesh, placements = parameter.device_mesh, parameter.placements
    if 0 not in mesh.mesh:
        return None  # With tensor parallelism, several meshes hold copies of a parameter. Only rank 0's mesh sends it.
    if any(mesh.get_local_rank(dim) for dim, one in enumerate(placements) if not _by_rows(one)):
        return None
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return (offset[0], shape[0]) if shape and shape[0] else None


def _by_rows(placement: Placement) -> bool:
    return getattr(placement, "dim", None) == 0
