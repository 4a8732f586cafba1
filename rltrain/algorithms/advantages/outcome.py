"""Helpers for the advantage estimators that assign one score to a whole response."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked


def counted_rows(response_mask: Tensor, valid: Tensor) -> Tensor:
    """Return the mask (B,) of the rows that enter the statistics: valid rows that have at least one trained token."""
    # A row without a trained token has no reward, and counting the row would add a score of 0 to the statistics.
    return as_mask(valid) & as_mask(response_mask).any(-1)


def response_scores(token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reward of each row (B,), summed over trained tokens, and the mask (B,) from `counted_rows`."""
    rewards = masked(token_level_rewards.detach(), as_mask(response_mask))
    # In float32, the sum of a row's rewards depends on the order of the row's tokens and on the row's padding. If
    # rewards were summed in float32, the scores of rows with equal rewards would differ in the last bits, and a
    # division by the std of the scores would turn these rounding differences into advantages.
    scores = rewards.sum(-1, dtype=torch.float64).to(rewards.dtype)
    return scores, counted_rows(response_mask, valid)


def known_successes(successes: Tensor, counted: Tensor) -> Tensor:
    """Return a mask (B,): True for rows of the mask `counted` where it is known whether the answer is correct.

    Raises:
        ValueError: if `counted` contains at least one row, but `successes` is NaN for all rows in `counted`.
    """
    known = counted & ~successes.isnan()
    if bool(counted.any()) and not bool(known.any()):
        raise ValueError(
            "successes=NaN in all rows: no reward function decides whether an answer is correct, so nothing is learnt; "
            "set `success` for a reward function, or return RewardResult.success"
        )
    return known


def spread(row_advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give each trained token the advantage of its row.

    `row_advantages` (B,) holds one advantage for each row. The advantages and the returns of the tokens have the shape
    (B, T). The returns equal the advantages, because the estimators that use `spread` have no critic.
    """
    mask = as_mask(response_mask)
    advantages = masked(row_advantages[:, None].expand(mask.shape), mask)
    return advantages, advantages.clone()
