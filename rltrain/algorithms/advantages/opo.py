"""Advantages of on-policy optimisation (OPO) with a length-weighted baseline."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import group_index, group_sum, statistics_of
from rltrain.algorithms.ratio import as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("opo", statistics="group")
def opo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = r_i - b with b = sum_j l_j r_j / sum_j l_j over the group; OPO, arXiv 2505.23585.

    The baseline b minimises the variance of the policy gradient if the squared norm of the gradient of an answer's
    log-probability is proportional to the answer's length. The reward r_i is the sum of the rewards over the trained
    tokens of row i, and l_i is the number of trained tokens of row i. A group is the set of valid rows with the same
    `uid`. A group that has only one row, or whose rewards are all the same, gets advantages of exactly 0. A row whose
    entry in `valid` is False does not count in the baseline, and gets an advantage of 0.

    token_level_rewards and response_mask are (B, T); uid and valid are (B,). The advantages are (B, T) and 0 in masked
    slots. The returns are the same as the advantages.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    raw, group = masked(scores, counted).double(), group_index(uid)
    lengths = masked(as_mask(response_mask).sum(-1), counted).double()
    baseline = group_sum(lengths * raw, group) / group_sum(lengths, group).clamp(min=1)
    varied = statistics_of(raw, group, counted).varied
    return spread(masked(raw - baseline, varied & counted).to(scores.dtype), response_mask)
