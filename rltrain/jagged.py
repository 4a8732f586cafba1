"""Jagged columns: the values of all rows one after the other, (N,), and offsets, (B + 1,), where each row begins.

Columns of one family share one offsets tensor, the same object: PyTorch combines nested tensors only then. Functions on
several columns keep that, and compute what a family has in common once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

Columns = Mapping[str, Tensor]
Memory = tuple[str, tuple[int, ...], np.ndarray]  # dtype, shape, bytes
Frozen = tuple[dict[str, tuple[Memory, int]], list[Memory]]


def jagged(rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype) -> Tensor:
    """A jagged column (B, j) from B sequences."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
    values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
    return nested_tensor_from_jagged(values, offsets_of(lengths))


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets (B + 1,) of rows with these lengths (B,)."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def positions(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... within each row: (N,) for rows of these lengths (B,)."""
    starts = offsets_of(lengths)[:-1]
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)


def values_in(column: Tensor) -> Tensor:
    """The values (N,) of a jagged column."""
    return cast(Tensor, cast(Any, column).values())


def offsets_in(column: Tensor) -> Tensor:
    """The offsets (B + 1,) of a jagged column."""
    return cast(Tensor, cast(Any, column).offsets())


class Packed(NamedTuple):
    """Columns as plain tensors.

    Attributes:
        tensors: by name, a dense column with -1, or the values of a jagged one with the number of its family.
        families: the offsets of each family.
    """

    tensors: dict[str, tuple[Tensor, int]]
    families: list[Tensor]

    def unpack(self) -> dict[str, Tensor]:
        """The columns again; those of a family share its offsets."""
        return {
            key: values if family < 0 else nested_tensor_from_jagged(values, self.families[family])
            for key, (values, family) in self.tensors.items()
        }

    def map(self, function: Callable[[Tensor], Tensor]) -> "Packed":
        """`function` of every tensor, the offsets included, each of them once."""
        tensors = {key: (function(values), family) for key, (values, family) in self.tensors.items()}
        return Packed(tensors, [function(offsets) for offsets in self.families])


def pack(columns: Columns) -> Packed:
    """Take columns apart; jagged ones with equal offsets become one family."""
    families: list[Tensor] = []
    tensors: dict[str, tuple[Tensor, int]] = {}
    for key, column in columns.items():
        if not column.is_nested:
            tensors[key] = (column, -1)
            continue
        offsets = offsets_in(column)
        number = next((i for i, known in enumerate(families) if _equal(known, offsets)), len(families))
        if number == len(families):
            families.append(offsets)
        tensors[key] = (values_in(column), number)
    return Packed(tensors, families)


def share_offsets(columns: Columns) -> dict[str, Tensor]:
    """The same columns; jagged ones with equal offsets share the tensor of the first of them."""
    packed = pack(columns)
    shared = {}
    for key, (values, family) in packed.tensors.items():
        column = columns[key]
        is_shared = family < 0 or offsets_in(column) is packed.families[family]
        shared[key] = column if is_shared else nested_tensor_from_jagged(values, packed.families[family])
    return shared


def take_rows(columns: Columns, rows: Tensor) -> dict[str, Tensor]:
    """Copies of these rows, in this order."""
    packed = pack(columns)
    chosen = [_chosen(offsets, rows) for offsets in packed.families]
    tensors = {
        key: (values[rows.to(values.device)] if family < 0 else values[chosen[family][0]], family)
        for key, (values, family) in packed.tensors.items()
    }
    return Packed(tensors, [offsets for _, offsets in chosen]).unpack()


def join_rows(parts: Sequence[Columns]) -> dict[str, Tensor]:
    """The rows of all parts, which have the same columns, one after the other."""
    joined: dict[str, Tensor] = {}
    for key, first in parts[0].items():
        columns = [part[key] for part in parts]
        if not first.is_nested:
            joined[key] = torch.cat(columns)
            continue
        offsets = offsets_of(torch.cat([offsets_in(column).diff() for column in columns]))
        joined[key] = nested_tensor_from_jagged(torch.cat([values_in(column) for column in columns]), offsets)
    return share_offsets(joined)


def same(left: Tensor | np.ndarray, right: Tensor | np.ndarray) -> bool:
    """Whether two columns, tensors or object arrays, hold the same values; NaN is the same as NaN."""
    if left is right:
        return True
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return type(left) is type(right) and left.tolist() == right.tolist()
    if left.is_nested != right.is_nested or left.dtype != right.dtype:
        return False
    if left.is_nested:
        return _equal(offsets_in(left), offsets_in(right)) and same(values_in(left), values_in(right))
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


def row_numbers(rows: Any, total: int) -> Tensor:
    """What a slice, mask, number or list of numbers selects from `total` rows: their numbers, int64."""
    if isinstance(rows, slice):
        return torch.tensor(range(total)[rows], dtype=torch.int64)
    index = torch.as_tensor(rows).cpu().reshape(-1)
    if index.dtype == torch.bool:
        if len(index) != total:
            raise IndexError(f"a mask of {len(index)} values for {total} rows: it must have one value a row")
        return index.nonzero()[:, 0]
    index = index.to(torch.int64)
    for row in index[(index >= total) | (index < -total)].tolist():
        raise IndexError(f"row {row} of a batch of {total} rows: rows go from {-total} to {total - 1}")
    return index % total if total else index


def freeze(columns: Columns) -> Frozen:
    """Columns as NumPy arrays over their memory, which pickle 5 sends without copying it first."""
    tensors, families = pack(columns)
    return {key: (_memory(values), family) for key, (values, family) in tensors.items()}, [*map(_memory, families)]


def thaw(frozen: Frozen) -> dict[str, Tensor]:
    """The columns in memory of their own: what arrives may be memory that other readers share."""
    arrays, offsets = frozen
    tensors = {key: (_tensor(*array), family) for key, (array, family) in arrays.items()}
    return Packed(tensors, [_tensor(*array) for array in offsets]).unpack()


def _memory(tensor: Tensor) -> Memory:
    flat = tensor.detach().cpu().contiguous()
    return str(flat.dtype), tuple(flat.shape), flat.view(-1).view(torch.uint8).numpy()


def _tensor(dtype: str, shape: tuple[int, ...], memory: np.ndarray) -> Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    tensor.view(-1).view(torch.uint8).numpy()[:] = memory
    return tensor


def _chosen(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which values these rows take, and their new offsets."""
    rows = rows.to(offsets.device)
    lengths = offsets.diff()[rows]
    return offsets[:-1][rows].repeat_interleave(lengths) + positions(lengths), offsets_of(lengths)


def _equal(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.device == right.device and torch.equal(left, right))
