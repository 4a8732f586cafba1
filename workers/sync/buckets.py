"""How the weights of one version are cut into buckets, and what of a bucket travels: pure, without processes.

All ranks lay out the same plan. Each copies the rows that it holds to their place in a bucket, which is its part; an
engine joins the parts of all ranks and reads whole tensors out of the bucket.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rltrain.base.errors import SyncError
from workers.sync.checks import checksum

BUCKET_BYTES = 64 << 20  # a larger tensor has a bucket of its own
ALIGNMENT = 64  # each tensor of a bucket starts at a multiple of so many bytes


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its bucket.

    Attributes:
        name: as in the Hugging Face checkpoint.
        shape: of the whole tensor.
        start, size: in bytes.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor, as one rank wrote them.

    Attributes:
        name: of the tensor.
        start, size: in bytes; `start` counts from that of the bucket. Of size 0 it is a proof of a tensor that does
            not travel, and `start` is the number of its first row.
        checksum: of the bytes, as in `checks.checksum`; None without checks.
        probe: these rows of W v, float32; None without checks.
    """

    name: str
    start: int
    size: int
    checksum: int | None = None
    probe: np.ndarray | None = None


@dataclass
class Bucket:
    """Some tensors of one weight version: what one rank wrote of them, or all of it.

    Attributes:
        version: of the weights.
        dtype: of all tensors, "float32" or "bfloat16".
        places: of all its tensors.
        aliases: further names of tied tensors, and the name under which each is sent; they are checked too.
        pieces: what was written, in this order.
        data: uint8. Of one rank, its pieces one after the other, each at a multiple of `ALIGNMENT`; of all, the tensors
            at their places. None where they lie in a file, there at their places always.
        path, offset: that file, and where the bucket starts in it.
        scale: of adapters, what B A is multiplied by; None where the tensors are whole weights.
    """

    version: int
    dtype: str
    places: list[Place]
    aliases: dict[str, str]
    pieces: list[Piece] = field(default_factory=list)
    data: np.ndarray | None = None
    path: str | None = None
    offset: int = 0
    scale: float | None = None

    @property
    def size(self) -> int:
        """Bytes, from the start of the first tensor to the end of the last."""
        return end(self.places)

    def probes(self) -> dict[str, np.ndarray]:
        """W v per matrix, and other tensors as they are, flat; also under the further names of tied ones."""
        found: dict[str, list[np.ndarray]] = {}
        for piece in self.pieces:
            if piece.probe is not None:
                found.setdefault(piece.name, []).append(piece.probe)
        probes = {name: np.concatenate(parts) for name, parts in found.items()}
        return probes | {alias: probes[name] for alias, name in self.aliases.items() if name in probes}


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


def end(places: Sequence[Place]) -> int:
    """Bytes that a bucket takes."""
    return places[-1].start + aligned(places[-1].size) if places else 0


def plan(shapes: Iterable[tuple[str, Sequence[int]]], *, itemsize: int) -> list[list[Place]]:
    """Tensors (name, shape) in their order, put into buckets of at most `BUCKET_BYTES`, or of one tensor."""
    buckets: list[list[Place]] = []
    for name, shape in shapes:
        size = int(np.prod(shape, dtype=np.int64)) * itemsize
        if not buckets or end(buckets[-1]) + size > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(Place(name, tuple(shape), end(buckets[-1]), size))
    return buckets


def join(parts: Sequence[Bucket]) -> Bucket:
    """The bucket that these ranks wrote together. Raises SyncError where rows of a tensor are in none of the parts."""
    first = parts[0]
    pieces = sorted((piece for part in parts for piece in part.pieces), key=lambda piece: piece.start)
    covered: dict[str, int] = {}
    for piece in pieces:
        covered[piece.name] = covered.get(piece.name, 0) + piece.size
    missing = [place.name for place in first.places if covered.get(place.name, 0) != place.size]
    if missing:
        raise SyncError(
            f"weight sync {first.version}: the ranks together did not send '{missing[0]}' once as a whole "
            f"({covered.get(missing[0], 0)} bytes); their shards do not fit together, report this"
        )
    data = _together(first.size, parts) if first.path is None else None
    return replace(first, pieces=pieces, data=data)


def _together(size: int, parts: Sequence[Bucket]) -> np.ndarray:
    """The bytes of all parts, each at its place; those of a rank that wrote everything as they are."""
    if len(parts) == 1:
        assert parts[0].data is not None, "data, or a file"
        return parts[0].data
    whole = np.zeros(size, np.uint8)
    for part in parts:
        start = 0
        for piece in part.pieces:
            assert part.data is not None, "data, or a file"
            whole[piece.start : piece.start + piece.size] = part.data[start : start + piece.size]
            start += aligned(piece.size)
    return whole


def verify(bucket: Bucket, data: np.ndarray) -> None:
    """Raise SyncError unless these bytes of the bucket are the sender's, where checksums came along."""
    for piece in bucket.pieces:
        if piece.checksum is None:
            continue
        found = checksum(data[piece.start : piece.start + piece.size])
        if found != piece.checksum:
            raise SyncError(
                f"weight sync {bucket.version}: the bytes of '{piece.name}' are not those that the actor sent "
                f"(checksum {found}, expected {piece.checksum}); the transport corrupted them"
            )


def tensors_of(bucket: Bucket, data: np.ndarray) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors by name, views of its bytes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (buffer|NumPy array) is not writable")  # it is only read here
        whole = torch.from_numpy(data)
    for place in bucket.places:
        part = whole[place.start : place.start + place.size]
        yield place.name, part.view(getattr(torch, bucket.dtype)).view(place.shape)
