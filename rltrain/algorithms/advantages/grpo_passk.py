"""Group-relative advantages for pass@k."""

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
    """A_i,t = (r_max - r_second) / (std(r_group) + 1e-6) for the best row of a group, else 0; arXiv 2503.19595.

    What a row adds to the maximum of its group, the quantity that pass@k rewards with k the group's size: the maximum
    less that of the other rows, r_second for the best row. Where two rows share the best reward neither adds anything,
    and the group gets exactly 0. So does a group of one, and a row that is not `valid`, which is in no statistic.
    r_i: sum of the row's token rewards; std: unbiased; `norm_by_std` False leaves the division out.

    token_level_rewards, response_mask (B, T); uid, valid (B,). Advantages (B, T) are 0 where masked; returns are equal.
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
    advantages = torch.where(counted & ~of.mean.isfinite(), of.mean, advantages)  # a NaN has no order: it stays visible
    return spread(advantages.to(scores.dtype), response_mask)
