"""REINFORCE: the return itself."""

from torch import Tensor

from rltrain.algorithms.advantages.returns import returns_to_go
from rltrain.algorithms.ratio import as_mask
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("reinforce", statistics="none")
def reinforce(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_t = G_t = sum_l gamma^l r_t+l, without a baseline; Williams 1992, Machine Learning 8:229-256.

    r_t: reward of a trained token; t + 1 is the next trained token, so tool tokens cost no discount. No row sees
    another. A row that is not `valid` gets 0.

    token_level_rewards, response_mask (B, T); valid (B,). Advantages (B, T) are 0 where masked; returns are equal.
    """
    returns = returns_to_go(token_level_rewards, as_mask(response_mask) & as_mask(valid)[:, None], gamma=gamma)
    return returns, returns.clone()
