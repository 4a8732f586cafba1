"""Group-relative advantages (GRPO) for optimising pass@k."""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import group_index, group_sum, statistics_of
from rltrain.algorithms.ratio import masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("grpo_passk", statistics="group")
def grpo_passk(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor, *, norm_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = (r_max - r_second) / (std(r_group) + 1e-6) for a group's best row, else 0; arXiv 2503.19595.

    The numerator of A_{i,t} is what row i adds to the maximum reward of its group: the maximum over the group minus the
    maximum over the rows other than i. For the row with the highest reward, the maximum over the other rows is the
    second-highest reward of the group, r_second. The maximum reward of a group of k rows is the quantity that pass@k
    measures. If two rows share the highest reward, removing one of them does not change the maximum, and the whole
    group gets advantages of exactly 0. A group that has only one row gets advantages of exactly 0. A row that is not
    `valid` is excluded from the statistics and gets an advantage of 0.

    r_i is the sum of the rewards over the trained tokens of row i. A group is the set of valid rows with the same
    `uid`. The standard deviation std(r_group) of the rewards r_i of a group is unbiased (divisor n - 1). With
    `norm_by_std` False, the advantages are not divided by the standard deviation.

    token_level_rewards and response_mask are (B, T); uid and valid are (B,). The advantages are (B, T) and 0 in masked
    slots. The returns equal the advantages.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    raw, group = masked(scores, counted).double(), group_index(uid)
    of = statistics_of(raw, group, counted)
    best = counted & (raw == of.highest)
    alone = best & of.varied & (group_sum(best.double(), group) == 1)
    second = statistics_of(raw, group, counted & ~best).highest
    advantages = masked(raw - second, alone)
    if norm_by_std:
        advantages = torch.where(alone, advantages / (of.std + 1e-6), advantages)
    # If a group has a NaN reward, its highest reward is NaN, no row equals the highest reward, and all rows of the
    # group would get an advantage of 0, which would hide the NaN reward. So if the mean reward of a group is NaN or
    # inf, each row of the group that `counted` marks gets the mean reward as its advantage, and the NaN or inf stays
    # visible.
    advantages = torch.where(counted & ~of.mean.isfinite(), of.mean, advantages)
    return spread(advantages.to(scores.dtype), response_mask)
