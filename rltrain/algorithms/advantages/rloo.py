"""Leave-one-out advantages (RLOO)."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import normalize_rewards
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("rloo", statistics="group")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = r_i - mean of the group's other rewards = k/(k-1) (r_i - mean); RLOO, arXiv 2402.14740 eq. 8.

    r_i is the sum of the rewards over the trained tokens of row i. A group is the set of the k valid rows with the same
    `uid`. A group that has only one row, or whose rewards are all equal, gets advantages of exactly 0. A row that is
    not `valid` is excluded from the statistics and gets an advantage of 0.

    token_level_rewards and response_mask are (B, T); uid and valid are (B,). The advantages are (B, T) and 0 in masked
    slots. The returns equal the advantages.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    advantages = normalize_rewards(scores, uid, counted, mean_level="group", std_level=None, leave_one_out=True)
    return spread(advantages, response_mask)
