"""Turns of the rows of a batch, for advantage estimators that assign credit to turns instead of tokens."""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.returns import check_discount, discounted_suffix_sum, from_left, places, to_left
from rltrain.algorithms.ratio import as_float, as_mask, masked


class Turns:
    """The turns of each row of a batch.

    Values of turns are stored in a matrix (B, K), where K is the number of turns in the row with the most turns. Turns
    without a trained token are skipped: the successor of a turn is the next turn that has a trained token.

    Args:
        response_mask: (B, T), True = the token is trained on.
        turn_index: (B, T), index of the turn of each sampled token, from 0. The values in masked slots are ignored.

    Attributes:
        present: (B, K), True = the turn has a trained token.
    """

    def __init__(self, response_mask: Tensor, turn_index: Tensor) -> None:
        self._mask = as_mask(response_mask)
        self._index = turn_index.long().where(self._mask, 0)
        self._count = int(self._index.max()) + 1 if self._index.numel() else 1
        found = torch.zeros(len(turn_index), self._count, dtype=torch.int64, device=turn_index.device)
        self.present = found.scatter_add(1, self._index, self._mask.long()) > 0
        self._place = places(self.present)

    def sums(self, values: Tensor) -> Tensor:
        """Sum token values over the trained tokens of each turn: (B, T) -> (B, K)."""
        kept = masked(values, self._mask)
        return kept.new_zeros(len(kept), self._count).scatter_add(1, self._index, kept)

    def first(self, values: Tensor) -> Tensor:
        """Return the value at each turn's first trained token, (B, T) -> (B, K); 0 if a turn has no trained token."""
        rows, length = self._mask.shape
        slots = torch.arange(length, device=values.device).expand(rows, length).where(self._mask, length)
        start = slots.new_full((rows, self._count), length).scatter_reduce(1, self._index, slots, "amin")
        return torch.cat((values, values.new_zeros(rows, 1)), 1).gather(1, start)

    def at_tokens(self, turn_values: Tensor) -> Tensor:
        """Give each trained token the value of its turn: (B, K) -> (B, T); 0 in masked slots."""
        return masked(turn_values.gather(1, self._index), self._mask)

    def in_order(self, turn_values: Tensor) -> Tensor:
        """Move the values of turns with a trained token to the front of each row: (B, K) -> (B, K).

        In each row that `in_order` returns, the values of the turns with a trained token come first. The columns after
        the values of the turns with a trained token are 0.
        """
        return to_left(turn_values, self.present, self._place)

    def out_of_order(self, ordered: Tensor) -> Tensor:
        """Undo `in_order`: move each value back to the column of its turn, (B, K) -> (B, K).

        The matrix (B, K) that `out_of_order` returns is 0 at turns without a trained token.
        """
        return from_left(ordered, self.present, self._place)

    def rewards(self, token_level_rewards: Tensor) -> Tensor:
        """Sum the rewards (B, T) over the trained tokens of each turn, in the order of `in_order`: (B, K)."""
        return self.in_order(self.sums(as_float(token_level_rewards.detach())))

    def returns_to_go(self, token_level_rewards: Tensor, gamma: float) -> Tensor:
        """Compute the return G_k = sum_l gamma^l r_{k+l}, where k counts only turns that have a trained token.

        r_k is the sum of the rewards of the trained tokens of turn k. The returns (B, K) are in the order of
        `in_order`: in each row, the turns with a trained token come first. In each row of the returns, the columns
        after the last turn with a trained token are 0.

        Raises:
            ValueError: if `gamma` is outside [0, 1].
        """
        check_discount("gamma", gamma)
        return discounted_suffix_sum(self.rewards(token_level_rewards), gamma)


def turn_returns_to_go(
    token_level_rewards: Tensor, response_mask: Tensor, turn_index: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """Compute the return G_k of `Turns.returns_to_go`, and give it to each trained token of turn k.

    All tensors have the shape (B, T). The returns are 0 in masked slots and have no gradient.

    Raises:
        ValueError: if `gamma` is outside [0, 1].
    """
    turns = Turns(response_mask, turn_index)
    return turns.at_tokens(turns.out_of_order(turns.returns_to_go(token_level_rewards, gamma)))
