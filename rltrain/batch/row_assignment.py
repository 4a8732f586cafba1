"""Pure functions that assign the rows of a batch to mini-batches, ranks and micro-batches according to the row lengths.

The assignment of rows to mini-batches depends neither on the number of ranks nor on the token limit of a micro-batch.
"""

import itertools
import random
from collections.abc import Sequence

from rltrain.base.balanced_parts import partition, refined
from rltrain.batch.shared_starts import SharedStarts

RowIndices = list[int]


def minibatches(uids: Sequence[int], count: int, epochs: int, *, seed: int, step: int) -> list[RowIndices]:
    """Return the rows of each mini-batch, in training order.

    Rows of the same prompt group are always in the same mini-batch. The mini-batches of an epoch differ in size by at
    most one prompt group. If a training step has fewer prompt groups than mini-batches, some mini-batches are empty.
    Each epoch shuffles the prompt groups anew, with (seed, step, epoch) as the random seed.

    Args:
        uids: for each row, the number that identifies its prompt group, (B,).
        count: number of mini-batches per epoch.
        epochs: number of passes over the batch.
        seed: random seed of the run.
        step: number of the training step.
    """
    members: dict[int, RowIndices] = {}
    for row, uid in enumerate(uids):
        members.setdefault(uid, []).append(row)
    chosen: list[RowIndices] = []
    for epoch in range(epochs):
        groups = sorted(members)
        random.Random(f"{seed}/{step}/{epoch}").shuffle(groups)
        ends = [len(groups) * number // count for number in range(count + 1)]
        for start, end in itertools.pairwise(ends):
            chosen.append([row for uid in groups[start:end] for row in sorted(members[uid])])
    return chosen


def rows_of_same_groups(uids: Sequence[int], chosen: Sequence[RowIndices], others: Sequence[int]) -> list[RowIndices]:
    """For each mini-batch, return those rows of a second batch that share a prompt group with a row of the mini-batch.

    Args:
        uids: for each row of the batch that is divided into mini-batches, the number that identifies its prompt group,
            (B,).
        chosen: for each mini-batch, the indices of its rows in the batch that is divided into mini-batches.
        others: for each row of the second batch, the number that identifies its prompt group.
    """
    groups = [{uids[row] for row in rows} for rows in chosen]
    return [[row for row, uid in enumerate(others) if uid in members] for members in groups]


def balance(work: Sequence[int], rows: RowIndices, ranks: int) -> list[RowIndices]:
    """Distribute `rows` over the ranks so that the largest amount of work on a rank is nearly minimal.

    No rank is empty if there are at least as many rows as ranks.
    """
    rows = sorted(rows)
    shares = partition([max(work[row], 1) for row in rows], ranks)
    assert shares is not None, "`partition` returned None, although the parts had no size limit"
    return [sorted(rows[index] for index in share) for share in shares]


def microbatches(
    lengths: Sequence[int], rows: RowIndices, max_tokens: int, *, work: Sequence[int] | None = None, count: int = 0
) -> list[RowIndices]:
    """Split `rows` into micro-batches of at most `max_tokens` tokens and nearly equal work, in order of decreasing
    work.

    The default number of micro-batches is the number that results from first-fit packing of the rows in order of
    decreasing length. If `count` is above the default number of micro-batches, `rows` are split into `count`
    micro-batches, but never into more micro-batches than rows.

    Raises:
        ValueError: a row has more than `max_tokens` tokens.
    """
    rows, work = sorted(rows), lengths if work is None else work
    _check_lengths(lengths, rows, max_tokens)
    fewest = _first_fit(lengths, rows, max_tokens)
    wanted = max(len(fewest), min(count, len(rows)))
    # If there is one micro-batch, or one row per micro-batch, the rows can be split in only one way.
    if wanted == 1:
        return [rows]
    if wanted == len(rows):
        return [[row] for row in sorted(rows, key=lambda row: (-work[row], row))]
    costs, sizes = [max(work[row], 1) for row in rows], [lengths[row] for row in rows]
    even = partition(costs, wanted, sizes=sizes, room=max_tokens)
    # The greedy partition may fail to fit all rows into `wanted` micro-batches of at most `max_tokens` tokens. If the
    # greedy partition fails, `refined` balances the work of the micro-batches from first-fit packing.
    if even is None:
        place = {row: index for index, row in enumerate(rows)}
        packed = _split([[place[row] for row in cut] for cut in fewest], wanted, costs)
        even = refined(costs, packed, sizes=sizes, room=max_tokens)
    cuts = [sorted(rows[index] for index in part) for part in even]
    return sorted(cuts, key=lambda cut: (-sum(work[row] for row in cut), cut))


def _first_fit(lengths: Sequence[int], rows: RowIndices, max_tokens: int) -> list[RowIndices]:
    """Pack rows into micro-batches by first fit, in order of decreasing row length.

    If n is the smallest possible number of micro-batches, first fit needs at most 11/9 * n + 6/9 micro-batches (Dosa
    2007). No row may have more than `max_tokens` tokens.
    """
    if rows and sum(lengths[row] for row in rows) <= max_tokens:
        return [list(rows)]
    cuts: list[RowIndices] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        fits = next((k for k, left in enumerate(room) if left >= lengths[row]), None)
        if fits is None:
            cuts.append([row])
            room.append(max_tokens - lengths[row])
        else:
            cuts[fits].append(row)
            room[fits] -= lengths[row]
    return cuts


def _split(cuts: list[RowIndices], count: int, work: Sequence[int]) -> list[RowIndices]:
    """Split micro-batches until there are `count` micro-batches.

    In each iteration, the micro-batch with the most work is divided into two. Micro-batches with only one row are never
    divided.
    """
    cuts = [list(cut) for cut in cuts]
    while len(cuts) < count:
        largest = max((cut for cut in cuts if len(cut) > 1), key=lambda cut: sum(work[row] for row in cut))
        halves = partition([work[row] for row in largest], 2)
        assert halves is not None, "`partition` returned None, although the parts had no size limit"
        cuts.remove(largest)
        cuts += [[largest[index] for index in half] for half in halves]
    return cuts


def assign_minibatch(
    lengths: Sequence[int],
    rows: RowIndices,
    ranks: int,
    max_tokens: int,
    *,
    work: Sequence[int] | None = None,
    starts: SharedStarts | None = None,
) -> list[list[RowIndices]]:
    """Return the micro-batches of each rank for one mini-batch. Every rank gets the same number of micro-batches.

    Ranks wait for each other in every micro-batch, so the rows are divided such that the k-th micro-batches of all
    ranks have nearly equal work. If a rank has too few rows for its micro-batches, or its rows share tokens, the last
    micro-batches of that rank can be empty.

    Args:
        lengths: number of tokens that each row of the batch takes in a packed micro-batch.
        rows: rows of the mini-batch.
        ranks: number of ranks that share the mini-batch.
        max_tokens: maximum number of distinct tokens in one micro-batch.
        work: cost of each row of the batch, in any unit. If `work` is None, the cost of a row is its number of tokens.
        starts: the tokens that rows share at their starts, and their cost. A micro-batch computes such tokens once.
            Rows that share tokens are in the same micro-batch, except where it would exceed `max_tokens` distinct
            tokens, attention would read more than `KEYS` times `max_tokens` keys, or ranks would have uneven work. If
            `starts` is None, rows share no tokens.

    Raises:
        ValueError: a row has more than `max_tokens` tokens.
    """
    work = lengths if work is None else work
    _check_lengths(lengths, rows, max_tokens)
    if starts is None:
        shares = [[[row] for row in share] for share in balance(work, rows, ranks)]
        return _cut(shares, lengths, max_tokens, work)
    divided = _divided(rows, ranks, lengths, work, starts)
    shares = [
        [unit for family in _families(share, starts) for unit in _pieces(family, 1, lengths, max_tokens, starts)]
        for share in divided
    ]
    return _cut(shares, lengths, max_tokens, work, starts)


def _cut(
    shares: Sequence[Sequence[RowIndices]],
    lengths: Sequence[int],
    max_tokens: int,
    work: Sequence[int],
    starts: SharedStarts | None = None,
) -> list[list[RowIndices]]:
    """Cut each rank's share into micro-batches. Every rank gets the same number of micro-batches.

    Args:
        shares: for each rank, the units of its rows. The rows of a unit stay together.
        lengths: number of tokens of each row of the batch.
        max_tokens: maximum number of distinct tokens in one micro-batch.
        work: cost of each row of the batch.
        starts: the tokens that rows share at their starts, or None.
    """
    counted = []
    for units in shares:
        if starts is None:
            counted.append(([lengths[row] for (row,) in units], [work[row] for (row,) in units]))
        else:
            totals = [starts.total(unit, lengths, work) for unit in units]
            counted.append(([total.size for total in totals], [total.cost for total in totals]))
    most = max(1, *(len(_first_fit(sizes, list(range(len(sizes))), max_tokens)) for sizes, _ in counted))
    found = []
    for units, (sizes, costs) in zip(shares, counted, strict=True):
        cuts = microbatches(sizes, list(range(len(units))), max_tokens, work=costs, count=most)
        rows = [sorted(row for unit in cut for row in units[unit]) for cut in cuts]
        found.append(rows + [[] for _ in range(most - len(rows))])
    return found


# Groups of rows that share tokens are divided further while a rank has more than EVEN times the mean work of the ranks.
EVEN = 1.05


def _divided(
    rows: RowIndices, ranks: int, lengths: Sequence[int], work: Sequence[int], starts: SharedStarts
) -> list[RowIndices]:
    """Distribute rows over the ranks. Rows that share tokens go to the same rank, unless the work would be too uneven.

    At first, all rows that share tokens stay together. If the busiest rank has more than `EVEN` times the mean work,
    each group of rows is divided into two pieces, then four, and so on. The result is the distribution, among those
    tried, with the least work on the busiest rank.
    """
    families = _families(rows, starts)
    best, least, pieces = list[RowIndices](), 0, 1
    while True:
        units = [unit for family in families for unit in _pieces(family, pieces, lengths, None, starts)]
        costs = [starts.total(unit, lengths, work).cost for unit in units]
        shares = [
            [row for unit in share for row in units[unit]] for share in balance(costs, list(range(len(units))), ranks)
        ]
        done = [starts.total(share, lengths, work).cost for share in shares]
        if not best or max(done) < least:
            best, least = shares, max(done)
        if pieces >= max(map(len, families), default=1) or max(done) * ranks <= EVEN * sum(done):
            return best
        pieces *= 2


def _families(rows: RowIndices, starts: SharedStarts) -> list[RowIndices]:
    """Divide rows into families: in the order of `starts`, each row of a family shares tokens with the row before."""
    families: list[RowIndices] = []
    for row, shared, _ in starts.ordered(rows):
        if shared:
            families[-1].append(row)
        else:
            families.append([row])
    return families


def _pieces(
    family: RowIndices, count: int, lengths: Sequence[int], max_tokens: int | None, starts: SharedStarts
) -> list[RowIndices]:
    """Divide a family of rows into about `count` pieces with nearly equal numbers of rows.

    If `max_tokens` is not None, there are more pieces if a piece would be larger than `max_tokens` tokens.
    """
    pieces: list[RowIndices] = []
    size = -(-len(family) // count)
    for row, _, _ in starts.ordered(family):
        if pieces and len(pieces[-1]) < size:
            tried = [*pieces[-1], row]
            if max_tokens is None or starts.total(tried, lengths, lengths).size <= max_tokens:
                pieces[-1] = tried
                continue
        pieces.append([row])
    return pieces


def _check_lengths(lengths: Sequence[int], rows: RowIndices, max_tokens: int) -> None:
    for row in rows:
        if lengths[row] > max_tokens:
            raise ValueError(
                f"row {row} has {lengths[row]} tokens, above the token limit of {max_tokens}; raise the token limit"
            )
