"""KL divergence: estimators from samples, and the penalty inside the reward.

Write d = log pi - log pi_ref for a sampled token. What an estimator's value estimates and what its gradient does
are different things; each docstring says what the expected gradient is when tokens are sampled from pi itself.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rltrain.algorithms.ratio import MAX_LOG_RATIO, as_float, as_mask, k3_unbounded, masked, safe_log_ratio
from rltrain.algorithms.registry import KL_ESTIMATORS

MAX_K3 = 10.0  # nats; k3 passes it where pi is 14 times below the reference, or 60,000 times above it


@KL_ESTIMATORS.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d. Mean: reverse KL(pi || pi_ref). Expected gradient: zero, so alone it is for rewards, not for losses."""
    return log_probs - ref_log_probs


@KL_ESTIMATORS.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d^2 / 2. Mean: near the reverse KL when it is small. Expected gradient: exactly that of the reverse KL."""
    return (log_probs - ref_log_probs).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """min(e^-d - 1 + d, 10), never negative (GRPO, arXiv 2402.03300 eq. 4, without the bound).

    Mean: reverse KL. Expected gradient: forward KL's. Both hold while every token is below the bound of 10 nats, which
    is reached at d = -2.6 and at d = 11. A token at the bound has no gradient: without it a token at d = -12 would have
    one of 1.6e5, and decide the whole update.
    """
    negative = (ref_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return k3_unbounded(negative).clamp(max=MAX_K3)


@KL_ESTIMATORS.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|d|. Expected gradient: that of sum |pi - pi_ref|, twice the total variation distance."""
    return (log_probs - ref_log_probs).abs()


def _straight_through(estimator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Value of `estimator`, gradient of k2: whatever is reported, what is minimised is the reverse KL.

    k3+ has the bound of k3 on its value alone: the gradient of k2 is d, which needs no bound.
    """

    @functools.wraps(estimator)
    def with_gradient_of_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        surrogate = k2(log_probs, ref_log_probs)
        return estimator(log_probs, ref_log_probs).detach() + (surrogate - surrogate.detach())

    return with_gradient_of_k2


for _name in KL_ESTIMATORS.names():
    KL_ESTIMATORS.register(f"{_name}+")(_straight_through(KL_ESTIMATORS.get(_name)))


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kl_estimator: str, *, old_log_probs: Tensor | None = None
) -> Tensor:
    """Estimate the KL divergence from pi_ref at each sampled token: (B, T), or any one shape.

    With `old_log_probs`, the policy that sampled, the estimate is times r = pi / pi_old, which makes its mean that of
    samples from pi. Gradient flows through r as well: r k1 and r k3 have exactly the gradient of the reverse KL (that r
    is what k1 and k3 lack without it; r k3 is DeepSeek-V3.2's unbiased estimate, arXiv 2512.02556 eq. 7); r k2 and
    r abs that of the mean of k2 and abs under pi. A "+" form already has the whole gradient, so there r only reweights
    and is detached: through both it would count twice.

    A token at the bound of k3 has no gradient through r either: r times a constant would drive log pi further away
    from the reference. The bound is on k3; r, with its log in [-20, 20], multiplies what comes out of it.

    There is no mask here: where an input is NaN or inf the result is NaN and no gradient goes back, so that
    `aggregate_loss` drops it in masked slots and it stays visible in trained ones.
    """
    try:
        estimator = KL_ESTIMATORS.get(kl_estimator)
    except KeyError as error:
        raise ValueError(f"kl_estimator={kl_estimator!r}: {error.args[0]}") from None
    new, ref = as_float(log_probs), as_float(ref_log_probs.detach())
    old = new.detach() if old_log_probs is None else as_float(old_log_probs)
    finite = new.isfinite() & ref.isfinite() & old.isfinite()
    estimate = estimator(masked(new, finite), masked(ref, finite))
    if old_log_probs is not None:
        ratio = safe_log_ratio(new, old, finite).exp()
        fixed = (estimate >= MAX_K3) if kl_estimator == "k3" else torch.full_like(finite, kl_estimator.endswith("+"))
        estimate = estimate * torch.where(fixed, ratio.detach(), ratio)
    return torch.where(finite, estimate, torch.full_like(estimate, math.nan))


def apply_kl_in_reward(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float | Tensor,
    kl_estimator: str,
) -> Tensor:
    """Token rewards s_t - kl_coef * kl_t, no gradient; arXiv 1909.08593 eq. 2 with `kl_estimator` = "k1".

    All (B, T). A masked slot has reward 0, so with `kl_coef` 0 the rewards of a row sum to its score.
    """
    mask = as_mask(response_mask)
    kl = masked(kl_estimate(old_log_probs.detach(), ref_log_probs, kl_estimator), mask)
    return masked(token_level_scores.detach(), mask) - kl_coef * kl
