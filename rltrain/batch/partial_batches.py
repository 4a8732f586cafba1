"""Code that assembles the rows of a batch from partial batches, each with some of the rows and some of the columns."""

from collections.abc import Sequence

import numpy as np
import torch

from rltrain.batch.data_proto import DataProto


def joined_rows(
    parts: Sequence[DataProto], rows_of_parts: Sequence[np.ndarray], rows: np.ndarray, columns: Sequence[str]
) -> DataProto:
    """Return the rows `rows` and the columns `columns` of a batch that is distributed over several partial batches.

    If a partial batch has exactly the rows in `rows`, the columns taken from this partial batch are not copied.

    Args:
        parts: the partial batches that together form the whole batch. For each row in `rows` and each column in
            `columns`, at least one partial batch must contain the row's value of the column.
        rows_of_parts: for each partial batch, the indices that its rows have in the whole batch, in ascending order.
        rows: the rows to return, as row indices of the whole batch, in ascending order.
        columns: names of the columns to return.

    Returns:
        A batch with the columns in the order of `columns`, whose row i is row `rows[i]` of the whole batch.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for name in columns:
        together.setdefault(tuple(k for k, part in enumerate(parts) if name in part), []).append(name)
    found = [_taken(parts, rows_of_parts, rows, numbers, names) for numbers, names in together.items()]
    joined = found[0]
    for other in found[1:]:
        joined = joined.union(other)
    return joined.select(columns)


def _taken(
    parts: Sequence[DataProto],
    rows_of_parts: Sequence[np.ndarray],
    rows: np.ndarray,
    numbers: Sequence[int],
    names: Sequence[str],
) -> DataProto:
    """Return the rows `rows` of the columns `names`, taken from the partial batches whose indices are `numbers`."""
    for number in numbers:
        if np.array_equal(rows_of_parts[number], rows):
            return parts[number].select(names)
    index, begin = np.full(len(rows), -1), 0
    for number in numbers:
        there = rows_of_parts[number]
        here = np.isin(rows, there)
        index[here] = begin + np.searchsorted(there, rows[here])
        begin += len(there)
    assert (index >= 0).all(), f"some rows of the columns {names} are missing from all parts of the batch"
    return DataProto.concat([parts[number].select(names) for number in numbers], rows=torch.from_numpy(index))
