"""Geometric-mean policy optimization: token ratios clipped in log space, one mean for a whole response."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_clip_ratios,
    masked,
    masked_row_mean,
    policy_metrics,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("geo_mean", aggregations=("seq-mean-token-mean",))
def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The geometric mean of clipped token ratios, in its token form; GMPO, arXiv 2507.20673.

        L = -A exp(1/|y| sum_t c_t),    c_t = min(log r_t, high) where A >= 0, max(log r_t, -low) where A < 0
        l_t = -s_t A_t,  s_t = exp(sg[1/|y| sum_k c_k] + c_t - sg[c_t])        sg: no gradient through it

    r_t = pi(y_t) / pi_old(y_t), |y| the row's trained tokens; low and high bound the log-ratio: 0.4 is the range
    (e^-0.4, e^0.4). Every token has the value of the geometric mean s, and the gradient s A_t grad log pi(y_t) where it
    is not clipped, 0 where it is: one clipped token leaves the others their gradient. The row must be whole: under
    sequence parallelism gather its log-probs first.

    Defined for the aggregation seq-mean-token-mean: when the A_t of a row are equal, the mean over its tokens is the
    paper's sequence loss L, gradient included. Any other aggregation weighs a row by its length, which the paper does
    not.

    All (B, T); masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction`, `ratio_mean` (of s), `ppo_kl`.
    """
    check_clip_ratios(clip_ratio_low, clip_ratio_high)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    kept = torch.where(advantage >= 0, log_ratio.clamp(max=clip_ratio_high), log_ratio.clamp(min=-clip_ratio_low))
    ratio = (masked_row_mean(kept.detach(), mask) + (kept - kept.detach())).exp()
    clipped = (kept != log_ratio) & (advantage != 0)
    return -advantage * ratio, policy_metrics(log_ratio, ratio, clipped, mask)
