"""Leave-one-out advantages."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import normalize_rewards
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("rloo", statistics="group")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """A_i,t = r_i - mean of the other rewards of the group = k/(k-1) (r_i - mean); RLOO, arXiv 2402.14740 eq. 8.

    r_i: sum of the row's token rewards; group: the k valid rows with the same `uid`. A group of one, or whose rewards
    are all equal, gets exactly 0; so does a row that is not `valid`, and it is in no statistic.

    token_level_rewards, response_mask (B, T); uid, valid (B,). Advantages (B, T) are 0 where masked; returns are equal.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    advantages = normalize_rewards(scores, uid, counted, mean_level="group", std_level=None, leave_one_out=True)
    return spread(advantages, response_mask)
