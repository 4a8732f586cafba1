"""Buckets: the units of data in which a weight sync transfers one version of the weights to the engines.

All ranks compute the same layout, which assigns a bucket and an offset in the bucket to each tensor. Each rank writes
its own part of a bucket, which contains only the tensor rows that the rank holds. An engine joins all ranks' parts of a
bucket, and reads whole tensors from the joined bucket.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltrain.base.errors import SyncError
from workers.sync.checks import checksum
from workers.sync.device_memory import wait_for_gpu

BUCKET_BYTES = 64 << 20  # Maximum bytes of a bucket, except for a bucket with a single, larger tensor.
ALIGNMENT = 64  # Alignment in bytes of the tensors in a bucket.


@dataclass(frozen=True)
class Place:
    """Location of a tensor in its bucket.

    Attributes:
        name: name of the tensor in the Hugging Face checkpoint.
        shape: shape of the whole tensor.
        start, size: offset of the tensor in the bucket, and length of the tensor, both in bytes.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one tensor that one rank wrote into a bucket.

    Attributes:
        name: name of the tensor whose rows the piece contains.
        start, size: offset of the piece's rows in the bucket, and length of these rows, both in bytes. If `size` is 0,
            the bucket contains only the `probe` of the rows, and `start` is the index of the piece's first row.
        checksum: result of `checks.checksum` for the bytes of the piece, or None if the weight sync has no checks.
        probe: product of the rows of a matrix and a fixed random vector, in float32, with which the engine verifies its
            weights (see `checks.probe`). `probe` is None if the rank sends no probe of the rows.
    """

    name: str
    start: int
    size: int
    checksum: int | None = None
    probe: np.ndarray | None = None


@dataclass
class Bucket:
    """A group of tensors that a weight sync transfers together.

    A `Bucket` that a rank wrote contains only the tensor rows that the rank holds, and is called the rank's part of the
    bucket. The `Bucket` that the function `join` returns contains whole tensors.

    Attributes:
        version: version of the weights.
        dtype: dtype of all tensors, "float32" or "bfloat16".
        places: locations of all tensors of the bucket.
        aliases: maps each additional name of a tied tensor to the name under which the tensor is sent. The engine
            checks a tied tensor under each of its names.
        pieces: the pieces (rows of tensors) that were written into the bucket, in the order of their bytes.
        data: the bucket's bytes as uint8, in the memory of the host or of a GPU, or None if the bytes are elsewhere. In
            one rank's part, `data` contains the rank's pieces one after another, each at a multiple of `ALIGNMENT`. In
            the result of `join`, and in the file at `path`, each tensor starts at its offset in `places`.
        path, offset: path of the file that holds the bucket's bytes, and the offset of the bucket in the file.
        handle: description of the GPU memory that holds the bucket's bytes, with which another process can map the
            memory (see `device_memory.handle_of`).
        scale: factor by which the product B A of an adapter's matrices B and A is multiplied, or None if the tensors
            are not adapters.
    """

    version: int
    dtype: str
    places: list[Place]
    aliases: dict[str, str]
    pieces: list[Piece] = field(default_factory=list)
    data: Tensor | None = None
    path: str | None = None
    offset: int = 0
    handle: str | None = None
    scale: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes with `data` as a NumPy array, whose bytes Ray can pass on without copying them.

        The bytes must be in the host's memory.
        """
        return vars(self) | {"data": None if self.data is None else self.data.numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes that `__getstate__` returned."""
        vars(self).update(state | {"data": None if state["data"] is None else as_tensor(state["data"])})

    @property
    def size(self) -> int:
        """Return the size of the bucket in bytes, rounded up to a multiple of `ALIGNMENT`."""
        return end(self.places)

    def probes(self) -> dict[str, np.ndarray]:
        """Return a dictionary that maps names of tensors to the values with which the engine verifies its weights.

        For a matrix W, the value is the product W v, where v is a fixed random vector. For a stack of matrices, such as
        the weights of all experts of a layer, the products of all matrices are concatenated. For a tensor with fewer
        dimensions, the value is the flattened tensor (see `checks.probe`). A tied tensor is in the dictionary under
        each of its names.
        """
        found: dict[str, list[np.ndarray]] = {}
        for piece in self.pieces:
            if piece.probe is not None:
                found.setdefault(piece.name, []).append(piece.probe)
        probes = {name: np.concatenate(parts) for name, parts in found.items()}
        return probes | {alias: probes[name] for alias, name in self.aliases.items() if name in probes}


def as_tensor(values: np.ndarray) -> Tensor:
    """Return a tensor that shares the memory of an array. If the array is read-only, nobody may write to the tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (buffer|NumPy array) is not writable")
        return torch.from_numpy(values)


def aligned(size: int) -> int:
    """Round a size in bytes up to a multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


def end(places: Sequence[Place]) -> int:
    """Return the size in bytes of a bucket with the tensors `places`, rounded up to a multiple of `ALIGNMENT`."""
    return places[-1].start + aligned(places[-1].size) if places else 0


def layout(shapes: Iterable[tuple[str, Sequence[int]]], *, itemsize: int) -> list[list[Place]]:
    """Divide tensors (name, shape) into buckets of at most `BUCKET_BYTES`, and keep the order of the tensors.

    A tensor that is larger than `BUCKET_BYTES` gets its own bucket.
    """
    buckets: list[list[Place]] = []
    for name, shape in shapes:
        size = int(np.prod(shape, dtype=np.int64)) * itemsize
        if not buckets or end(buckets[-1]) + size > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(Place(name, tuple(shape), end(buckets[-1]), size))
    return buckets


def join(parts: Sequence[Bucket]) -> Bucket:
    """Join all ranks' parts of a bucket into the whole bucket.

    Raises:
        SyncError: the parts of all ranks together do not cover each tensor of the bucket exactly once.
    """
    first = parts[0]
    pieces = sorted((piece for part in parts for piece in part.pieces), key=lambda piece: piece.start)
    sent: dict[str, int] = {}
    # For each tensor, the offset up to which the pieces cover the tensor without a gap or an overlap.
    reached = {place.name: place.start for place in first.places}
    for piece in pieces:
        sent[piece.name] = sent.get(piece.name, 0) + piece.size
        if piece.size and piece.start == reached.get(piece.name):
            reached[piece.name] += piece.size
    wrong = [
        place.name
        for place in first.places
        if sent.get(place.name, 0) != place.size or reached[place.name] != place.start + place.size
    ]
    if wrong:
        raise SyncError(
            f"weight sync {first.version}: the shards of '{wrong[0]}' from all ranks have gaps or overlaps "
            f"({sent.get(wrong[0], 0)} bytes were sent); please report this"
        )
    data = _together(first.size, parts) if first.path is None and first.handle is None else None
    return replace(first, pieces=pieces, data=data)


def _together(size: int, parts: Sequence[Bucket]) -> Tensor:
    """Return the bytes (size,) of a whole bucket, into which the rows from all ranks are copied.

    If only one rank sends a part of the bucket, the bytes of the part are returned without a copy.
    """
    data = [part.data for part in parts if part.data is not None]
    assert len(data) == len(parts), "a bucket with neither a file nor a handle must have `data`"
    if len(parts) == 1:
        return data[0]
    whole = torch.zeros(size, dtype=torch.uint8, device=data[0].device)
    for part, own in zip(parts, data, strict=True):
        start = 0
        for piece in part.pieces:
            whole[piece.start : piece.start + piece.size].copy_(own[start : start + piece.size])
            start += aligned(piece.size)
    wait_for_gpu(whole)  # Another thread loads the bucket.
    return whole


def verify(bucket: Bucket, data: Tensor) -> None:
    """Raise SyncError if received rows do not have the checksum that the sender has computed.

    Rows without a checksum are not checked.
    """
    for piece in bucket.pieces:
        if piece.checksum is None:
            continue
        found = checksum(data[piece.start : piece.start + piece.size])
        if found != piece.checksum:
            raise SyncError(
                f"weight sync {bucket.version}: the bytes of '{piece.name}' are not those that the actor sent "
                f"(checksum {found}, expected {piece.checksum}); the transport corrupted them"
            )


def tensors_of(bucket: Bucket, data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor in a bucket, where the tensor is a view of the bucket's bytes."""
    for place in bucket.places:
        part = data[place.start : place.start + place.size]
        yield place.name, part.view(getattr(torch, bucket.dtype)).view(place.shape)
