"""Who computes which rows: pure functions from row lengths to plans.

A plan never looks at the number of ranks or at the token budget to decide which rows share a mini-batch (invariant A7).
"""

import itertools
import random
from collections.abc import Sequence

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


def balance(lengths: Sequence[int], rows: Rows, ranks: int) -> list[Rows]:
    """Share `rows` out over `ranks`, longest first to the rank with the fewest tokens so far."""
    shares: list[Rows] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        rank = min(range(ranks), key=lambda k: (loads[k], len(shares[k]), k))
        shares[rank].append(row)
        loads[rank] += lengths[row]
    return shares


def microbatches(lengths: Sequence[int], rows: Rows, max_tokens: int) -> list[Rows]:
    """Cut `rows` into micro-batches of at most `max_tokens` tokens each: longest first, into the first with room.

    Raises:
        ValueError: if one row alone is longer than the budget.
    """
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
    return [sorted(cut) for cut in cuts]


def plan_minibatch(lengths: Sequence[int], rows: Rows, ranks: int, max_tokens: int) -> list[list[Rows]]:
    """Micro-batches of each rank for one mini-batch; every rank gets the same number, some of them empty."""
    shares = [microbatches(lengths, share, max_tokens) for share in balance(lengths, rows, ranks)]
    most = max(1, *(len(share) for share in shares))
    return [share + [[] for _ in range(most - len(share))] for share in shares]
