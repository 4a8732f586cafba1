"""GDPO advantages: several reward components, each normalised separately."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rltrain.algorithms.advantages.outcome import counted_rows, spread
from rltrain.algorithms.normalization import combine_rewards, normalize_rewards
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("gdpo", statistics="batch")
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    valid: Tensor,
    reward_components: Tensor,
    *,
    weights: Sequence[float] = (),
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = (s_i - mean(s)) / (std(s) + 1e-6), s_i = sum_k w_k (r_{i,k} - mean_k) / (std_k + 1e-6).

    The formula of A_{i,t} comes from GDPO, arXiv 2601.05242. The value r_{i,k} is reward component k of row i, or NaN
    if the component does not apply to the row. mean_k and std_k are the mean and the standard deviation of component k
    over the valid rows of the group whose component k is not NaN. mean(s) and std(s) are the mean and the standard
    deviation of the sums s_i over the valid rows of the batch, where each row counts once. The standard deviations
    std_k and std(s) are unbiased (divisor n - 1). Because each component is normalised separately, a component with
    many distinct values does not outweigh a component with few distinct values.

    `weights` holds one weight w_k for each reward component. If `weights` is (), every component has the weight 1. A
    component that is constant within a group adds exactly 0 to the sums s_i of the group. A row is excluded from the
    statistics and gets an advantage of 0 if the row is not `valid`, or if all components of the row are NaN.

    `gdpo` reads all rewards from `reward_components`. The argument `token_level_rewards` is not read and exists only
    because every advantage estimator takes it. A KL penalty in `token_level_rewards` has no effect on GDPO; use the KL
    loss instead of the KL penalty.

    token_level_rewards and response_mask are (B, T), uid and valid are (B,), and reward_components is (B, K). The
    advantages are (B, T) and 0 in masked slots. The returns equal the advantages.

    Raises:
        ValueError: if `weights` is given and all weights are 0.
    """
    if len(weights) and not any(weights):
        raise ValueError(f"weights={list(weights)}: if all weights are 0, nothing is learnt; set at least one above 0")
    given = weights if len(weights) else (1.0,) * reward_components.shape[-1]
    counted = counted_rows(response_mask, valid) & ~reward_components.isnan().all(-1)
    sums = combine_rewards(reward_components, uid, counted, weights=given, aggregation="normalize_then_sum")
    no_group = torch.zeros_like(uid)
    return spread(normalize_rewards(sums, no_group, counted, mean_level="batch", std_level="batch"), response_mask)
