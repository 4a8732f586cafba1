"""Columns that stay in the processes that computed them, until the ranks that train on the rows fetch them.

The hidden states for an exact KL are by far the largest column of a batch. They never pass through the driver. Each
rank of a reference model or teacher keeps the rows that it has computed, and the driver's batch has only the place of
each row: a number. Before a pass of the actor, the ranks that keep rows put them into Ray's object store, one object
for each reader, and the driver passes the references on. A reader in the same process gets the rows without the object
store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from rltrain.batch.data_proto import DataProto
from workers.cluster.processes import Role, Shared, WorkerProcess, results

_WIDTH = "kept_width"  # Metadata entry with the width H of a kept column (N, H).


def place_column(column: str) -> str:
    """Return the name of the column (B,) with the place of each row of a kept column."""
    return f"{column}_place"


@dataclass(frozen=True)
class Request:
    """Rows of a kept column that one reader needs.

    Attributes:
        number: Number under which the rank keeps the column.
        rows: Indices of the rows in the kept column, in the order in which the reader needs them.
        width: Width to which the values are filled up with zeros.
    """

    number: int
    rows: np.ndarray
    width: int


class KeptColumns:
    """The kept columns of one rank, by the numbers that the driver has given to the passes."""

    def __init__(self) -> None:
        self._kept: dict[int, DataProto] = {}

    def keep(self, found: DataProto, column: str, number: int | None) -> DataProto:
        """Keep a column under the given number, and return the batch with the places of the rows in its stead.

        If `number` is None, or if the batch lacks the column, the batch is returned as it is.
        """
        if number is None or column not in found:
            return found
        self._kept[number], rest = found.pop([column])
        places = DataProto.from_dict({place_column(column): torch.arange(len(found))})
        places.meta_info[_WIDTH] = self._kept[number].values(column).size(1)
        return rest.union(places)

    def rows(self, request: Request) -> DataProto:
        """Return rows of a kept column."""
        part = self._kept[request.number][request.rows]
        (column,) = part.keys()
        values = part.values(column)
        if values.size(1) == request.width:
            return part
        wide = torch.zeros(len(values), request.width, dtype=values.dtype)
        wide[:, : values.size(1)] = values
        return part.with_values(column, **{column: wide})

    def drop(self) -> None:
        """Free the memory of all kept columns."""
        self._kept.clear()


class KeepsColumns(Protocol):
    """A role, such as a teacher, that can keep computed columns in its own process."""

    def kept_rows(self, request: Request) -> DataProto:
        """Return rows of a kept column, to a role in the same process."""

    def put_kept_rows(self, requests: Sequence[Request]) -> list[Any]:
        """Put rows of kept columns into Ray's object store, one object for each request, and return the references."""

    def drop_kept(self) -> None:
        """Free the memory of all kept columns."""


@dataclass(frozen=True)
class _Holder:
    """Ranks that keep the same rows of a column.

    Attributes:
        ranks: The ranks, which share the tokens of sequences.
        number: Number under which the ranks keep the column.
        column: Name of the column.
        first: Place of the first row.
        width: Width H of the column (N, H).
    """

    ranks: tuple[Role[KeepsColumns], ...]
    number: int
    column: str
    first: int
    width: int


class KeptPlaces:
    """The driver's registry of the columns that ranks keep in the current training step."""

    def __init__(self) -> None:
        self._holders: list[_Holder] = []
        self._passes = self._rows = 0

    def next_number(self) -> int:
        """Return the number under which all ranks keep the column of the next pass."""
        self._passes += 1
        return self._passes

    def register(self, found: DataProto, column: str, number: int, ranks: Sequence[Role[Any]]) -> DataProto:
        """Register the rows that ranks keep, and return the batch with places that are unique in the training step.

        Args:
            found: the ranks' result. All `ranks` have the same result.
            column: name of the column that the ranks keep.
            number: number under which the ranks keep the column.
            ranks: the ranks.
        """
        width, name = found.meta_info[_WIDTH], place_column(column)
        self._holders.append(_Holder(tuple(ranks), number, column, self._rows, width))
        places, rest = found.pop([name])
        made = DataProto.from_dict({name: places.batch[name] + self._rows})
        self._rows += len(found)
        rest.meta_info.pop(_WIDTH)
        return rest.union(made)

    @property
    def processes(self) -> list[WorkerProcess]:
        """Return the processes that keep columns."""
        return [rank.process for holder in self._holders for rank in holder.ranks]

    async def added(
        self, shares: Sequence[DataProto], ranks: Sequence[Role[Any]], batch: DataProto, columns: Sequence[str]
    ) -> list[DataProto]:
        """Return the batches of a pass, to which references to the rows of kept columns are added.

        Args:
            shares: for each rank, the rows and columns that it receives from the driver. Ranks that share the tokens of
                sequences have the same object.
            ranks: the ranks that take part in the pass.
            batch: the whole batch.
            columns: names of the columns that the ranks read.
        """
        places = {name: _dense(batch, place_column(name)) for name in columns if place_column(name) in batch}
        if not places:
            return list(shares)
        known: dict[tuple[int, Role[Any], int], _Read] = {}  # ranks with the same share fetch the same object
        reads: list[list[_Read]] = []
        for share, rank in zip(shares, ranks, strict=True):
            own = self._reads(cast(Shared, share).rows, rank, places)
            reads.append([known.setdefault((id(share), one.source, one.request.number), one) for one in own])
        fetched = await _put([one for own, rank in zip(reads, ranks, strict=True) for one in own if one.is_far(rank)])
        return [
            _extended(cast(Shared, share), list(places), own, [one.argument(rank, fetched) for one in own])
            for share, rank, own in zip(shares, ranks, reads, strict=True)
        ]

    async def drop(self) -> None:
        """Let all ranks free the memory of the columns that they keep."""
        ranks = dict.fromkeys(rank for holder in self._holders for rank in holder.ranks)
        self.forget()
        if not ranks:
            return
        await results([rank.start(KeepsColumns.drop_kept) for rank in ranks])

    def forget(self) -> None:
        """Forget all kept columns, because the ranks that kept them no longer exist or have freed them."""
        self._holders, self._rows = [], 0

    def _reads(self, rows: np.ndarray, rank: Role[Any], places: Mapping[str, np.ndarray]) -> list["_Read"]:
        """Return the reads with which a rank gets the given rows of all kept columns.

        Args:
            rows: indices of the rows in the whole batch, in ascending order.
            rank: the rank that reads the rows.
            places: maps the name of each column to the places of all rows of the batch.
        """
        firsts = [holder.first for holder in self._holders]
        found = []
        for name, all_places in places.items():
            own = all_places[rows]
            numbers = np.searchsorted(firsts, own, side="right") - 1
            width = max(holder.width for holder in self._holders if holder.column == name)
            for number in np.unique(numbers):
                here, holder = numbers == number, self._holders[number]
                request = Request(holder.number, own[here] - holder.first, width)
                near = next((one for one in holder.ranks if one.process is rank.process), holder.ranks[0])
                found.append(_Read(near, request, rows[here]))
        return found


@dataclass(frozen=True, eq=False)
class _Read:
    """Rows of a kept column that a rank reads.

    Attributes:
        source: The rank that keeps the column.
        request: The rows, as the source numbers them.
        rows: Indices of the rows in the whole batch, in ascending order.
    """

    source: Role[KeepsColumns]
    request: Request
    rows: np.ndarray

    def is_far(self, rank: Role[Any]) -> bool:
        """Return whether the source is in another process than a rank."""
        return self.source.process is not rank.process

    def argument(self, rank: Role[Any], fetched: Mapping["_Read", Any]) -> Any:
        """Return what a call of a rank gets as the argument: a reference, or an inner call in the same process."""
        if self.is_far(rank):
            return fetched[self]
        return self.source.argument_for(rank, KeepsColumns.kept_rows, self.request)


async def _put(reads: Sequence[_Read]) -> dict[_Read, Any]:
    """Let the sources put the rows of all reads into Ray's object store, and return the references."""
    of_sources: dict[Role[KeepsColumns], list[_Read]] = {}
    for read in dict.fromkeys(reads):
        of_sources.setdefault(read.source, []).append(read)
    calls = [
        source.start(KeepsColumns.put_kept_rows, [one.request for one in own]) for source, own in of_sources.items()
    ]
    pairs = zip(of_sources.values(), await results(calls), strict=True)
    return {read: reference for own, references in pairs for read, reference in zip(own, references, strict=True)}


def _extended(share: Shared, columns: Sequence[str], reads: Sequence[_Read], arguments: Sequence[Any]) -> DataProto:
    """Return a share of the batch with additional parts, which have the kept columns."""
    return Shared(
        [*share.references, *arguments],
        [*share.rows_of_parts, *(read.rows for read in reads)],
        share.rows,
        [*share.columns, *columns],
    ).as_batch()


def _dense(batch: DataProto, column: str) -> np.ndarray:
    """Return the values (B,) of a column with one value for each row."""
    found: np.ndarray = batch.select([column]).batch[column].numpy()
    assert (found >= 0).all(), f"rows without a place in {column}: a rank must have computed each row"
    return found
