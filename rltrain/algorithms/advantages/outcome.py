"""What estimators that judge a whole response share."""

from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked


def response_scores(token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of each row's trained tokens' rewards (B,), and the rows that count (B,): valid, with a trained token."""
    mask = as_mask(response_mask)
    # A row without a trained token has nowhere to carry its score: a 0 for it would be an invented one.
    return masked(token_level_rewards, mask).sum(-1), as_mask(valid) & mask.any(-1)


def spread(row_advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give each trained token its row's advantage: (B,) -> twice (B, T); without a critic returns are the same."""
    mask = as_mask(response_mask)
    advantages = masked(row_advantages[:, None].expand(mask.shape), mask)
    return advantages, advantages.clone()
