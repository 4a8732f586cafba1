"""Variational sequence-level soft policy optimization (VESPO), which replaces clipping by a smooth sequence weight."""

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


@POLICY_LOSSES.register("vespo")
def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the REINFORCE loss, weighted by a smooth function of the sequence ratio; VESPO, arXiv 2602.10693.

        l_t = -sg[phi(W)] A_t log pi(y_t),    phi(W) = W^k exp(lambda (1 - W))          sg: stop-gradient
        W = prod_t pi(y_t) / pi_old(y_t) over the trained tokens of the row
        k, lambda = k_pos, lambda_pos where A_t >= 0, else k_neg, lambda_neg

    The weight phi is 1 at W = 1, has its maximum at W = k / lambda, and falls to 0 for small and for large W. With the
    default values, the weight phi has its maximum at W = 0.67 where A_t >= 0, and at W = 1.5 where A_t < 0. In the
    VESPO paper, the denominator of the sequence ratio W is the policy that sampled the answer; set
    `algorithm.old_log_probs=rollout` to use the same denominator.

    The sequence ratio W is a product over all trained tokens of the row, without normalisation by the length. The sum
    log W of a row's token log-ratios is clamped to [-20, 20]. Every row must be complete: under sequence parallelism,
    gather the log-probs of a row before the loss is called. `vespo` computes log pi as log pi_old + log r, where the
    token's log-ratio log r = log(pi / pi_old) is clamped to [-20, 20]. The gradient is 0 at tokens whose log-ratio
    log r is outside of [-20, 20].

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. `vespo` returns the metric sums
    `clip_fraction` (always 0, because VESPO does not clip), `weight_mean` (of the weight phi), `ratio_mean` (of the
    token ratios r, not of W) and `ppo_kl`.

    Raises:
        ValueError: if `k_pos`, `lambda_pos`, `k_neg` or `lambda_neg` is not finite and positive.
    """
    check_positive(k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    sequence = row_log_ratio(log_ratio)
    good = (k_pos * sequence - lambda_pos * sequence.expm1()).exp()
    bad = (k_neg * sequence - lambda_neg * sequence.expm1()).exp()
    weight = torch.where(advantage >= 0, good, bad)
    metrics = policy_metrics(log_ratio, log_ratio.detach().exp(), torch.zeros_like(mask), mask)
    metrics["weight_mean"] = metric_sum(weight, mask)
    return -weight * advantage * safe_log_prob(log_ratio, old_log_probs, mask), metrics
