"""The advantages of REINFORCE++: the returns of all trained tokens, whitened over the batch."""

from torch import Tensor

from rltrain.algorithms.advantages.returns import returns_to_go
from rltrain.algorithms.normalization import normalize_advantages
from rltrain.algorithms.ratio import as_mask
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus", statistics="batch")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute A_t = (G_t - mean(G)) / (std(G) + 1e-6), G_t = sum_l gamma^l r_{t+l}; REINFORCE++, arXiv 2501.03262.

    r_t is the reward of the t-th trained token. In the REINFORCE++ paper, the reward r_t always includes a KL penalty.
    In `reinforce_plus_plus`, the reward r_t includes a KL penalty only if `token_level_rewards` includes a KL penalty.
    The index t counts only trained tokens, so the discount gamma is not applied at tool-output tokens. The mean and the
    unbiased std are computed over all trained tokens of the valid rows of the batch, so a long response weighs more
    than a short one. If all returns are the same, all advantages are exactly zero. A row that is not `valid` does not
    count in the mean and the std, and gets an advantage of 0.

    token_level_rewards and response_mask are (B, T); valid is (B,). The advantages and the returns are (B, T) and 0 in
    masked slots. The returns are the discounted reward sums G_t, which are not whitened.
    """
    mask = as_mask(response_mask) & as_mask(valid)[:, None]
    returns = returns_to_go(token_level_rewards, mask, gamma=gamma)
    return normalize_advantages(returns, mask), returns
