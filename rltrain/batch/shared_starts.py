"""How many tokens the rows of a batch share at their starts, and what the rows cost if shared tokens count once."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.batch.contexts import contexts_of
from rltrain.batch.data_proto import DataProto
from rltrain.batch.jagged import offsets_of, ranges
from rltrain.batch.prefix_tree import LEAST, SHORTEST_PROMPT, PrefixTree, Segment
from rltrain.batch.row_costs import KEYS


@dataclass(frozen=True)
class SharedStarts:
    """The numbers of tokens that rows of the same prompt group share at their starts.

    The rows are put into an order in which rows that begin alike are neighbours. The rows at the places i < j of this
    order share min(tokens[i + 1 : j + 1]) tokens.

    Attributes:
        place: (B,) place of each row in this order.
        tokens: (B,) for each place, the number of tokens that the row shares with the row at the place before; 0 if the
            two rows belong to different prompt groups.
        work: (B,) for each place, the cost of computing these shared tokens.
    """

    place: Sequence[int]
    tokens: Sequence[int]
    work: Sequence[int]

    def ordered(self, rows: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return (row, number of tokens shared with the row before, cost of these tokens) for some rows, in order."""
        found: list[tuple[int, int, int]] = []
        before = 0
        for place, row in sorted((self.place[row], row) for row in rows):
            shared = 0, 0
            if found and self._starts_before[before] == self._starts_before[place]:
                between = slice(before + 1, place + 1)
                shared = min(self.tokens[between]), min(self.work[between])
            found.append((row, *shared))
            before = place
        return found

    @functools.cached_property
    def _starts_before(self) -> list[int]:
        """Return for each place how many groups of rows that share tokens have begun at this place or before it.

        Rows at two places can share tokens only if these numbers are equal.
        """
        return list(itertools.accumulate(int(tokens == 0) for tokens in self.tokens))

    def total(self, rows: Sequence[int], lengths: Sequence[int], work: Sequence[int]) -> "Total":
        """Return the size and the cost of rows that are computed together.

        Args:
            rows: the rows.
            lengths: (B,) number of tokens in each row of the batch.
            work: (B,) cost of each row of the batch if it is computed alone.
        """
        tokens = keys = cost = 0
        branches: list[int] = []  # depths of the branch points on the path of the current row
        for row, shared, saved in self.ordered(rows):
            tokens += lengths[row] - shared
            cost += work[row] - saved
            while branches and branches[-1] > shared:
                branches.pop()
            if shared and shared not in branches[-1:]:
                branches.append(shared)
                keys += shared
            keys += lengths[row]
        return Total(tokens, max(tokens, -(-keys // KEYS)), cost)

    def of(self, rows: Sequence[int]) -> "SharedStarts":
        """Return the shared tokens of the batch that consists of `rows`, renumbered from 0 in the order of `rows`."""
        ordered, number = self.ordered(rows), {row: index for index, row in enumerate(rows)}
        place = [0] * len(rows)
        for index, (row, _, _) in enumerate(ordered):
            place[number[row]] = index
        return SharedStarts(place, [tokens for _, tokens, _ in ordered], [work for _, _, work in ordered])


class Total(NamedTuple):
    """Size and cost of rows that are computed together.

    Attributes:
        tokens: upper bound of the number of distinct tokens; some shared tokens are counted more than once.
        size: number of tokens that count for the limit of a micro-batch: the distinct tokens, or the number of keys
            divided by `KEYS`, whichever is larger.
        cost: cost of computing the rows.
    """

    tokens: int
    size: int
    cost: int


def no_shared_starts(rows: int) -> SharedStarts:
    """Return the `SharedStarts` of rows that share no tokens."""
    return SharedStarts(range(rows), [0] * rows, [0] * rows)


def shared_starts(batch: DataProto) -> SharedStarts:
    """Return the tokens that the rows of a batch share at their starts, within each prompt group.

    In the result, `work` equals `tokens`. Only the first context of a row counts. The rows of a batch without the
    column `uid` form one group. In a group whose rows all have the same prompt, only the prompt counts, because answers
    rarely begin with the same tokens, and comparing prompts is faster than building a prefix tree.
    """
    uids = batch.batch["uid"] if "uid" in batch else torch.zeros(len(batch), dtype=torch.int64)
    order = uids.argsort(stable=True)
    _, group, sizes = torch.unique_consecutive(uids[order], return_inverse=True, return_counts=True)
    begins = offsets_of(sizes)[:-1]
    lengths = batch.lengths("prompts")[order]
    same = _same_prompts(batch, order, order[begins][group])
    alike = torch.ones(len(sizes), dtype=torch.bool).index_put_((group[~same],), torch.tensor(False))
    shared = torch.where(lengths >= SHORTEST_PROMPT, lengths, 0).index_fill_(0, begins, 0)
    for number in (~alike).nonzero()[:, 0].tolist():
        rows = slice(int(begins[number]), int(begins[number] + sizes[number]))
        order[rows], shared[rows] = _in_tree(batch, order[rows])
    place = torch.empty_like(order).index_put_((order,), torch.arange(len(order))).tolist()
    return SharedStarts(place, shared.tolist(), shared.tolist())


def _same_prompts(batch: DataProto, rows: Tensor, others: Tensor) -> Tensor:
    """Return for each of `rows` whether its prompt equals the prompt of the corresponding row of `others`."""
    starts, lengths, ids = batch.offsets("prompts")[:-1], batch.lengths("prompts"), batch.values("prompts")
    if "prompt_images" in batch:
        images = batch.values("prompt_images")
        ids = torch.where(images > 0, -images, ids)
    found = lengths[rows] == lengths[others]
    same, compared = rows[found], lengths[rows[found]]
    equal = ids[ranges(starts[same], compared)] == ids[ranges(starts[others[found]], compared)]
    differs = torch.arange(len(same)).repeat_interleave(compared)[~equal]
    found[found.nonzero()[:, 0][differs]] = False
    return found


def _in_tree(batch: DataProto, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in the order of their prefix tree, and the number of tokens that each shares with the row before.

    Each number is `LEAST` - 1 less than in this tree, because a tree without some of the rows can share that many
    tokens fewer.
    """
    contexts = contexts_of(batch[rows])
    tree = PrefixTree(contexts.keys.numpy(), contexts.lengths.tolist(), contexts.prompts.tolist())
    number = {segment: index for index, segment in enumerate(tree.segments())}
    leaves = [tree.leaves[context] for context in contexts.first.tolist()]
    order = sorted(range(len(rows)), key=lambda row: -1 if (leaf := leaves[row]) is None else number[leaf])
    ordered = [leaves[row] for row in order]
    shared = [common_tokens(before, leaf) - (LEAST - 1) for before, leaf in itertools.pairwise(ordered)]
    shared = [0, *(max(0, tokens) for tokens in shared)]
    return rows[order], torch.tensor(shared)


def common_tokens(first: Segment | None, second: Segment | None) -> int:
    """Return the number of tokens on the common part of the paths to two segments."""
    while first is not second:
        if first is None or second is None:
            return 0
        if first.depth >= second.depth:
            first = first.parent
        else:
            second = second.parent
    return 0 if first is None else first.end
