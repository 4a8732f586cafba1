"""What estimators that judge a whole response share."""

from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked


def counted_rows(response_mask: Tensor, valid: Tensor) -> Tensor:
    """The rows that count (B,): valid, with a trained token."""
    # A row without a trained token has nowhere to carry its score: a 0 for it would be an invented one.
    return as_mask(valid) & as_mask(response_mask).any(-1)


def response_scores(token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of each row's trained tokens' rewards (B,), and the rows that count (B,)."""
    scores = masked(token_level_rewards.detach(), as_mask(response_mask)).sum(-1)
    return scores, counted_rows(response_mask, valid)


def spread(row_advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give each trained token its row's advantage: (B,) -> twice (B, T); without a critic returns are the same."""
    mask = as_mask(response_mask)
    advantages = masked(row_advantages[:, None].expand(mask.shape), mask)
    return advantages, advantages.clone()
