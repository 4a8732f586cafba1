"""ReMax: the greedy answer's score as baseline."""

from torch import Tensor

from rltrain.algorithms.advantages.returns import returns_to_go
from rltrain.algorithms.ratio import as_float, as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("remax", statistics="none")
def remax(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, baseline_rewards: Tensor
) -> tuple[Tensor, Tensor]:
    """A_t = sum_{t' >= t} r_t' - b, b the score of the greedy answer to the row's prompt; ReMax, arXiv 2310.10505.

    r_t: reward of a trained token. With the score on the last one and no KL-in-reward, A_t is the paper's r - b for all
    tokens; with it, the first sum holds the penalties still to come, and b, a score, holds none. No row sees another.
    A row that is not `valid`, or whose b is NaN (the greedy answer has no score), gets 0.

    token_level_rewards, response_mask (B, T); valid, baseline_rewards (B,). Both results (B, T) are 0 where masked;
    returns are the sums without b.
    """
    known = as_mask(valid) & ~baseline_rewards.isnan()
    mask = as_mask(response_mask) & known[:, None]
    returns = returns_to_go(token_level_rewards, mask)
    return masked(returns - as_float(baseline_rewards.detach())[:, None], mask), returns
