"""REINFORCE advantages: the return itself, without a baseline."""

from torch import Tensor

from rltrain.algorithms.advantages.returns import returns_to_go
from rltrain.algorithms.ratio import as_mask
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("reinforce", statistics="none")
def reinforce(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute A_t = G_t = sum_l gamma^l r_{t+l}, without a baseline; Williams 1992, Machine Learning 8:229-256.

    G_t is the discounted return from the t-th trained token on, and r_t is the reward of the t-th trained token. The
    index t counts only trained tokens, so no discount is applied over tool-output tokens. The advantages of a row do
    not depend on other rows. A row that is not `valid` gets an advantage of 0.

    token_level_rewards and response_mask are (B, T); valid is (B,). The advantages are (B, T) and 0 in masked slots.
    The returns equal the advantages.
    """
    returns = returns_to_go(token_level_rewards, as_mask(response_mask) & as_mask(valid)[:, None], gamma=gamma)
    return returns, returns.clone()
