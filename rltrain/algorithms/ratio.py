"""Helpers for all losses: masking that is safe for NaN and inf, clamped log-ratios, clipped ratios, and metric sums."""

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # bound of |log-ratio|; exp(20) = 4.9e8 is finite in float32 and float64


def as_float(values: Tensor) -> Tensor:
    """Return `values` in the dtype for computations: float64 stays float64, and any other dtype becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def as_mask(mask: Tensor) -> Tensor:
    """Convert a mask of bools, or of the numbers 0 and 1, to a bool tensor."""
    return mask if mask.dtype == torch.bool else mask != 0


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` as floats, with each masked slot set to 0 without gradient, even if the slot holds NaN or inf."""
    values = as_float(values)
    return torch.where(mask, values, torch.zeros_like(values))


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of each row of (B, T) over the tokens in `mask`, as (B, 1).

    The mean is 0 for a row without tokens in `mask`.
    """
    return masked(values, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def safe_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Compute log(pi / pi_old) per token (B, T), clamped to [-20, 20], and 0 in masked slots.

    Gradients flow only to `log_probs`, and only at tokens whose log-ratio before the clamp is in [-20, 20].
    """
    # The mask is applied before every non-linear operation, because a NaN in exp gives the gradient NaN * 0 = NaN.
    difference = masked(as_float(log_probs) - as_float(old_log_probs.detach()), mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_log_ratio(log_ratio: Tensor) -> Tensor:
    """Sum the log-ratios of each row, and return the sums (B, 1) without gradient.

    `log_ratio` is a result of `safe_log_ratio`. The sum of each row is clamped to [-20, 20]. The exponential of a row's
    sum is the importance ratio pi(y) / pi_old(y) of the row's whole answer y.
    """
    return log_ratio.detach().sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def safe_log_prob(log_ratio: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Compute log pi (B, T) as log pi_old + `log_ratio`, where `log_ratio` is the result of `safe_log_ratio`.

    The computed log pi is finite even where pi is 0. The computed log pi has a gradient exactly where `log_ratio` has a
    gradient.
    """
    return masked(old_log_probs.detach(), mask) + log_ratio


def k3_unbounded(log_ratio: Tensor) -> Tensor:
    """Compute e^x - 1 - x from the log-ratio x; the result is never negative.

    If tokens are sampled from q and x = log(p / q), then e^x - 1 - x is the k3 estimate of KL(q || p). The result of
    `k3_unbounded` has no upper bound, which suits metrics but not losses. For a penalty in a loss, use
    `rltrain.algorithms.kl.k3`, whose value is at most 10.
    """
    return log_ratio.expm1() - log_ratio


def check_clip_ratios(clip_ratio_low: float, clip_ratio_high: float) -> None:
    """Raise ValueError if the range of ratios [1 - low, 1 + high] does not contain 1."""
    for name, value in (("clip_ratio_low", clip_ratio_low), ("clip_ratio_high", clip_ratio_high)):
        if not value >= 0:
            raise ValueError(
                f"{name}={value} must be >= 0, because a negative value excludes the probability ratio 1 from the clip "
                "range; use 0.2, for example"
            )


def check_clip_ratio_c(clip_ratio_c: float) -> None:
    """Raise ValueError if the upper bound on ratios is not above 1, because a bound of 1 or less would clip r = 1."""
    if not clip_ratio_c > 1:
        raise ValueError(
            f"clip_ratio_c={clip_ratio_c} must be > 1, because a smaller bound would clip even the probability ratio "
            "1; use 3.0, for example, or inf for no dual clip"
        )


def check_positive(**knobs: float) -> None:
    """Raise ValueError if any of the given parameters is not a finite number above 0."""
    for name, value in knobs.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be finite and > 0; leave it out to use the default")


def clipped_ratio(
    ratio: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float, cap: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Return the clipped ratio by which PPO multiplies the advantage A, and a mask of the tokens that are clipped.

    PPO's clipped objective min(r A, clip(r, 1-low, 1+high) A) equals A min(r, 1+high) if A >= 0, and A max(r, 1-low) if
    A < 0. `clipped_ratio` treats A >= 0 and A < 0 separately instead of computing a min, so that the gradient is
    exactly 0 where the ratio is clipped. The argument `cap` is an upper bound on r where A < 0 (the dual clip). The
    mask of clipped tokens leaves out the tokens that only `cap` clips.
    """
    low, high = 1 - clip_ratio_low, 1 + clip_ratio_high
    effective = torch.where(advantages >= 0, ratio.clamp(max=high), ratio.clamp(min=low, max=cap))
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return effective, clipped


def metric_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` over the tokens in `mask`, as a detached 0-dim tensor for a metric."""
    return masked(values.detach(), mask).sum()


def policy_metrics(log_ratio: Tensor, ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the sums of the metrics `clip_fraction`, `ratio_mean` and `ppo_kl`, which every policy loss reports.

    `ppo_kl` estimates KL(pi_old || pi) by r - 1 - log r, which is never negative.

    Args:
        log_ratio: (B, T), the logarithm of each token's probability ratio, as returned by `safe_log_ratio`.
        ratio: (B, T), each token's probability ratio. The value returned as `ratio_mean` is the sum of `ratio` over the
            trained tokens, and not yet the mean.
        clipped: bool mask (B, T) of the tokens that have no gradient because of clipping. The mask leaves out the
            tokens that only the dual clip affects. If a loss clips no tokens, `clipped` is False everywhere.
        mask: bool mask (B, T) of the trained tokens.
    """
    return {
        "clip_fraction": metric_sum(clipped, mask),
        "ratio_mean": metric_sum(ratio, mask),
        "ppo_kl": metric_sum(k3_unbounded(log_ratio.detach()), mask),
    }
