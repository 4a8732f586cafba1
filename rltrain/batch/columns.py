"""Columns of a batch, stored as values and offsets, and functions that copy rows between batches.

The values of a column are either a tensor or read-only bytes. Values in the form of read-only bytes are called
*stored*. Values are stored as bytes in two kinds of batches: batches that were received from another process, and
ranges of rows that are about to be sent. Other processes may read the memory that holds a column's read-only bytes, so
no tensor shares memory with the read-only bytes. `take_rows` copies the values of the selected rows only once, and
copies no other values, if all source columns have the same data type and if all source tensors are contiguous tensors
in host memory without gradients.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from rltrain.batch.jagged import offsets_in, values_in


@dataclass(frozen=True, slots=True)
class Stored:
    """The values of one column, stored as read-only bytes in shared memory.

    Attributes:
        dtype: data type of the column's values.
        shape: shape of the values of all rows, (B, ...) in a dense column and (N, ...) in a jagged column.
        memory: bytes of the column's values, as a read-only array (n,) of uint8.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: np.ndarray

    def __len__(self) -> int:
        return self.shape[0]

    def copy(self) -> Tensor:
        """Return a new tensor with a copy of the stored values."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        memory_of(tensor)[:] = self.memory
        return tensor


@dataclass(slots=True, eq=False)
class Column:
    """One column of a batch.

    Attributes:
        values: the values of all rows, (B, ...) in a dense column and (N, ...) in a jagged column.
        offsets: in a jagged column, a tensor (B + 1,) with the index in `values` at which each row begins, followed by
            the number N of all values; None in a dense column.
        tensor: the column as one dense or nested tensor, cached by the method `whole`; None before the first call of
            `whole`.
    """

    values: Tensor | Stored
    offsets: Tensor | None = None
    tensor: Tensor | None = None

    def own(self) -> Tensor:
        """Return the values of all rows of the column as one tensor.

        If the column's values are stored as bytes, the first call of `own` copies the values into a tensor.
        """
        if isinstance(self.values, Stored):
            self.values = self.values.copy()
        return self.values

    def whole(self) -> Tensor:
        """Return the column as one dense or nested tensor. Every call of `whole` returns the same tensor object."""
        if self.tensor is None:
            values = self.own()
            self.tensor = values if self.offsets is None else nested_tensor_from_jagged(values, self.offsets)
        return self.tensor

    def in_family(self, offsets: Tensor | None) -> "Column":
        """Return a column that has the values of this column and uses the given tensor `offsets`.

        The tensor `offsets` must hold the same numbers as this column's offsets.
        """
        return self if offsets is self.offsets else Column(self.values, offsets)


Columns = Mapping[str, Column]


def column_of(tensor: Tensor) -> Column:
    """Convert a dense or nested tensor to a column."""
    if tensor.is_nested:
        return Column(values_in(tensor), offsets_in(tensor), tensor)
    return Column(tensor, None, tensor)


def share_offsets(columns: Columns) -> dict[str, Column]:
    """Return the columns, changed so that jagged columns with equal offsets share one offsets tensor."""
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
    """Return whether two columns have equal values. NaN counts as equal to NaN."""
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
    """Return the columns of one new batch that consists of all rows, or of selected rows, of several batches.

    Args:
        parts: for each source batch, a mapping from column names to columns. All batches in `parts` have the same
            column names.
        rows: int64 array with the indices of the rows to copy, in the order of the new batch's rows. The indices count
            the rows of all batches in `parts` one after another: if the first batch has 4 rows, the first row of the
            second batch has index 4. If `rows` is None, all rows of all batches are copied.
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


def row_ranges(columns: Columns, sizes: Sequence[int]) -> Iterator[dict[str, Column]]:
    """Split columns into ranges of consecutive rows, and yield the columns of each range.

    The columns of each range share memory with `columns`.

    Args:
        columns: the columns of a batch.
        sizes: number of rows in each range of consecutive rows.
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    families = {id(column.offsets): column.offsets for column in columns.values() if column.offsets is not None}
    offsets = {key: family.cpu().numpy() for key, family in families.items()}
    memory = {name: memory_of(column.values) for name, column in columns.items()}
    for first, last in itertools.pairwise(ends):
        cut = {key: torch.from_numpy(family[first : last + 1] - family[first]) for key, family in offsets.items()}
        found = {}
        for name, column in columns.items():
            begin, end, own = first, last, None
            if column.offsets is not None:
                key = id(column.offsets)
                begin, end, own = int(offsets[key][first]), int(offsets[key][last]), cut[key]
            shape = tuple(column.values.shape[1:])
            width = column.values.dtype.itemsize * math.prod(shape)
            values = Stored(column.values.dtype, (end - begin, *shape), memory[name][begin * width : end * width])
            found[name] = Column(values, own)
        yield found


class Route(NamedTuple):
    """The ranges of values that `take_rows` copies from the source columns to one column of the batch that it makes.

    `take_rows` uses one `Route` for all dense columns, and one `Route` for all jagged columns with the same offsets
    tensor.

    Attributes:
        pieces: ranges of contiguous values to copy, in the order of the new batch's rows. The range (part, start, stop)
            stands for the values with the indices `start` to `stop` - 1 in the column of the source batch `part`.
        total: number of values that the column has in all rows of the new batch together.
        offsets: offsets of the new batch's rows in a jagged column; None for dense columns.
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
    """Convert the selected rows of several source batches to ranges of contiguous values.

    A range is a tuple (part, start, stop): the values `start` to `stop` - 1 of the source batch with the index `part`.

    If the values of a selected row directly follow the values of the previous selected row in the same source batch,
    the two rows are in one range.
    """
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
    """Copy ranges of values with PyTorch, which supports every device, gradients, and mixed data types."""
    tensors = [source.copy() if isinstance(source, Stored) else source for source in sources]
    pieces = [tensors[part][start:stop] for part, start, stop in route.pieces]
    return torch.cat(pieces + [tensor[:0] for tensor in tensors])


def _is_plain(source: Tensor | Stored) -> bool:
    return isinstance(source, Stored) or (source.device.type == "cpu" and not source.requires_grad)


def memory_of(source: Tensor | Stored) -> np.ndarray:
    """Return the bytes of stored values or of a CPU tensor as a uint8 array (n,). `memory_of` copies a tensor only if
    the tensor is not contiguous.
    """
    if isinstance(source, Stored):
        return source.memory
    return source.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _equal(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.device == right.device and torch.equal(left, right))
