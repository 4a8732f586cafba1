"""What every loss shares: masking that survives NaN and inf, the safe log-ratio, the clipped ratio, metric sums."""

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is finite in every type that we compute in


def as_float(values: Tensor) -> Tensor:
    """Return `values` in the type to compute in: float64 stays, anything else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def as_mask(mask: Tensor) -> Tensor:
    """Return a bool or 0/1 mask as bool."""
    return mask if mask.dtype == torch.bool else mask != 0


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` as floats, exactly 0 (and without gradient) where `mask` is False, whatever they hold there."""
    values = as_float(values)
    return torch.where(mask, values, torch.zeros_like(values))


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row of (B, T) over the tokens in `mask`, as (B, 1); 0 for a row that has none."""
    return masked(values, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def safe_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_old) per token (B, T), in [-20, 20], with gradient to `log_probs` inside of it only; 0 if masked."""
    # Masked before anything non-linear: a NaN that reached exp would come back as gradient NaN * 0.
    difference = masked(as_float(log_probs) - as_float(old_log_probs.detach()), mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def safe_log_prob(log_ratio: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log pi (B, T) as log pi_old + the safe log-ratio: finite also where pi is 0, with gradient where that has one."""
    return masked(old_log_probs.detach(), mask) + log_ratio


def k3_unbounded(log_ratio: Tensor) -> Tensor:
    """e^x - 1 - x, never negative: for tokens sampled from q and x = log(p / q), the k3 estimate of KL(q || p).

    It grows as e^x. A measurement wants that; a penalty that is trained on has a bound (`rltrain.algorithms.kl.k3`).
    """
    return log_ratio.expm1() - log_ratio


def check_clip_ratios(clip_ratio_low: float, clip_ratio_high: float) -> None:
    """Raise ValueError for a range of ratios [1 - low, 1 + high] that leaves out 1."""
    for name, value in (("clip_ratio_low", clip_ratio_low), ("clip_ratio_high", clip_ratio_high)):
        if not value >= 0:
            raise ValueError(f"{name}={value} must be >= 0, or the range leaves out r = 1; use 0.2, say")


def check_clip_ratio_c(clip_ratio_c: float) -> None:
    """Raise ValueError for a cap on ratios that would act at r = 1."""
    if not clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c={clip_ratio_c} must be > 1, or it acts at r = 1; use 3.0, say, or inf for none")


def check_positive(**knobs: float) -> None:
    """Raise ValueError for a knob that is not a finite number above 0."""
    for name, value in knobs.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be finite and > 0; leave it out to have the default")


def clipped_ratio(
    ratio: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float, cap: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Return the ratio that the pessimistic objective multiplies A with, and where clipping took its gradient away.

    min(r A, clip(r, 1-low, 1+high) A) is A min(r, 1+high) for A >= 0 and A max(r, 1-low) for A < 0; written so, no two
    branches tie and the gradient is exactly 0 in the clipped regions. `cap` bounds r for A < 0 (the dual clip).
    """
    low, high = 1 - clip_ratio_low, 1 + clip_ratio_high
    effective = torch.where(advantages >= 0, ratio.clamp(max=high), ratio.clamp(min=low, max=cap))
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return effective, clipped


def metric_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Detached sum over trained tokens: how every metric leaves this package (see `registry`)."""
    return masked(values.detach(), mask).sum()


def policy_metrics(log_ratio: Tensor, ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums that every ratio loss reports; `ppo_kl` estimates KL(pi_old || pi) by r - 1 - log r, never negative."""
    return {
        "clip_fraction": metric_sum(clipped, mask),
        "ratio_mean": metric_sum(ratio, mask),
        "ppo_kl": metric_sum(k3_unbounded(log_ratio.detach()), mask),
    }
