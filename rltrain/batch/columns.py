"""Columns of a batch as values and offsets, and functions that copy rows between batches, each byte once.

Values are tensors, or they are *stored*: bytes of a received batch, in memory that other readers share. Stored bytes
are read-only, and no tensor uses them as its memory. A caller that needs a tensor, or some rows, gets a copy of exactly
the needed values.
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
        dtype: data type of the values.
        shape: shape of the values.
        memory: bytes of the values, (n,) uint8, read-only.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: np.ndarray

    def __len__(self) -> int:
        return self.shape[0]

    def copy(self) -> Tensor:
        """Return a copy of the values as a tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        memory_of(tensor)[:] = self.memory
        return tensor


@dataclass(slots=True, eq=False)
class Column:
    """One column of a batch.

    Attributes:
        values: (B, ...) in a dense column, (N, ...) in a jagged column.
        offsets: (B + 1,) in a jagged column, None in a dense column.
        tensor: cache of `whole`: the column as one dense or nested tensor, or None.
    """

    values: Tensor | Stored
    offsets: Tensor | None = None
    tensor: Tensor | None = None

    def own(self) -> Tensor:
        """Return the values as a tensor. Stored values are copied at the first call only."""
        if isinstance(self.values, Stored):
            self.values = self.values.copy()
        return self.values

    def whole(self) -> Tensor:
        """Return the column as one tensor. Every call returns the same object."""
        if self.tensor is None:
            values = self.own()
            self.tensor = values if self.offsets is None else nested_tensor_from_jagged(values, self.offsets)
        return self.tensor

    def in_family(self, offsets: Tensor | None) -> "Column":
        """Return this column with the tensor `offsets` in place of its own offsets, which must be equal."""
        return self if offsets is self.offsets else Column(self.values, offsets)


Columns = Mapping[str, Column]


def column_of(tensor: Tensor) -> Column:
    """Return the column of a dense or nested tensor."""
    if tensor.is_nested:
        return Column(values_in(tensor), offsets_in(tensor), tensor)
    return Column(tensor, None, tensor)


def share_offsets(columns: Columns) -> dict[str, Column]:
    """Return the same columns, where all jagged columns with equal offsets share the first one's offsets tensor."""
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
    """Return whether two columns hold the same values. NaN counts as equal to NaN."""
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


def take_rows(parts: Sequence[Columns], rows: np.ndarray | None = None) -> dict[str, Column]:
    """Copy the rows of several parts into new columns, one part after the other.

    Args:
        parts: the columns of each part. All parts have the same column names.
        rows: numbers of the rows to copy, in their new order, int64. Row numbers count the rows of all parts in order.
            If `rows` is None, all rows are copied.
    """
    routes: dict[tuple[int, ...], Route] = {}
    taken = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        family = tuple(id(column.offsets) for column in columns)
        if family not in routes:
            routes[family] = _route(columns, rows)
        route = routes[family]
        taken[key] = Column(_copied([column.values for column in columns], route), route.offsets)
    return taken


class Route(NamedTuple):
    """The places from which the values of new rows are copied, for all columns that share their offsets.

    Attributes:
        pieces: (part, start, stop) of contiguous values, in the new order.
        total: number of values.
        offsets: offsets of the new rows; None for dense columns.
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
    """Return the rows as pieces (part, start, stop). Rows with adjacent values in the same part form one piece."""
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
    """Copy the values with PyTorch, which handles other devices, gradients, and parts with different types."""
    tensors = [source.copy() if isinstance(source, Stored) else source for source in sources]
    pieces = [tensors[part][start:stop] for part, start, stop in route.pieces]
    return torch.cat(pieces + [tensor[:0] for tensor in tensors])


def _is_plain(source: Tensor | Stored) -> bool:
    return isinstance(source, Stored) or (source.device.type == "cpu" and not source.requires_grad)


def memory_of(source: Tensor | Stored) -> np.ndarray:
    """Return the bytes (n,) uint8 of values on the CPU. The values are copied only if they are not contiguous."""
    if isinstance(source, Stored):
        return source.memory
    return source.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _equal(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.device == right.device and torch.equal(left, right))
