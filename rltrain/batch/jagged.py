"""Jagged columns, which consist of the concatenated values of all rows, (N,), and the offsets of the rows, (B + 1,).

Jagged columns with the same row lengths share one offsets tensor object, because PyTorch operations on several nested
tensors require the same offsets object.
"""

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from rltrain.batch.token_arrays import FLOAT32, INT32, INT64

_DTYPES = {INT32: torch.int32, INT64: torch.int64, FLOAT32: torch.float32}


def jagged(rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype) -> Tensor:
    """Convert B sequences to a jagged column in the form of a nested tensor of B rows."""
    rows = list(rows)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return nested_tensor_from_jagged(_concatenated(rows, dtype), offsets_of(lengths))


def _concatenated(rows: Sequence[Sequence[Any] | Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate the values of all rows to one tensor (N,)."""
    if any(isinstance(row, Tensor) for row in rows):
        return torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows])
    codes = {row.typecode if isinstance(row, array) else "" for row in rows}
    if len(codes) == 1 and codes <= _DTYPES.keys() and any(rows):
        # The arrays are joined as bytes, because a conversion to a list would create a Python object for each value.
        return torch.frombuffer(bytearray().join(cast(Any, rows)), dtype=_DTYPES[codes.pop()]).to(dtype)
    # One `torch.tensor` call for all rows is ten times as fast as one call per row.
    return torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the offsets (B + 1,) of rows whose lengths (B,) are given."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def positions(lengths: Tensor) -> Tensor:
    """Return a tensor (N,) with each value's position 0, 1, 2, ... in its row, for rows of the given lengths (B,)."""
    starts = offsets_of(lengths)[:-1]
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the index ranges [start, start + length), given starts (B,) and lengths (B,), into one tensor."""
    return starts.repeat_interleave(lengths) + positions(lengths)


def values_in(column: Tensor) -> Tensor:
    """Return the values (N,) of a jagged column."""
    return cast(Tensor, cast(Any, column).values())


def offsets_in(column: Tensor) -> Tensor:
    """Return the offsets (B + 1,) of a jagged column."""
    return cast(Tensor, cast(Any, column).offsets())


def row_numbers(rows: Any, total: int) -> Tensor:
    """Return the indices of the selected rows as an int64 tensor.

    Args:
        rows: the selection of rows, given as a slice, a mask, a row index or a list of row indices.
        total: number of rows in the batch.

    Raises:
        IndexError: the length of a mask is not `total`, or a row index is out of range.
    """
    if isinstance(rows, slice):
        return torch.tensor(range(total)[rows], dtype=torch.int64)
    index = torch.as_tensor(rows).cpu().reshape(-1)
    if index.dtype == torch.bool:
        if len(index) != total:
            raise IndexError(f"a mask of {len(index)} values for {total} rows: a mask must have one value per row")
        return index.nonzero()[:, 0]
    index = index.to(torch.int64)
    for row in index[(index >= total) | (index < -total)].tolist():
        raise IndexError(f"row {row} of a batch of {total} rows: row numbers go from {-total} to {total - 1}")
    return index % total if total else index
