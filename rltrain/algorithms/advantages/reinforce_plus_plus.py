"""REINFORCE++: returns whitened over the batch."""

from torch import Tensor

from rltrain.algorithms.advantages.returns import returns_to_go
from rltrain.algorithms.normalization import normalize_advantages
from rltrain.algorithms.ratio import as_mask
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus", statistics="batch")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_t = (G_t - mean(G)) / (std(G) + 1e-6), G_t = sum_l gamma^l r_t+l; REINFORCE++, arXiv 2501.03262.

    r_t: reward of a trained token, which holds the KL penalty in the paper (KL-in-reward here); t + 1 is the next
    trained token, so tool tokens cost no discount. Mean and unbiased std are over all trained tokens of the valid rows
    of the batch: a long response weighs more. All G equal: exactly 0. A row that is not `valid` is in no statistic and
    gets 0.

    token_level_rewards, response_mask (B, T); valid (B,). Both results (B, T) are 0 where masked; returns are G.
    """
    mask = as_mask(response_mask) & as_mask(valid)[:, None]
    returns = returns_to_go(token_level_rewards, mask, gamma=gamma)
    return normalize_advantages(returns, mask), returns
