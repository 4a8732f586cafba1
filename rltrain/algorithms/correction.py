"""Off-policy correction for the difference between the policy that samples and the policy that is trained."""

import math

import torch
from torch import Tensor

from rltrain.algorithms.ratio import (
    MAX_LOG_RATIO,
    as_mask,
    k3_unbounded,
    masked,
    masked_row_mean,
    metric_sum,
    safe_log_ratio,
)
from rltrain.algorithms.registry import KL_ESTIMATORS

_LEVELS = ("token", "sequence", "geometric")
_MODES = ("truncate", "mask")
_REJECTION_ESTIMATORS = ("k1", "k2", "k3", "abs")
_REJECTION_LEVELS = ("token", "sequence", "max")


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
    """Compute importance weights w = pi_old / pi_rollout and the mask of the tokens that keep their policy-loss term.

    The knob `level` defines the importance weight w of a token. At the level "token", the weight w is pi_old(y_t) /
    pi_rollout(y_t). At the level "sequence", the weight w is the product of the ratios pi_old(y_t) / pi_rollout(y_t)
    over the row's trained tokens. At the level "geometric", the weight w is the geometric mean of the ratios
    pi_old(y_t) / pi_rollout(y_t) over the row's trained tokens. The knob `mode` defines what happens to tokens whose
    importance weight w is outside of [lower, upper]:

    - truncate: the weight w is clamped to [lower, upper], and no token is dropped. With lower=0, the mode "truncate" is
      truncated importance sampling (TIS).
    - mask: tokens whose weight w is outside of [lower, upper] are dropped, and other tokens keep their weight (IcePop,
      arXiv 2510.18855). At the levels "sequence" and "geometric", all tokens of a row have the same weight w, so
      all tokens of a row are kept or all are dropped.

    A value of None for `lower` or `upper` means no bound. If `advantages` A are given, `mode="mask"` drops only tokens
    with A < 0. Tokens that have a negative advantage and are unlikely under the trained policy destabilise training. If
    the importance weight w of a token is outside of [lower, upper] but the token is not dropped, w is clamped to
    [lower, upper]. To drop tokens or rows without weighting the kept tokens, use `rollout_rejection`.

    The policy-loss term of a token is `torch.where(mask, weights * token_losses, 0)`. Aggregate the policy-loss term
    over the whole `response_mask`, so that a dropped token still counts in every denominator and keeps its KL and
    entropy terms. If half of a row's tokens are dropped, the row's policy gradient is halved, as in IcePop, which
    divides by the number |y| of all sampled tokens.

    Log-ratios are clamped to [-20, 20]. The inputs in masked slots are ignored.

    Returns:
        (weights, mask, metrics). The importance weights (B, T) are detached, and are 0 at dropped tokens and in masked
        slots. The bool mask (B, T) is True at the tokens in `response_mask` that are not dropped. Each metric is a sum
        over the trained tokens, and the caller divides the sum by the number of trained tokens. The metric
        `weight_mean` is the sum of the weights, `outside_fraction` is the number of tokens with w outside of
        [lower, upper], and `dropped_fraction` is the number of dropped tokens. The metric `rollout_kl` is the sum of
        one estimate of KL(pi_rollout || pi_old) for each token.

    Raises:
        ValueError: if `level` or `mode` is unknown, or if 0 <= lower <= 1 <= upper does not hold.
    """
    low, high = _check(level, mode, lower, upper)
    trained = as_mask(response_mask)
    log_ratio = safe_log_ratio(old_log_probs.detach(), rollout_log_probs, trained)
    ratio = _to_level(log_ratio, trained, level).exp()
    outside = trained & ((ratio < low) | (ratio > high))
    drop = outside if advantages is None else outside & (masked(advantages, trained) < 0)
    if mode == "truncate":
        drop = torch.zeros_like(outside)
    mask = trained & ~drop
    weights = masked(ratio.clamp(low, high), mask)
    metrics = {
        "weight_mean": metric_sum(weights, trained),
        "outside_fraction": metric_sum(outside, trained),
        "dropped_fraction": metric_sum(drop, trained),
        "rollout_kl": metric_sum(_divergence(log_ratio, "k3"), trained),
    }
    return weights, mask, metrics


def rollout_rejection(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None = None,
    *,
    kl_estimator: str,
    level: str,
    lower: float | None = None,
    upper: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mask of the tokens on which the policy is still close to the policy that sampled the tokens.

    The divergence at a token is an estimate of KL(pi_rollout || pi). The knob `kl_estimator` selects one of four
    estimators, which are functions of d = log pi_rollout(y_t) - log pi(y_t):

        k1 = d        k2 = d^2 / 2        k3 = e^-d - 1 + d        abs = |d|

    Tokens or rows whose divergence is outside of [lower, upper] are dropped. A value of None for `lower` or `upper`
    means no bound. The knob `level` defines which divergences are compared with the bounds, and whether tokens or rows
    are dropped:

    - token: a token is dropped if its divergence is outside of [lower, upper].
    - sequence: a row is dropped if the mean divergence of its trained tokens is outside of [lower, upper]. With the
      estimator k1, the mean divergence of a row is the log of the geometric mean of pi_rollout / pi over the row's
      trained tokens.
    - max: a row is dropped if the divergence of any of its trained tokens is outside of [lower, upper].

    If `advantages` A are given, `level="token"` drops only tokens with A < 0, and `level="sequence"` and `level="max"`
    drop only rows whose trained tokens have a mean A below 0.

    `rollout_rejection` must be called again in each update, because each update changes the policy pi. If the estimator
    is k1, the level is "sequence", and `upper` and `advantages` are given, `rollout_rejection` computes DeepSeek-V3.2's
    off-policy sequence masking (arXiv 2512.02556 eq. 9). Whether a row is dropped depends only on the tokens of the
    row. A batch may be split by rows over micro-batches and ranks, but each row must be whole.

    A dropped token loses only its policy-loss term: compute `torch.where(mask, token_losses, 0)`, and aggregate the
    result over the whole `response_mask`.

    No gradient goes to `log_probs`. The log-ratio d is clamped to [-20, 20]. The inputs in masked slots are ignored. A
    divergence that is NaN does not count as out of bounds, so that the mask does not hide the NaN from the loss.

    Returns:
        (mask, metrics). The bool mask (B, T) is True at the tokens in `response_mask` that are not dropped. Each metric
        is a sum over the trained tokens, and the caller divides the sum by the number of trained tokens. The metric
        `divergence` is the sum of the tokens' KL estimates, and `dropped_fraction` is the number of dropped tokens. At
        the level "token", the metric `outside_fraction` is the number of tokens whose divergence is outside of
        [lower, upper]. At the levels "sequence" and "max", the metric `outside_fraction` counts all trained tokens of
        each row that is out of bounds.

    Raises:
        ValueError: if `kl_estimator` or `level` is unknown, if both bounds are None, if `lower` is given for an
            estimator other than k1, or if lower <= 0 <= upper does not hold.
    """
    low, high = _check_rejection(kl_estimator, level, lower, upper)
    trained = as_mask(response_mask)
    per_token = _divergence(safe_log_ratio(log_probs.detach(), rollout_log_probs, trained), kl_estimator)
    value = masked_row_mean(per_token, trained) if level == "sequence" else per_token
    outside = trained & ((value < low) | (value > high))
    if level == "max":
        outside = outside.any(-1, keepdim=True) & trained
    drop = outside
    if advantages is not None:
        advantage = masked(advantages, trained)
        drop = outside & ((advantage if level == "token" else masked_row_mean(advantage, trained)) < 0)
    return trained & ~drop, {
        "divergence": metric_sum(per_token, trained),
        "outside_fraction": metric_sum(outside, trained),
        "dropped_fraction": metric_sum(drop, trained),
    }


def rollout_diagnostics(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Measure how far the rollout engine's probabilities of the sampled tokens are from the actor's probabilities.

    All tensors have the shape (B, T). Each returned metric is the sum of one of the following functions over the
    trained tokens. In the formulas, w = pi_old(y_t) / pi_rollout(y_t), log w is clamped to [-20, 20], and d = -log w.

    - kl: d, an estimate of KL(pi_rollout || pi_old)
    - k3: e^-d - 1 + d, another estimate of KL(pi_rollout || pi_old)
    - abs: |d|
    - weight: w
    - weight_squared: w^2, for `effective_sample_size`
    """
    mask = as_mask(response_mask)
    log_ratio = safe_log_ratio(old_log_probs.detach(), rollout_log_probs, mask)
    values = {
        name: _divergence(log_ratio, estimator) for name, estimator in (("kl", "k1"), ("k3", "k3"), ("abs", "abs"))
    }
    weight = log_ratio.exp()
    values |= {"weight": weight, "weight_squared": weight.square()}
    return {name: metric_sum(value, mask) for name, value in values.items()}


def effective_sample_size(
    weight_sum: float | Tensor, weight_squared_sum: float | Tensor, count: float | Tensor
) -> float | Tensor:
    """Compute (sum w)^2 / (count * sum w^2), the effective share of `count` weighted samples, which is in (0, 1].

    The effective share is 1 if all weights are equal (for example, if engine and actor agree) or if `count` is 0. The
    formula of the effective sample size is from Kish, Survey Sampling (1965). Each argument is a number or a 0-dim
    tensor.
    """
    if not count > 0:
        return 1.0
    share = (weight_sum / count) * (weight_sum / weight_squared_sum)
    return min(share, 1.0)  # rounding can make the effective share of samples slightly larger than 1


def _divergence(log_ratio: Tensor, kl_estimator: str) -> Tensor:
    """Compute the value of an estimator of KL(pi_rollout || pi) at each token from the log-ratio log(pi / pi_rollout).

    The KL penalty bounds k3 at 10 nats, but `_divergence` computes k3 without this bound. If k3 were bounded at 10
    nats, the values of k3 would not show how far apart two very different policies are, and a rejection threshold above
    10 nats would have no effect.
    """
    if kl_estimator == "k3":
        return k3_unbounded(log_ratio)
    values: Tensor = KL_ESTIMATORS.get(kl_estimator)(-log_ratio, torch.zeros_like(log_ratio))
    return values


def _to_level(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the log of the importance weight that `level` defines for each token, from token log-ratios (B, T).

    The log-ratios must be 0 in masked slots. The returned log of the importance weight is clamped to [-20, 20].
    """
    if level == "token":
        return log_ratio
    per_row = log_ratio.sum(-1, keepdim=True) if level == "sequence" else masked_row_mean(log_ratio, mask)
    return per_row.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(log_ratio)


def _check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; use one of: {', '.join(known)}")


def _check(level: str, mode: str, lower: float | None, upper: float | None) -> tuple[float, float]:
    _check_known("level", level, _LEVELS)
    _check_known("mode", mode, _MODES)
    low, high = 0.0 if lower is None else lower, math.inf if upper is None else upper
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"lower={lower}, upper={upper}: 0 <= lower <= 1 <= upper must hold, because otherwise even a "
            "weight of 1 would be corrected; use lower=0.5, upper=2.0, for example"
        )
    return low, high


def _check_rejection(kl_estimator: str, level: str, lower: float | None, upper: float | None) -> tuple[float, float]:
    _check_known("kl_estimator", kl_estimator, _REJECTION_ESTIMATORS)
    _check_known("level", level, _REJECTION_LEVELS)
    if lower is None and upper is None:
        raise ValueError(
            "lower=None, upper=None: one of them must be a number, or nothing is ever rejected; use upper=0.1, for "
            "example"
        )
    if lower is not None and kl_estimator != "k1":
        raise ValueError(
            f"lower={lower} with kl_estimator='{kl_estimator}': the estimator is never negative, so a lower bound has "
            "no effect; use lower=None, or kl_estimator='k1'"
        )
    low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
    if not low <= 0 <= high:
        raise ValueError(
            f"lower={lower}, upper={upper}: lower <= 0 <= upper must hold, or even an estimate of 0 would be "
            "rejected; use lower=-0.1, upper=0.1, for example"
        )
    return low, high
