"""Off-policy correction: the engine that sampled is not quite the model that is trained."""

import math

import torch
from torch import Tensor

from rltrain.algorithms.ratio import MAX_LOG_RATIO, as_mask, masked, masked_row_mean, metric_sum, safe_log_ratio

_LEVELS = ("token", "sequence", "geometric")
_MODES = ("truncate", "mask", "reject")


def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None = None,
    *,
    level: str,
    mode: str,
    lower: float | None,
    upper: float | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Importance weights w = pi_old / pi_rollout and the tokens that may train: (weights, mask, metrics).

    `level` says what w is: "token" pi_old(y_t) / pi_rollout(y_t); "sequence" the product over the row's trained tokens;
    "geometric" the |y|-th root of that product. `mode` says what happens outside [lower, upper]:

        truncate  w is clamped to the bounds and everything trains; lower=0 for TIS (truncated importance sampling)
        mask      what lies outside does not train; what lies inside trains with weight w (IcePop)
        reject    the row does not train if its w, or at level "token" any of its tokens' w, lies outside; weights are 1

    None as a bound means none. With `advantages`, mask and reject drop only where A < 0 (bad samples that the trainer
    finds unlikely are what destabilises); what is kept then still has w clamped to the bounds.

    weights (B, T), detached: multiply `token_losses`. mask (B, T) bool: replaces `response_mask` before anything is
    counted. Outside of the mask weights are 0. Log-ratios are clamped to [-20, 20]. Masked slots are ignored.
    Metrics, as sums over `response_mask`: `weight_mean`, `outside_fraction`, `dropped_fraction` and `rollout_kl`, which
    estimates KL(pi_rollout || pi_old).
    """
    low, high = _check(level, mode, lower, upper)
    trained = as_mask(response_mask)
    log_ratio = safe_log_ratio(old_log_probs.detach(), rollout_log_probs, trained)
    ratio = _to_level(log_ratio, trained, level).exp()
    outside = trained & ((ratio < low) | (ratio > high))
    drop = outside if advantages is None else outside & (masked(advantages, trained) < 0)
    if mode == "truncate":
        drop = torch.zeros_like(outside)
    elif mode == "reject":
        drop = drop.any(-1, keepdim=True).expand_as(drop)
    mask = trained & ~drop
    weights = masked(torch.ones_like(ratio) if mode == "reject" else ratio.clamp(low, high), mask)
    metrics = {
        "weight_mean": metric_sum(weights, trained),
        "outside_fraction": metric_sum(outside, trained),
        "dropped_fraction": metric_sum(drop, trained),
        "rollout_kl": metric_sum(log_ratio.expm1() - log_ratio, trained),
    }
    return weights, mask, metrics


def _to_level(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Token log-ratios (B, T), 0 where masked, to those of the level, in [-20, 20] again."""
    if level == "token":
        return log_ratio
    per_row = log_ratio.sum(-1, keepdim=True) if level == "sequence" else masked_row_mean(log_ratio, mask)
    return per_row.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(log_ratio)


def _check(level: str, mode: str, lower: float | None, upper: float | None) -> tuple[float, float]:
    for name, value, known in (("level", level, _LEVELS), ("mode", mode, _MODES)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known; use one of: {', '.join(known)}")
    low, high = 0.0 if lower is None else lower, math.inf if upper is None else upper
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"lower={lower}, upper={upper}: 0 <= lower <= 1 <= upper must hold, or data that agree "
            "perfectly would be corrected; lower=0.5, upper=2.0, say"
        )
    return low, high
