"""KL-Cov policy loss, which penalises policy changes on tokens with a high covariance of log-prob and advantage.

Updates on tokens with a high covariance of log-prob and advantage would make the entropy of the policy collapse.
"""

import math

import torch
from torch import Tensor

from rltrain.algorithms.policy_losses.selection import check_share, exactly_smallest, token_covariances
from rltrain.algorithms.ratio import as_mask, masked, metric_sum, policy_metrics, safe_log_ratio
from rltrain.algorithms.registry import POLICY_LOSSES, TOKEN_SELECTORS

# The KL-Cov penalty applies only to tokens whose absolute log-ratio |log r| is above `ROUNDING` nats. Rounding makes
# the log-probs of two float32 forward passes of the same policy differ by less than `ROUNDING` nats.
ROUNDING = 1e-5


@POLICY_LOSSES.register("kl_cov", selected="penalised")
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    kl_cov_coef: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's loss without clipping, but with a penalty on selected tokens; KL-Cov, arXiv 2505.22617 eq. 14.

        l = -r A + kl_cov_coef |log r| where selected, else -r A

    r = pi(y_t) / pi_old(y_t) is the importance ratio of the sampled token y_t, and A is the token's advantage. The
    KL-Cov paper writes the penalty as KL(pi_old || pi). Like the implementation by the KL-Cov authors, `kl_cov` uses
    |log r| of the sampled token as the penalty. The penalty |log r| has the gradient sign(log r) * grad log pi. The
    penalty is 0 and has no gradient where |log r| <= 1e-5, because near r = 1 the sign of log r would depend only on
    rounding.

    All tensors have the shape (B, T), and `selected` is bool. Masked slots have loss 0 and no gradient. The returned
    metric sums are `clip_fraction` (always 0), `selected_fraction` (tokens that are penalised because they were
    selected), `ratio_mean` and `ppo_kl`.

    Raises:
        ValueError: if `kl_cov_coef` is negative or not finite.
    """
    if not 0 <= kl_cov_coef < math.inf:
        raise ValueError(
            f"kl_cov_coef={kl_cov_coef} must be finite and >= 0, or the loss rewards a distance from the old policy; "
            "use 1.0, for example"
        )
    mask = as_mask(response_mask)
    penalised = as_mask(selected)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    ratio = log_ratio.exp()
    distance = log_ratio.abs()
    losses = kl_cov_coef * masked(distance, penalised & (distance > ROUNDING)) - ratio * masked(
        advantages.detach(), mask
    )
    metrics = policy_metrics(log_ratio, ratio, torch.zeros_like(mask), mask)
    return losses, metrics | {"selected_fraction": metric_sum(penalised, mask)}


@TOKEN_SELECTORS.register("kl_cov")
def select_kl_cov(
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    random_draws: Tensor,
    *,
    kl_cov_ratio: float = 2e-3,
) -> Tensor:
    """Select the tokens with the largest covariance of log-prob and advantage; KL-Cov, arXiv 2505.22617 eq. 13.

        selected = the max(1, floor(kl_cov_ratio N)) tokens with the largest (log pi - mean log pi) (A - mean A) > 0

    N is the number of trained tokens of the whole mini-batch, log pi is a token's log-prob, and A is the token's
    advantage. The means of log pi and of A are computed over the N trained tokens. The covariance is computed with the
    log-probs of the old policy, because the tokens are selected before the update.

    At most max(1, floor(kl_cov_ratio N)) of the N trained tokens are selected, as in the KL-Cov paper. Many tokens can
    have the same covariance, for example the tokens of probability 1 in one answer. Among tokens with the same
    covariance, the selector takes the tokens with the smallest `random_draws`. The `random_draws` are uniform numbers
    that the caller assigns to tokens, not to positions in the batch, so the order of rows does not matter.

    A token whose covariance is 0 or negative is never selected, because an update on the token does not lower the
    entropy. If all advantages are equal, no token is selected. In contrast to `select_kl_cov`, the ranking in the
    KL-Cov paper selects tokens of covariance <= 0 if too few tokens have a covariance above 0.

    All tensors have the shape (B, T). Returns a bool mask (B, T), which is False in masked slots.
    """
    check_share(kl_cov_ratio=kl_cov_ratio)
    mask = as_mask(response_mask)
    covariances = token_covariances(old_log_probs, advantages, mask)
    count = max(1, int(kl_cov_ratio * int(mask.sum())))
    return exactly_smallest(-covariances, mask & (covariances > 0), count, random_draws)
