"""One role on all training ranks: the group splits batches over the ranks and collects the ranks' results."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, Generic, ParamSpec, TypeVar

from rltrain.batch.contexts import row_tokens
from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import RowIndices, rows_of_same_groups
from rltrain.batch.row_costs import RowWork
from rltrain.batch.shared_starts import SharedStarts
from workers.cluster.processes import Pending, Role, results
from workers.training.dispatch import (
    Minibatch,
    UpdateResult,
    collect_rows,
    overhead_metrics,
    renumbered,
    rows_read,
    split_minibatches,
    split_rows,
    sum_updates,
)
from workers.training.shared_columns import SUPERVISED, SharedColumns

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


class WorkerGroup(Generic[W_co]):
    """One role, such as the actor, on all training ranks.

    Args:
        ranks: handles of the role's workers, one for each rank.
        work: estimator of the amount of computation that the role's model needs for a row. If `work` is None, each rank
            gets about the same number of tokens.
        ranks_per_pack: number of neighbouring ranks that process each pack together. They get the same rows and return
            the same results.
        token_ranks: number of ranks that split the tokens of each pack (sequence and context parallelism). A pack can
            hold up to `token_ranks` times as many tokens as one rank can process.
        shared: registry of the batches' rows and columns that are already in Ray's object store. Several worker groups
            can use the same `SharedColumns` object. If `shared` is None, the worker group creates its own
            `SharedColumns` object.
        share_prefixes: whether a pack has the tokens at the start of several rows only once.
    """

    def __init__(
        self,
        ranks: Sequence[Role[W_co]],
        work: RowWork | None = None,
        *,
        ranks_per_pack: int = 1,
        token_ranks: int = 1,
        shared: SharedColumns | None = None,
        share_prefixes: bool = True,
    ) -> None:
        self.ranks, self.work, self.ranks_per_pack = list(ranks), work or RowWork(), ranks_per_pack
        self.token_ranks, self.share_prefixes = token_ranks, share_prefixes
        self.shared = shared or SharedColumns()

    @property
    def size(self) -> int:
        """Return the number of parts into which the worker group splits a batch."""
        return len(self.ranks) // self.ranks_per_pack

    async def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method on every rank with the same arguments, and return the results in the order of the ranks."""
        return await results([rank.start(method, *args, **kwargs) for rank in self.ranks])

    async def rows(
        self,
        method: Callable[Concatenate[W_co, DataProto, list[RowIndices], ...], DataProto],
        batch: DataProto,
        columns: Sequence[str],
        *,
        max_tokens: int,
        only: Sequence[int] | None = None,
        keep: str | None = None,
    ) -> DataProto:
        """Compute new columns of a batch that is split over the ranks, and return the columns in the batch's row order.

        Args:
            method: the role's method that returns the computed columns; each rank calls the method on its own rows.
            batch: the batch whose rows the ranks process.
            columns: names of the columns that the method reads.
            max_tokens: maximum number of tokens of a micro-batch on one rank.
            only: indices of the rows to process, at least one, in ascending order. If `only` is None, all rows are
                processed.
            keep: name of a computed column that the ranks keep until `drop_kept`, so that it does not pass through the
                driver. The result has the places of its rows instead. Ranks in the driver's own process keep nothing.
        """
        lengths, work, starts = self.costs(batch)
        chosen = range(len(batch)) if only is None else only
        parts = split_rows(
            [lengths[row] for row in chosen],
            self.size,
            max_tokens * self.token_ranks,
            work=[work[row] for row in chosen],
            starts=starts if starts is None or only is None else starts.of(only),
        )
        if only is not None:
            parts = [[[chosen[row] for row in rows] for rows in rank] for rank in parts]
        read = rows_read(parts, lengths)
        shares = await self._shares(self.shared, batch, columns, read)
        own = self._split([renumbered(own, rows) for own, rows in zip(parts, read, strict=True)])
        number = self.shared.kept.next_number() if keep is not None and self.ranks[0].process.concurrent else None
        extra = {} if number is None else {"keep": number}
        given = zip(self.ranks, shares, own, strict=True)
        found = await self._collect([rank.start(method, share, rows, **extra) for rank, share, rows in given])
        if keep is not None and number is not None:
            found = [
                self.shared.kept.register(part, keep, number, self._together(place)) for place, part in enumerate(found)
            ]
        return collect_rows(found, parts)

    async def drop_kept(self) -> None:
        """Let all ranks of all roles free the memory of the columns that they keep."""
        await self.shared.kept.drop()

    async def update(
        self,
        method: Callable[Concatenate[W_co, DataProto, list[Minibatch], P], UpdateResult],
        batch: DataProto,
        columns: Sequence[str],
        minibatches: Sequence[list[int]],
        max_tokens: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> dict[str, float]:
        """Train on the mini-batches in the given order, and return metrics over all ranks.

        Args:
            method: the role's training method; each rank calls the method on its own part of the mini-batches.
            batch: the batch whose rows the ranks process.
            columns: names of the columns that the method reads. Names of columns that the batch lacks are ignored.
            minibatches: row indices of each mini-batch.
            max_tokens: maximum number of tokens of a micro-batch on one rank.
            args: arguments that are passed to the method after the batches and mini-batches.
            kwargs: keyword arguments that are passed to the method.
        """
        given, overhead = await self._minibatches(self.shared, batch, columns, minibatches, max_tokens)
        parts = zip(self.ranks, given, strict=True)
        pending = [rank.start(method, share, own, *args, **kwargs) for rank, (share, own) in parts]
        return sum_updates(await self._collect(pending)) | overhead

    async def update_with_supervised(
        self,
        method: Callable[Concatenate[W_co, DataProto, list[Minibatch], DataProto, list[Minibatch], P], UpdateResult],
        batch: DataProto,
        columns: Sequence[str],
        minibatches: Sequence[list[int]],
        supervised: DataProto,
        max_tokens: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> dict[str, float]:
        """Train as `update` does, and in each mini-batch also on the supervised answers to the mini-batch's prompts.

        The supervised answers are split over the ranks and into micro-batches separately from the sampled answers.

        Args:
            method: the role's training method; each rank calls the method on its own parts of the mini-batches and of
                the supervised answers.
            batch: the batch whose rows the ranks process.
            columns: names of the columns of the batch that the method reads. Names of columns that the batch lacks are
                ignored.
            minibatches: row indices of each mini-batch.
            supervised: batch of supervised answers, whose `uid` says to which prompt group of `batch` a row belongs.
            max_tokens: maximum number of tokens of a micro-batch on one rank.
            args: arguments that are passed to the method after the batches and mini-batches.
            kwargs: keyword arguments that are passed to the method.
        """
        given, overhead = await self._minibatches(self.shared, batch, columns, minibatches, max_tokens)
        uids, answered = batch.batch["uid"].tolist(), supervised.batch["uid"].tolist()
        rows = rows_of_same_groups(uids, minibatches, answered)
        # The supervised answers need their own `SharedColumns` object, because their columns have the same names as the
        # columns of the batch, and a `SharedColumns` object distinguishes columns only by name.
        answers, _ = await self._minibatches(SharedColumns(), supervised, SUPERVISED, rows, max_tokens)
        parts = zip(self.ranks, given, answers, strict=True)
        pending = [rank.start(method, *sampled, *taught, *args, **kwargs) for rank, sampled, taught in parts]
        return sum_updates(await self._collect(pending)) | overhead

    async def _minibatches(
        self,
        shared: SharedColumns,
        batch: DataProto,
        columns: Sequence[str],
        minibatches: Sequence[RowIndices],
        max_tokens: int,
    ) -> tuple[list[tuple[DataProto, list[Minibatch]]], dict[str, float]]:
        """Split mini-batches over the ranks.

        Returns:
            A list with the ranks' shares of the work, and a dictionary of metrics. The list has one entry for each
            rank. An entry is a pair: the rows that the rank reads, and the rank's parts of the mini-batches. The row
            indices in a rank's part of a mini-batch are indices into the rows that the rank reads. The metrics measure
            the overhead that is caused by splitting the mini-batches over the ranks.
        """
        lengths, work, starts = self.costs(batch)
        tokens = max_tokens * self.token_ranks
        by_rank = split_minibatches(batch, lengths, minibatches, self.size, tokens, work=work, starts=starts)
        read = rows_read([[rows for one in own for rows in one.microbatches] for own in by_rank], lengths)
        shares = await self._shares(shared, batch, columns, read)
        own = [
            [replace(one, microbatches=renumbered(one.microbatches, rows)) for one in own]
            for own, rows in zip(by_rank, read, strict=True)
        ]
        given = list(zip(shares, self._split(own), strict=True))
        return given, overhead_metrics(by_rank, lengths, work, starts)

    async def _shares(
        self, shared: SharedColumns, batch: DataProto, columns: Sequence[str], rows: Sequence[RowIndices]
    ) -> list[DataProto]:
        """Return the rows and columns that each rank reads, including columns that other ranks keep."""
        shares = self._split(shared.share(batch, columns, rows, self.ranks[0].process))
        return await shared.kept.added(shares, self.ranks, batch, columns)

    def _split(self, parts: Sequence[R]) -> list[R]:
        """Return the part of each rank. Ranks that process the same packs get the same part."""
        return [parts[number // self.ranks_per_pack] for number in range(len(self.ranks))]

    def _together(self, place: int) -> Sequence[Role[W_co]]:
        """Return the ranks that process the same packs."""
        return self.ranks[place * self.ranks_per_pack : (place + 1) * self.ranks_per_pack]

    async def _collect(self, pending: Sequence[Pending[R]]) -> list[R]:
        """Wait for all ranks, and return one result for each set of ranks that process the same packs."""
        return (await results(pending, depends_on=self.shared.kept.processes))[:: self.ranks_per_pack]

    def costs(self, batch: DataProto) -> tuple[list[int], list[int], SharedStarts | None]:
        """Return each row's number of tokens in a pack, each row's estimated computation, and the rows' shared tokens.

        The shared tokens are None if `share_prefixes` is False.
        """
        lengths = row_tokens(batch).tolist()
        work = self.work.of_rows(lengths, batch.lengths("responses").tolist())
        if not self.share_prefixes:
            return lengths, work, None
        starts = self.shared.starts(batch)
        # The estimates are cached for the few different numbers of shared tokens of a batch.
        saved = {tokens: self.work.of(tokens, 0) for tokens in set(starts.tokens)}
        return lengths, work, replace(starts, work=[saved[tokens] for tokens in starts.tokens])
