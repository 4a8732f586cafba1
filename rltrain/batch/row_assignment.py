"""Who computes which rows: pure functions from row lengths to plans.

A plan never looks at the number of ranks or at the token budget to decide which rows share a mini-batch.
"""

import itertools
import random
from collections.abc import Sequence

from rltrain.base.balanced_parts import partition, refined

Rows = list[int]


def minibatches(uids: Sequence[int], count: int, epochs: int, *, seed: int, step: int) -> list[Rows]:
    """Rows of each mini-batch, in the order in which they are trained on.

    Whole prompt groups share a mini-batch, and sizes differ by one group at most; so where a step has fewer groups than
    mini-batches some are empty. Each epoch shuffles the groups anew, keyed by (seed, step, epoch).

    Args:
        uids: prompt group of each row (B,).
        count: mini-batches an epoch.
        epochs: passes over the batch.
        seed: of the run.
        step: number of the training step.
    """
    members: dict[int, Rows] = {}
    for row, uid in enumerate(uids):
        members.setdefault(uid, []).append(row)
    plan = []
    for epoch in range(epochs):
        groups = sorted(members)
        random.Random(f"{seed}/{step}/{epoch}").shuffle(groups)
        ends = [len(groups) * number // count for number in range(count + 1)]
        for start, end in itertools.pairwise(ends):
            plan.append([row for uid in groups[start:end] for row in sorted(members[uid])])
    return plan


def balance(work: Sequence[int], rows: Rows, ranks: int) -> list[Rows]:
    """Share `rows` out over `ranks` so that the largest sum of their `work` is small; no rank is empty without need."""
    rows = sorted(rows)
    shares = partition([max(work[row], 1) for row in rows], ranks)
    assert shares is not None, "without sizes every row fits"
    return [sorted(rows[index] for index in share) for share in shares]


def microbatches(
    lengths: Sequence[int], rows: Rows, max_tokens: int, *, work: Sequence[int] | None = None, count: int = 0
) -> list[Rows]:
    """Cut `rows` into micro-batches of at most `max_tokens` tokens each, of nearly equal work, most work first.

    There are as many as it takes to lay the longest first into the first with room, or `count` where that is more and
    there are rows enough.

    Raises:
        ValueError: if one row alone is longer than the budget.
    """
    rows, work = sorted(rows), lengths if work is None else work
    fewest = _first_fit(lengths, rows, max_tokens)
    costs, sizes = [max(work[row], 1) for row in rows], [lengths[row] for row in rows]
    wanted = max(len(fewest), min(count, len(rows)))
    if not wanted:
        return []
    even = partition(costs, wanted, sizes=sizes, room=max_tokens)
    if even is None:  # it is tight: start from what fits
        place = {row: index for index, row in enumerate(rows)}
        packed = _split([[place[row] for row in cut] for cut in fewest], wanted, costs)
        even = refined(costs, packed, sizes=sizes, room=max_tokens)
    cuts = [sorted(rows[index] for index in part) for part in even]
    return sorted(cuts, key=lambda cut: (-sum(work[row] for row in cut), cut))


def _first_fit(lengths: Sequence[int], rows: Rows, max_tokens: int) -> list[Rows]:
    """First fit, longest first: at most 11/9 of the fewest possible, plus 6/9 (Dosa 2007)."""
    cuts: list[Rows] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        if lengths[row] > max_tokens:
            raise ValueError(f"row {row} has {lengths[row]} tokens, above the budget of {max_tokens}; raise the budget")
        fits = next((k for k, left in enumerate(room) if left >= lengths[row]), None)
        if fits is None:
            cuts.append([row])
            room.append(max_tokens - lengths[row])
        else:
            cuts[fits].append(row)
            room[fits] -= lengths[row]
    return cuts


def _split(cuts: list[Rows], count: int, work: Sequence[int]) -> list[Rows]:
    """As many as `count`: the one with the most work that has two rows is cut in two, again and again."""
    cuts = [list(cut) for cut in cuts]
    while len(cuts) < count:
        largest = max((cut for cut in cuts if len(cut) > 1), key=lambda cut: sum(work[row] for row in cut))
        halves = partition([work[row] for row in largest], 2)
        assert halves is not None, "without sizes every row fits"
        cuts.remove(largest)
        cuts += [[largest[index] for index in half] for half in halves]
    return cuts


def plan_minibatch(
    lengths: Sequence[int], rows: Rows, ranks: int, max_tokens: int, *, work: Sequence[int] | None = None
) -> list[list[Rows]]:
    """Micro-batches of each rank for one mini-batch; every rank gets the same number.

    Ranks wait for each other in every micro-batch: so all their k-th ones have nearly equal work. Where a rank has
    fewer rows than there are micro-batches, its last ones are empty.

    Args:
        lengths: tokens that each row of the batch takes in a pack.
        rows: those of the mini-batch.
        ranks: how many share it.
        max_tokens: of one micro-batch, never exceeded.
        work: of each row of the batch, in any unit; without it, its tokens.
    """
    shares = balance(lengths if work is None else work, rows, ranks)
    most = max(1, *(len(_first_fit(lengths, share, max_tokens)) for share in shares))
    cuts = [microbatches(lengths, share, max_tokens, work=work, count=most) for share in shares]
    return [cut + [[] for _ in range(most - len(cut))] for cut in cuts]
