"""Clipped importance sampling weights: every token keeps its gradient."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_clip_ratios,
    masked,
    metric_sum,
    policy_metrics,
    safe_log_prob,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE weighted with the clipped ratio; CISPO of MiniMax-M1, arXiv 2506.13585 section 3.1.

        l = -sg[clip(r, 1-low, 1+high)] A log pi(y_t)          sg: no gradient through it

    r = pi(y_t) / pi_old(y_t), A advantage. Clipping bounds the weight and takes no token's gradient away: it is
    -clip(r) A grad log pi everywhere. low = 1 means no lower bound, as in the paper. log pi is written log pi_old +
    log r with log r clamped to [-20, 20], and has no gradient beyond: so the value is finite where pi is 0.

    All (B, T); masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction` (always 0: no gradient is lost),
    `weight_clip_fraction` (r outside of the range), `ratio_mean`, `ppo_kl`.
    """
    check_clip_ratios(clip_ratio_low, clip_ratio_high)
    low, high = 1 - clip_ratio_low, 1 + clip_ratio_high
    mask = as_mask(response_mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(low, high) * masked(advantages.detach(), mask)
    metrics = policy_metrics(log_ratio, ratio, torch.zeros_like(mask), mask)
    metrics["weight_clip_fraction"] = metric_sum((ratio < low) | (ratio > high), mask)
    return -weight * safe_log_prob(log_ratio, old_log_probs, mask), metrics
