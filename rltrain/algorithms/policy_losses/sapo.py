"""Policy loss of soft adaptive policy optimization (SAPO), in which a smooth gate replaces the clipping of ratios."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, check_positive, masked, metric_sum, policy_metrics, safe_log_ratio
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute SAPO's loss, in which a sigmoid f(r) with slope 1 at r = 1 replaces the ratio r; arXiv 2511.20347.

        l = -f(r) A,    f(r) = sigmoid(tau (r - 1)) 4 / tau,    tau = tau_pos where A > 0, else tau_neg

    r = pi(y_t) / pi_old(y_t) is the importance ratio of the sampled token y_t, and A is the token's advantage. The
    gradient of the loss is -w r A grad log pi with the gate w = 4 p (1 - p), where p = sigmoid(tau (r - 1)). The gate w
    is 1 if the ratio r is 1, and decreases as r moves away from 1 in either direction. The larger the parameter tau is,
    the faster the gate w decreases.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. `sapo` returns the metric sums
    `clip_fraction` (always 0), `gate_mean` (of the gate w), `ratio_mean` and `ppo_kl`.
    """
    check_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    ratio = log_ratio.exp()
    tau = torch.full_like(advantage, tau_neg).masked_fill(advantage > 0, tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1))
    metrics = policy_metrics(log_ratio, ratio, torch.zeros_like(mask), mask)
    metrics["gate_mean"] = metric_sum(4 * gate.detach() * (1 - gate.detach()), mask)
    return -advantage * gate * (4 / tau), metrics
