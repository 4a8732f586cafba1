"""PPO's clipped surrogate objective with the dual clip."""

from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_clip_ratio_c,
    check_clip_ratios,
    clipped_ratio,
    masked,
    metric_sum,
    policy_metrics,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("vanilla")
def vanilla(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped loss per token.

        l = -min(r A, clip(r, 1-low, 1+high) A)            PPO, arXiv 1707.06347 eq. 7
        l = min(l, -c A) where A < 0                       dual clip, arXiv 1912.09729

    r = pi(y_t) / pi_old(y_t), A is the advantage, and c = `clip_ratio_c` > 1 (inf for no dual clip). Clip ratios with
    high > low give DAPO's clip-higher (arXiv 2503.14476). The ratio is clipped, and the gradient is 0, in three cases:
    A > 0 and r > 1+high, A < 0 and r < 1-low, or A < 0 and r > c. Where the ratio is not clipped, the gradient of the
    loss is -A r grad log pi.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The returned metric sums are
    `clip_fraction` (tokens clipped by PPO's clip), `clip_fraction_c` (tokens clipped by the dual clip), `ratio_mean`
    and `ppo_kl`.
    """
    check_clip_ratios(clip_ratio_low, clip_ratio_high)
    check_clip_ratio_c(clip_ratio_c)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    ratio = log_ratio.exp()
    effective, clipped = clipped_ratio(
        ratio, advantage, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, cap=clip_ratio_c
    )
    metrics = policy_metrics(log_ratio, ratio, clipped, mask)
    metrics["clip_fraction_c"] = metric_sum((advantage < 0) & (ratio > clip_ratio_c), mask)
    return -advantage * effective, metrics
