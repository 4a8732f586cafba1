"""ASPO policy loss, which weights tokens with a positive advantage by the reciprocal of the importance ratio."""

import torch
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


@POLICY_LOSSES.register("aspo")
def aspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped loss with ratio 1/r for tokens with A > 0; ASPO, arXiv 2510.06062 section 6, eq. 3.

        l = -A pi_old pi / sg[pi^2]                 where A > 0, r <= 1+high and 1/r <= c       sg: stop-gradient
        l = -A c pi / sg[pi]                        where A > 0 and 1/r > c
        l = -A / (1+high), without gradient         where A > 0 and r > 1+high
        l = PPO's clipped loss with dual clip       where A <= 0, as in `vanilla`

    r = pi(y_t) / pi_old(y_t) is the importance ratio of the sampled token y_t, A is the token's advantage, and the
    constant c = `clip_ratio_c` is above 1 (inf for no dual clip). As in PPO, a token whose ratio r is clipped has no
    gradient. For a token with A > 0 inside the clip range, the loss is -A / r, and its gradient is
    -(A / r) grad log pi, because the factor 1/pi^2 of the loss is detached. A token with a positive advantage has a
    weight 1/r above 1 if the token's probability has fallen, and below 1 if the token's probability has risen. In
    contrast to ASPO, PPO weights a token by the importance ratio r, which is below 1 if the token's probability has
    fallen.

    For tokens with a positive advantage A, the dual clip is soft: if 1/r is above c = `clip_ratio_c`, the token's
    weight in the loss is c, and the token's gradient is scaled down but not set to 0. A token with a negative advantage
    and a ratio r above c has no gradient, as in PPO's dual clip (arXiv 1912.09729). In the implementation by the ASPO
    authors, a token with A < 0 and r > c keeps the gradient -c A grad log pi.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The log-ratio log r is clamped to
    [-20, 20], and the gradient is 0 where log r is outside of [-20, 20]. The returned metric sums are `clip_fraction`
    (tokens clipped by PPO's clip), `weight_clip_fraction` (tokens with A > 0 and 1/r > c), `clip_fraction_c` (tokens
    with A < 0 and r > c), `ratio_mean` (of r, not of 1/r) and `ppo_kl`.

    Raises:
        ValueError: if a clip ratio is negative, or if `clip_ratio_c` is not above 1.
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
    good, flipped = advantage > 0, 1 / effective.detach()
    with_gradient = flipped.clamp(max=clip_ratio_c) * (log_ratio - log_ratio.detach()).exp()
    weight = torch.where(good, torch.where(clipped, flipped, with_gradient), effective)
    metrics = policy_metrics(log_ratio, ratio, clipped, mask)
    metrics["weight_clip_fraction"] = metric_sum(good & (flipped > clip_ratio_c), mask)
    metrics["clip_fraction_c"] = metric_sum((advantage < 0) & (ratio > clip_ratio_c), mask)
    return -advantage * weight, metrics
