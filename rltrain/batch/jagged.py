"""Jagged columns: the values of all rows one after the other, (N,), and offsets, (B + 1,), where each row begins.

Columns of one family share one offsets tensor, the same object: PyTorch combines nested tensors only then.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged


def jagged(rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype) -> Tensor:
    """A jagged column (B, j) from B sequences."""
    rows = list(rows)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    if any(isinstance(row, Tensor) for row in rows):
        values = torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows])
    else:  # at once: a tensor a row takes ten times as long
        values = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)
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
