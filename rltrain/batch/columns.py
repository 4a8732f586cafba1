"""Columns of a batch taken apart into values and offsets, and how rows move between batches: each byte copied once.

Values are tensors, or *stored*: bytes of a received batch, in memory that other readers share. Stored bytes are
read-only and no tensor is ever made over them; whoever wants one, or some rows, gets a copy of just these.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from rltrain.batch.jagged import offsets_in, values_in


@dataclass(frozen=True, slots=True)
class Stored:
    """Values in shared memory.

    Attributes:
        dtype, shape: of the values.
        memory: their bytes (n,) uint8, read-only.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: np.ndarray

    def __len__(self) -> int:
        return self.shape[0]

    def copy(self) -> Tensor:
        """A tensor of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        memory_of(tensor)[:] = self.memory
        return tensor


@dataclass(slots=True, eq=False)
class Column:
    """One column.

    Attributes:
        values: (B, ...) dense, or (N, ...) jagged.
        offsets: (B + 1,) of a jagged one.
        tensor: the same as one tensor, dense or nested, once it was asked for.
    """

    values: Tensor | Stored
    offsets: Tensor | None = None
    tensor: Tensor | None = None

    def own(self) -> Tensor:
        """The values as a tensor; stored ones are copied, once."""
        if isinstance(self.values, Stored):
            self.values = self.values.copy()
        return self.values

    def whole(self) -> Tensor:
        """The column as one tensor, always the same object."""
        if self.tensor is None:
            values = self.own()
            self.tensor = values if self.offsets is None else nested_tensor_from_jagged(values, self.offsets)
        return self.tensor

    def in_family(self, offsets: Tensor | None) -> "Column":
        """The same values with this offsets object, equal to its own."""
        return self if offsets is self.offsets else Column(self.values, offsets)


Columns = Mapping[str, Column]


def column_of(tensor: Tensor) -> Column:
    """A dense or nested tensor, taken apart."""
    if tensor.is_nested:
        return Column(values_in(tensor), offsets_in(tensor), tensor)
    return Column(tensor, None, tensor)


def share_offsets(columns: Columns) -> dict[str, Column]:
    """The same columns; jagged ones with equal offsets share the tensor of the first of them."""
    families: list[Tensor] = []

    def known(offsets: Tensor) -> Tensor:
        found = next((one for one in families if one is offsets), None)
        found = found if found is not None else next((one for one in families if _equal(one, offsets)), None)
        if found is None:
            families.append(offsets)
        return offsets if found is None else found

    return {
        key: column if column.offsets is None else column.in_family(known(column.offsets))
        for key, column in columns.items()
    }


def same(left: Column, right: Column) -> bool:
    """Whether two columns hold the same values; NaN is the same as NaN."""
    if left is right:
        return True
    if left.offsets is not None and right.offsets is not None:
        if not _equal(left.offsets, right.offsets):
            return False
    elif left.offsets is not right.offsets:
        return False
    ours, theirs = left.own(), right.own()
    if ours is theirs:
        return True
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


def gather(parts: Sequence[Columns], rows: np.ndarray | None = None) -> dict[str, Column]:
    """Copies of the rows of all parts, which have the same columns, one after the other.

    Args:
        parts: the columns of each part.
        rows: numbers among all these rows, int64: only these, in this order; None: all of them.
    """
    routes: dict[tuple[int, ...], Route] = {}
    gathered = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        family = tuple(id(column.offsets) for column in columns)
        if family not in routes:
            routes[family] = _route(columns, rows)
        route = routes[family]
        gathered[key] = Column(_copied([column.values for column in columns], route), route.offsets)
    return gathered


class Route(NamedTuple):
    """Where the values of a family's new rows lie.

    Attributes:
        pieces: (part, start, stop) of values that lie together, in the new order.
        total: number of values.
        offsets: of the new rows; None of a dense column.
    """

    pieces: list[tuple[int, int, int]]
    total: int
    offsets: Tensor | None


def _route(columns: Sequence[Column], rows: np.ndarray | None) -> Route:
    edges = [_edges(column) for column in columns]
    starts, stops = np.concatenate([e[:-1] for e in edges]), np.concatenate([e[1:] for e in edges])
    if rows is None:
        pieces = [(number, int(e[0]), int(e[-1])) for number, e in enumerate(edges)]
    else:
        owners = np.repeat(np.arange(len(edges)), [len(e) - 1 for e in edges])[rows]
        starts, stops = starts[rows], stops[rows]
        pieces = _runs(owners, starts, stops)
    ends = np.cumsum(stops - starts)
    total, first = (int(ends[-1]) if len(ends) else 0), columns[0].offsets
    if first is None:
        return Route(pieces, total, None)
    return Route(pieces, total, torch.from_numpy(np.concatenate([[0], ends])).to(first.device))


def _edges(column: Column) -> np.ndarray:
    return np.arange(len(column.values) + 1) if column.offsets is None else column.offsets.cpu().numpy()


def _runs(owners: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[tuple[int, int, int]]:
    """Rows whose values lie one behind the other in the same part, as one piece."""
    if not len(owners):
        return []
    breaks = (owners[1:] != owners[:-1]) | (starts[1:] != stops[:-1])
    heads = np.flatnonzero(np.concatenate([[True], breaks]))
    tails = np.concatenate([heads[1:], [len(owners)]]) - 1
    return list(zip(owners[heads].tolist(), starts[heads].tolist(), stops[tails].tolist(), strict=True))


def _copied(sources: Sequence[Tensor | Stored], route: Route) -> Tensor:
    first = sources[0]
    kind = first.dtype, first.shape[1:]
    if not all(_is_plain(source) and (source.dtype, source.shape[1:]) == kind for source in sources):
        return _joined(sources, route)
    values = torch.empty((route.total, *first.shape[1:]), dtype=first.dtype)
    width = first.dtype.itemsize * math.prod(first.shape[1:])
    if route.total and width:
        memory = [memory_of(source) for source in sources]
        slices = [memory[part][start * width : stop * width] for part, start, stop in route.pieces]
        np.concatenate(slices, out=memory_of(values))
    return values


def _joined(sources: Sequence[Tensor | Stored], route: Route) -> Tensor:
    """The same by PyTorch: on other devices, with gradients, and of types that it has to reconcile."""
    tensors = [source.copy() if isinstance(source, Stored) else source for source in sources]
    pieces = [tensors[part][start:stop] for part, start, stop in route.pieces]
    return torch.cat(pieces + [tensor[:0] for tensor in tensors])


def _is_plain(source: Tensor | Stored) -> bool:
    return isinstance(source, Stored) or (source.device.type == "cpu" and not source.requires_grad)


def memory_of(source: Tensor | Stored) -> np.ndarray:
    """The bytes (n,) uint8 of values on the CPU: no copy unless they do not lie together."""
    if isinstance(source, Stored):
        return source.memory
    return source.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _equal(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.device == right.device and torch.equal(left, right))
