"""ReMax advantages: the baseline of a row is the score of a greedy answer to the same prompt."""

from torch import Tensor

from rltrain.algorithms.advantages.returns import returns_to_go
from rltrain.algorithms.ratio import as_float, as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("remax", statistics="none")
def remax(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, baseline_rewards: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute A_t = sum_{t' >= t} r_{t'} - b, where b is the score of the greedy answer; ReMax, arXiv 2310.10505.

    r_t is the reward of the t-th trained token. If the last trained token gets the whole score r of the row and the
    rewards contain no KL penalty, the advantage A_t of every token is r - b, as in the ReMax paper. If the rewards
    contain KL penalties, the advantage A_t includes the KL penalties of the tokens from t on, whereas the baseline b is
    a score without KL penalties. The advantages of a row do not depend on other rows. A row gets an advantage and a
    return of 0 if the row is not `valid`, or if its baseline b is NaN because the greedy answer has no score.

    token_level_rewards and response_mask are (B, T); valid and baseline_rewards are (B,). The advantages and the
    returns are (B, T) and 0 in masked slots. The returns are the reward sums sum_{t' >= t} r_{t'}, from which the
    baseline b is not subtracted.
    """
    known = as_mask(valid) & ~baseline_rewards.isnan()
    mask = as_mask(response_mask) & known[:, None]
    returns = returns_to_go(token_level_rewards, mask)
    return masked(returns - as_float(baseline_rewards.detach())[:, None], mask), returns
