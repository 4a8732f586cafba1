"""KL divergence: estimators from samples, and the KL penalty in the reward.

In the docstrings of the module `kl`, d is log pi - log pi_ref of a sampled token. The value of an estimator can
estimate one quantity while gradient descent on the estimator minimises another quantity. The docstring of each KL
estimator states the estimator's expected gradient for tokens that are sampled from pi itself.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rltrain.algorithms.ratio import MAX_LOG_RATIO, as_float, as_mask, k3_unbounded, masked, safe_log_ratio
from rltrain.algorithms.registry import KL_ESTIMATORS

# Upper bound of the KL estimate k3, in nats. The estimate k3 reaches its upper bound of 10 nats where pi is 1/14 of
# pi_ref, and where pi is 60,000 times pi_ref.
MAX_K3 = 10.0


@KL_ESTIMATORS.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute d = log pi - log pi_ref.

    The mean of k1 is the reverse KL(pi || pi_ref). The expected gradient of k1 is zero, so k1 alone is suitable for
    rewards but not for losses.
    """
    return log_probs - ref_log_probs


@KL_ESTIMATORS.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute d^2 / 2 with d = log pi - log pi_ref.

    The mean of k2 is close to the reverse KL when the reverse KL is small. The expected gradient of k2 is exactly the
    gradient of the reverse KL.
    """
    return (log_probs - ref_log_probs).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute min(e^-d - 1 + d, 10), which is never negative; GRPO (arXiv 2402.03300 eq. 4) omits the bound of 10.

    d is log pi - log pi_ref. As long as the estimate of every token is below the bound of 10 nats, the mean of k3 is
    the reverse KL, and the expected gradient of k3 is the gradient of the forward KL. The estimate k3 reaches its upper
    bound of 10 nats where d = log pi - log pi_ref is -2.6 or 11. A token whose estimate k3 is at the bound of 10 nats
    has no gradient. Without the bound of k3, a token with d = -12 would have a gradient of 1.6e5 and dominate the whole
    update.
    """
    negative = (ref_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return k3_unbounded(negative).clamp(max=MAX_K3)


@KL_ESTIMATORS.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute |d| with d = log pi - log pi_ref.

    For tokens sampled from pi, the expected gradient of |log pi - log pi_ref| is the gradient of sum |pi - pi_ref|,
    which is twice the total variation distance.
    """
    return (log_probs - ref_log_probs).abs()


def _straight_through(estimator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an estimator with the value of `estimator` and the gradient of k2, so that the reverse KL is minimised.

    In k3+, which has the value of k3 and the gradient of k2, the bound of k3 applies only to the value of the estimate,
    not to the gradient. The gradient of k2 needs no bound, because the derivative of k2 with respect to log pi is only
    d = log pi - log pi_ref, while the derivative of k3 grows exponentially with -d.
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
    """Estimate the KL divergence between pi and pi_ref at each sampled token.

    All tensors have the same shape, for example (B, T). `old_log_probs` are the log-probs of the policy that sampled
    the tokens. If `old_log_probs` is given, the estimate is multiplied by r = pi / pi_old, so that the mean of the
    multiplied estimate over samples from pi_old equals the mean of the original estimate over samples from pi.
    Gradients flow through the estimate and through the importance ratio r, except that no gradient flows through r
    where k3 or log r is clamped, or if the name of the estimator ends with "+".

    - The expected gradient of r k1 and of r k3 is exactly the gradient of the reverse KL. Without the factor r, the
      expected gradient of k1 is zero, and the expected gradient of k3 is the gradient of the forward KL. The product
      r k3 is the unbiased KL estimate of DeepSeek-V3.2, arXiv 2512.02556 eq. 7.
    - The expected gradient of r k2 is the gradient of the mean of k2 over samples from pi, and the expected gradient of
      r |d| is the gradient of the mean of |d| over samples from pi.
    - An estimator whose name ends with "+", such as k3+, already has the complete gradient of the KL, so a gradient
      through the importance ratio r would add the gradient of the KL a second time. For an estimator whose name ends
      with "+", the importance ratio r is detached and only reweights the estimate.

    The estimate k3 is clamped to at most 10 nats before it is multiplied by the importance ratio r. At a token where k3
    is clamped, the product r k3 equals 10 r, and no gradient flows through the importance ratio r. If gradient flowed
    through r at a token where k3 is clamped, gradient descent on 10 r would lower log pi even where pi is already far
    below pi_ref. The log-ratio log r is clamped to [-20, 20].

    `kl_estimate` takes no mask. At a token with a NaN or inf input, the KL estimate is NaN and has no gradient.
    `aggregate_loss` ignores a NaN in a masked slot; a NaN in a trained slot makes the loss NaN.

    Raises:
        ValueError: if `kl_estimator` is not registered.
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
    """Compute the token rewards score_t - kl_coef * kl_t, where kl_t is the KL estimate at token t.

    If `kl_estimator` is "k1", the token rewards are those of arXiv 1909.08593 eq. 2. All tensors have the shape (B, T).
    The token rewards have no gradient. Masked slots have reward 0, so with `kl_coef` 0 the rewards of a row sum to the
    row's score.
    """
    mask = as_mask(response_mask)
    kl = masked(kl_estimate(old_log_probs.detach(), ref_log_probs, kl_estimator), mask)
    return masked(token_level_scores.detach(), mask) - kl_coef * kl
