"""Divergence PPO (DPPO) policy loss with the binary KL divergence."""

import torch
from torch import Tensor

from rltrain.algorithms.policy_losses.dppo_tv import check_deltas, dropping_loss, log_probabilities
from rltrain.algorithms.ratio import as_mask, masked, safe_log_ratio
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    clip_ratio_c: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the DPPO policy loss (arXiv 2602.04879): REINFORCE, weighted by a capped importance ratio.

    A token is dropped (m = 0) if its advantage is positive and its probability has risen too far, or if its advantage
    is negative and its probability has fallen too far:

        l = -A sg[min(r, c)] log pi(y_t) m                        sg: stop-gradient
        m = 0 where A > 0, D > delta_high and pi > pi_old, or A < 0, D > delta_low and pi < pi_old; else 1
        D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    r = pi(y_t) / pi_old(y_t), A is the advantage, and c = `clip_ratio_c` > 1 (inf for no cap). D is KL(pi_old || pi)
    between binary distributions with the two outcomes "y_t" and "any other token". A token is never dropped if its
    probability rose although A < 0, or fell although A > 0.

    `dppo_kl` computes log pi as log pi_old + log r, where the log-ratio log r = log(pi / pi_old) is clamped to
    [-20, 20]. The gradient is 0 at tokens whose log-ratio log r is outside of [-20, 20]. To keep the divergence D
    finite, probabilities are clamped to at most 1, and 1 - pi is clamped to at least the smallest positive normal
    number.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. `dppo_kl` returns the metric sums
    `clip_fraction` (dropped tokens), `weight_clip_fraction` (tokens with r > c that are not dropped), `ratio_mean` and
    `ppo_kl`.
    """
    check_deltas(delta_low, delta_high)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    log_pi, log_pi_old = log_probabilities(log_ratio, old_log_probs, mask)
    divergence = binary_kl(log_pi_old, log_pi)
    up = (advantage > 0) & (log_pi > log_pi_old) & (divergence > delta_high)
    down = (advantage < 0) & (log_pi < log_pi_old) & (divergence > delta_low)
    return dropping_loss(log_ratio, old_log_probs, advantage, mask, far=up | down, clip_ratio_c=clip_ratio_c)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute the KL divergence between two Bernoulli distributions; the result is always finite.

    A Bernoulli distribution has two outcomes. `log_p` and `log_q` are the log-probabilities of the first outcome under
    the two distributions, and must be at most 0.
    """
    tiny = torch.finfo(log_p.dtype).tiny
    tails_p, tails_q = (-log_p.expm1()).clamp(min=tiny), (-log_q.expm1()).clamp(min=tiny)
    return log_p.exp() * (log_p - log_q) + tails_p * (tails_p / tails_q).log()
