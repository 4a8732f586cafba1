"""Several rewards, each normalised on its own."""

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
    """A_i,t = (s_i - mean(s)) / (std(s) + 1e-6), s_i = sum_k w_k (r_ik - mean_k) / (std_k + 1e-6).

    GDPO, arXiv 2601.05242. r_ik: component k of row i, NaN where it does not apply; mean_k, std_k: over the valid rows
    of the group that it applies to; mean(s), std(s): over the valid rows of the batch, each row once; both stds
    unbiased. So a component with few values is not drowned by one with many. `weights`: w_k, one for each component; ()
    weighs all by 1. A component that is constant in its group adds exactly 0. A row that is not `valid`, or to which no
    component applies, is in no statistic and gets 0.

    All rewards come from `reward_components`: `token_level_rewards` is there for the signature only and is not read, so
    a KL penalty that was put into it would be lost. Use the KL loss instead.

    token_level_rewards, response_mask (B, T); uid, valid (B,); reward_components (B, K). Advantages (B, T) are 0 where
    masked; returns are equal.
    """
    if len(weights) and not any(weights):
        raise ValueError(f"weights={list(weights)}: with all of them 0 nothing is learnt; give one above 0")
    given = weights if len(weights) else (1.0,) * reward_components.shape[-1]
    counted = counted_rows(response_mask, valid) & ~reward_components.isnan().all(-1)
    sums = combine_rewards(reward_components, uid, counted, weights=given, aggregation="normalize_then_sum")
    no_group = torch.zeros_like(uid)
    return spread(normalize_rewards(sums, no_group, counted, mean_level="batch", std_level="batch"), response_mask)
