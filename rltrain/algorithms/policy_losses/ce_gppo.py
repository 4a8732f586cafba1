"""CE-GPPO policy loss, in which tokens clipped by PPO keep a bounded gradient, to control the policy's entropy."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_clip_ratio_c,
    check_clip_ratios,
    check_positive,
    clipped_ratio,
    masked,
    metric_sum,
    policy_metrics,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("ce_gppo")
def ce_gppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 10.0,
    beta_low: float = 0.75,
    beta_high: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's loss, but keep a bounded gradient where PPO clips the ratio; CE-GPPO, arXiv 2509.20712.

        l = -beta_low (1-low) (r / sg[r]) A        where A < 0 and r < 1-low            sg: stop-gradient
        l = -beta_high (1+high) (r / sg[r]) A      where A > 0 and r > 1+high
        l = -r A                                   elsewhere, and -c A without gradient where A < 0 and r > c

    r = pi(y_t) / pi_old(y_t), A is the advantage, low = `clip_ratio_low`, high = `clip_ratio_high`, and c =
    `clip_ratio_c` > 1 (inf for no dual clip). The gradient of a clipped token is -beta_low (1-low) A grad log pi if
    A < 0, and -beta_high (1+high) A grad log pi if A > 0. Most clipped tokens are unlikely under the policy. The
    gradient of a clipped token with a positive advantage raises the entropy of the policy, and is scaled by
    `beta_high`. The gradient of a clipped token with a negative advantage lowers the entropy of the policy, and is
    scaled by `beta_low`. `beta_low` and `beta_high` are beta_1 and beta_2 of the CE-GPPO paper. With `beta_low` and
    `beta_high` at 1, the loss is GPPO (arXiv 2508.07629). Like the implementation by the CE-GPPO authors, `ce_gppo`
    applies PPO's dual clip.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The returned metric sums are
    `clip_fraction` (always 0, because tokens outside the clip range keep a gradient), `weight_clip_fraction` (tokens
    whose ratio is clipped at 1 - `clip_ratio_low` or 1 + `clip_ratio_high`), `clip_fraction_c` (tokens clipped by the
    dual clip), `ratio_mean` and `ppo_kl`.

    Raises:
        ValueError: if a clip ratio is negative, if `clip_ratio_c` is not above 1, or if `beta_low` or `beta_high` is
            not finite and positive.
    """
    check_clip_ratios(clip_ratio_low, clip_ratio_high)
    check_clip_ratio_c(clip_ratio_c)
    check_positive(beta_low=beta_low, beta_high=beta_high)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    ratio = log_ratio.exp()
    effective, clipped = clipped_ratio(
        ratio, advantage, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, cap=clip_ratio_c
    )
    beta = torch.where(advantage < 0, beta_low, beta_high)
    with_gradient = effective.detach() * beta * (log_ratio - log_ratio.detach()).exp()
    metrics = policy_metrics(log_ratio, ratio, torch.zeros_like(mask), mask)
    metrics["weight_clip_fraction"] = metric_sum(clipped, mask)
    metrics["clip_fraction_c"] = metric_sum((advantage < 0) & (ratio > clip_ratio_c), mask)
    return -advantage * torch.where(clipped, with_gradient, effective), metrics
