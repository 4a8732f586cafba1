"""Clip-Cov policy loss, which removes the gradient of a few tokens with a high covariance of log-prob and advantage.

Updates on tokens with a high covariance of log-prob and advantage would make the entropy of the policy collapse.
"""

import math

from torch import Tensor

from rltrain.algorithms.policy_losses.selection import check_share, smallest, token_covariances
from rltrain.algorithms.policy_losses.vanilla import vanilla
from rltrain.algorithms.ratio import as_mask, masked, metric_sum
from rltrain.algorithms.registry import POLICY_LOSSES, TOKEN_SELECTORS


@POLICY_LOSSES.register("clip_cov", selected="dropped")
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped loss on all tokens except the selected tokens; Clip-Cov, arXiv 2505.22617 eq. 12.

        l = 0 where selected, else -min(r A, clip(r, 1-low, 1+high) A)

    r = pi(y_t) / pi_old(y_t) is the importance ratio of the sampled token y_t, and A is the token's advantage. A
    selected token has no loss and no gradient, but still counts in the denominators of the aggregation. Dropping the
    selected tokens has an effect even if the policy has not changed yet (r = 1): the gradient is then the REINFORCE
    gradient of the tokens that are not selected.

    All tensors have the shape (B, T), and `selected` is bool. Masked slots have loss 0 and no gradient. `clip_cov`
    returns the metric sums `clip_fraction` (tokens whose ratio is clipped), `selected_fraction` (tokens that were
    dropped because they were selected), `ratio_mean` and `ppo_kl`.
    """
    mask = as_mask(response_mask)
    dropped = as_mask(selected)
    kept = masked(advantages, mask & ~dropped)  # a token with advantage 0 has no loss and no gradient
    bounds = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": math.inf}
    losses, metrics = vanilla(log_probs, old_log_probs, kept, mask, **bounds)
    del metrics["clip_fraction_c"]
    return losses, metrics | {"selected_fraction": metric_sum(dropped, mask)}


@TOKEN_SELECTORS.register("clip_cov")
def select_clip_cov(
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    random_draws: Tensor,
    *,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """Select a few random tokens with a high covariance of log-prob and advantage; Clip-Cov, arXiv 2505.22617 eq. 11.

        selected = floor(clip_cov_ratio N) tokens, at least 1, drawn where lb <= (log pi - mean) (A - mean) <= ub

    N is the number of trained tokens of the whole mini-batch, log pi is a token's log-prob, and A is the token's
    advantage. The means of log pi and of A are computed over the N trained tokens. Among the tokens with a covariance
    in [clip_cov_lb, clip_cov_ub], the selector takes the tokens with the smallest `random_draws`. The `random_draws`
    are uniform numbers that the caller assigns to tokens, not to positions in the batch, so the order of rows does not
    matter. If several tokens have equal random draws and tie for the last place in the selection, all tied tokens are
    selected. If no token has a covariance in [clip_cov_lb, clip_cov_ub], no token is selected.

    Unlike the implementation by the authors of Clip-Cov, the selector uses the log-probs of the old policy, because the
    selection precedes the update. Unlike the implementation by the authors of Clip-Cov, the selector can select tokens
    whose ratio PPO will clip, because the ratio is not known before the update.

    All tensors have the shape (B, T). Returns a bool mask (B, T), which is False in masked slots.

    Raises:
        ValueError: if `clip_cov_ratio` is not in (0, 1], or `clip_cov_lb` is above `clip_cov_ub`.
    """
    check_share(clip_cov_ratio=clip_cov_ratio)
    if not clip_cov_lb <= clip_cov_ub:
        raise ValueError(f"clip_cov_lb={clip_cov_lb} must be <= clip_cov_ub={clip_cov_ub}; swap the two")
    mask = as_mask(response_mask)
    covariances = token_covariances(old_log_probs, advantages, mask)
    candidates = mask & (covariances >= clip_cov_lb) & (covariances <= clip_cov_ub)
    return smallest(random_draws, candidates, max(1, int(clip_cov_ratio * int(mask.sum()))))
