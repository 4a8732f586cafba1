"""Policy loss with clipped importance sampling weights (CISPO), in which every token keeps its gradient."""

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
    """Compute the REINFORCE loss weighted by the clipped ratio; CISPO of MiniMax-M1, arXiv 2506.13585 section 3.1.

        l = -sg[clip(r, 1-low, 1+high)] A log pi(y_t)          sg: stop-gradient

    r = pi(y_t) / pi_old(y_t), and A is the advantage. Clipping bounds the weight and removes no token's gradient: a
    clipped token still has the gradient -clip(r) A grad log pi. With a `clip_ratio_low` of 1, the clip range has no
    lower bound, as in the CISPO paper.

    `cispo` computes log pi as log pi_old + log r, with log r clamped to [-20, 20]. Because of the clamp of log r, the
    value of the loss is finite where pi is 0. The gradient is 0 where log r is outside of [-20, 20].

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. `cispo` returns the metric sums
    `clip_fraction` (always 0, because no gradient is removed), `weight_clip_fraction` (r outside of the clip range),
    `ratio_mean` and `ppo_kl`.
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
