"""Policy loss of tapered off-policy REINFORCE (TOPR).

An answer with a negative advantage loses weight as the answer becomes less probable.
"""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_positive,
    masked,
    metric_sum,
    policy_metrics,
    row_log_ratio,
    safe_log_prob,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("topr")
def topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ratio_max: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the REINFORCE loss, weighted by the truncated sequence ratio if A_t < 0; TOPR, arXiv 2503.14286 eq. 8.

        l_t = -sg[w] A_t log pi(y_t),    w = 1 where A_t >= 0, else min(s, ratio_max)          sg: stop-gradient
        s = prod_t pi(y_t) / pi_old(y_t) over the trained tokens of the row

    The gradient of the loss l_t is -w A_t grad log pi(y_t), where w is the weight of the token. An answer with A_t >= 0
    has the weight 1, however unlikely the answer has become. An answer with A_t < 0 loses weight as its probability
    falls, so the update needs no KL term. In the TOPR paper, the denominator of the sequence ratio s is the policy that
    sampled the answer; set `algorithm.old_log_probs=rollout` to use the same denominator.

    The sequence ratio s is a product over all trained tokens of the row, without normalisation by the length. The sum
    of the log-ratios of a row's tokens is clamped to [-20, 20]. `topr` needs all tokens of a row: under sequence
    parallelism, gather the row's log-probs before calling `topr`. If a row is one turn of a longer trajectory, the
    sequence ratio s covers only the tokens of that turn. `topr` computes log pi as log pi_old + log r, where the
    token's log-ratio log r is clamped to [-20, 20]. The gradient is 0 at tokens whose log-ratio is outside of
    [-20, 20].

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The returned metric sums are
    `clip_fraction`, `weight_clip_fraction`, `weight_mean`, `ratio_mean` and `ppo_kl`. `clip_fraction` is always 0,
    because the truncation removes no gradient. `weight_clip_fraction` counts the tokens with A_t < 0 in rows whose
    sequence ratio s exceeds `ratio_max`.

    Raises:
        ValueError: if `ratio_max` is not finite and positive.
    """
    check_positive(ratio_max=ratio_max)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    ratio = row_log_ratio(log_ratio).exp().expand_as(log_ratio)
    weight = torch.where(advantage < 0, ratio.clamp(max=ratio_max), torch.ones_like(ratio))
    metrics = policy_metrics(log_ratio, log_ratio.detach().exp(), torch.zeros_like(mask), mask)
    metrics["weight_clip_fraction"] = metric_sum((advantage < 0) & (ratio > ratio_max), mask)
    metrics["weight_mean"] = metric_sum(weight, mask)
    return -weight * advantage * safe_log_prob(log_ratio, old_log_probs, mask), metrics
