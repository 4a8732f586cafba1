"""Divergence PPO (DPPO) policy loss with the binary total variation."""

from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_clip_ratio_c,
    masked,
    metric_sum,
    policy_metrics,
    safe_log_prob,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    clip_ratio_c: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the DPPO policy loss (arXiv 2602.04879): REINFORCE, weighted by a capped importance ratio.

    A token is dropped (m = 0) if its advantage is positive and its probability has risen too far, or if its advantage
    is negative and its probability has fallen too far:

        l = -A sg[min(r, c)] log pi(y_t) m                        sg: stop-gradient
        m = 0 where A > 0 and pi - pi_old > delta_high, or A < 0 and pi - pi_old < -delta_low; else 1

    The importance ratio of the sampled token y_t is r = pi(y_t) / pi_old(y_t). A is the advantage, and the cap of the
    ratio is c = `clip_ratio_c` > 1 (inf for no cap). The difference |pi - pi_old| is the total variation between the
    binary distributions that only distinguish the sampled token y_t from all other tokens. A token is never dropped if
    its probability rose although its advantage is negative, or fell although its advantage is positive.

    `dppo_tv` computes log pi as log pi_old + log r, with the log ratio log r clamped to [-20, 20]. The gradient is 0
    where the log ratio is outside of [-20, 20]. Probabilities above 1, which rounding can cause, are clamped to 1.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. `dppo_tv` returns the metric sums
    `clip_fraction` (dropped tokens), `weight_clip_fraction` (tokens that are not dropped and whose ratio exceeds
    `clip_ratio_c`), `ratio_mean` and `ppo_kl`.
    """
    check_deltas(delta_low, delta_high)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    log_pi, log_pi_old = log_probabilities(log_ratio, old_log_probs, mask)
    moved = log_pi.exp() - log_pi_old.exp()
    far = ((advantage > 0) & (moved > delta_high)) | ((advantage < 0) & (moved < -delta_low))
    return dropping_loss(log_ratio, old_log_probs, advantage, mask, far=far, clip_ratio_c=clip_ratio_c)


def check_deltas(delta_low: float, delta_high: float) -> None:
    """Raise ValueError if `delta_low` or `delta_high` is negative, because tokens would be dropped even at r = 1."""
    for name, value in (("delta_low", delta_low), ("delta_high", delta_high)):
        if not value >= 0:
            raise ValueError(f"{name}={value} must be >= 0, or tokens are dropped even at r = 1; use 0.1, for example")


def log_probabilities(log_ratio: Tensor, old_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log pi and log pi_old without gradient, clamped to at most 0 because rounding can make them positive."""
    old = masked(old_log_probs.detach(), mask)
    return (old + log_ratio.detach()).clamp(max=0), old.clamp(max=0)


def dropping_loss(
    log_ratio: Tensor, old_log_probs: Tensor, advantage: Tensor, mask: Tensor, *, far: Tensor, clip_ratio_c: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token losses -A sg[min(r, c)] log pi, with the symbols of `dppo_tv`, and the metrics.

    `far` (B, T) marks the dropped tokens, whose loss is exactly 0 and has no gradient.
    """
    check_clip_ratio_c(clip_ratio_c)
    ratio = log_ratio.detach().exp()
    weight = masked(advantage * ratio.clamp(max=clip_ratio_c), ~far)
    metrics = policy_metrics(log_ratio, ratio, far, mask)
    metrics["weight_clip_fraction"] = metric_sum((ratio > clip_ratio_c) & ~far, mask)
    return -weight * safe_log_prob(log_ratio, old_log_probs, mask), metrics
