"""Clip-Cov: a few tokens whose covariance would collapse the entropy get no gradient."""

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
    """PPO's clipped loss, without the selected tokens; Clip-Cov, arXiv 2505.22617 eq. 12.

        l = 0 where selected, else -min(r A, clip(r, 1-low, 1+high) A)

    r = pi(y_t) / pi_old(y_t), A advantage. A selected token has neither loss nor gradient, and stays in the
    denominators. It acts at r = 1 already: the gradient at the old policy is REINFORCE of the other tokens.

    All (B, T), `selected` bool; masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction` (clipped by
    ratio), `selected_fraction` (dropped), `ratio_mean`, `ppo_kl`.
    """
    mask = as_mask(response_mask)
    dropped = as_mask(selected)
    kept = masked(advantages, mask & ~dropped)  # a token of advantage 0 has no loss and no gradient
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
    """A random few of the trained tokens whose covariance is high, from a whole mini-batch; arXiv 2505.22617 eq. 11.

        selected = floor(clip_cov_ratio N) tokens, at least 1, drawn of lb <= (log pi - mean) (A - mean) <= ub

    N: trained tokens; means over them. Drawn are those with the smallest `random_draws`, uniform numbers that the
    caller keys by token, so the order of rows does not matter; draws that tie with the last are in. Nothing is selected
    where no token lies in the range. Two differences from the authors' program: log pi is the old policy's, since
    selection comes before the update, and tokens that the ratio clips are not left out, for they are unknown by then.

    All (B, T); returns bool, False where masked.
    """
    check_share(clip_cov_ratio=clip_cov_ratio)
    if not clip_cov_lb <= clip_cov_ub:
        raise ValueError(f"clip_cov_lb={clip_cov_lb} must be <= clip_cov_ub={clip_cov_ub}; swap the two")
    mask = as_mask(response_mask)
    covariances = token_covariances(old_log_probs, advantages, mask)
    candidates = mask & (covariances >= clip_cov_lb) & (covariances <= clip_cov_ub)
    return smallest(random_draws, candidates, max(1, int(clip_cov_ratio * int(mask.sum()))))
