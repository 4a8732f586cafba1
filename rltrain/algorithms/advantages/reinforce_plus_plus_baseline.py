"""REINFORCE++ advantages with the group mean as baseline."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import normalize_advantages, normalize_rewards
from rltrain.algorithms.ratio import as_mask
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus_baseline", statistics="batch")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = (d_i - mean(d)) / (std(d) + 1e-6), d_i = r_i - mean(r_group).

    The formula of A_{i,t} comes from REINFORCE++ with baseline, arXiv 2501.03262. The reward r_i is the sum of the
    rewards over the trained tokens of row i. A group is the set of valid rows with the same `uid`. The mean and the
    unbiased standard deviation of the deviations d_i are computed over all trained tokens of the valid rows of the
    batch.

    In a group that has only one row, or whose rewards are all equal, every deviation d_i is exactly 0. If the
    deviations d_i of one group are 0, the group's advantages can still differ from 0, because mean(d), the mean over
    the tokens of all groups, may differ from 0. If all deviations d_i are equal, all advantages A_{i,t} are exactly 0.
    A row that is not `valid` is excluded from the statistics and gets an advantage of 0.

    token_level_rewards and response_mask are (B, T); uid and valid are (B,). The advantages are (B, T) and 0 in masked
    slots. The returns equal the advantages.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    deviations = normalize_rewards(scores, uid, counted, mean_level="group", std_level=None)
    mask = as_mask(response_mask) & counted[:, None]
    advantages = normalize_advantages(spread(deviations, mask)[0], mask)
    return advantages, advantages.clone()
