"""KL-Cov: the tokens whose covariance would collapse the entropy are held near the old policy."""

import math

import torch
from torch import Tensor

from rltrain.algorithms.policy_losses.selection import check_share, exactly_smallest, token_covariances
from rltrain.algorithms.ratio import as_mask, masked, metric_sum, policy_metrics, safe_log_ratio
from rltrain.algorithms.registry import POLICY_LOSSES, TOKEN_SELECTORS

ROUNDING = 1e-5  # log-probs of one policy differ by less than this between two forward passes in float32


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
    """The unclipped surrogate, with a penalty on selected tokens; KL-Cov, arXiv 2505.22617 eq. 14.

        l = -r A + kl_cov_coef |log r| where selected, else -r A

    r = pi(y_t) / pi_old(y_t), A advantage. The paper writes the penalty as KL(pi_old || pi); its authors' program takes
    |log r| of the sampled token, and so does this. Its gradient is the sign of log r, times grad log pi, and 0 where
    |log r| <= 1e-5: at r = 1 rounding alone would decide the sign.

    All (B, T), `selected` bool; masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction` (always 0),
    `selected_fraction` (penalised), `ratio_mean`, `ppo_kl`.
    """
    if not 0 <= kl_cov_coef < math.inf:
        raise ValueError(f"kl_cov_coef={kl_cov_coef} must be finite and >= 0, or it rewards distance; use 1.0, say")
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
    """The trained tokens of largest covariance, from a whole mini-batch; arXiv 2505.22617 eq. 13.

        selected = the floor(kl_cov_ratio N) tokens, at least 1, with the largest (log pi - mean) (A - mean) > 0

    N: trained tokens; means over them. log pi is the old policy's: selection comes before the update. Never more tokens
    are selected, as in the paper, which ranks them. Many tie with each other, such as those of probability 1 in one
    answer: of these, the ones with the smallest `random_draws` are taken, uniform numbers that the caller keys by
    token, so the order of rows does not matter. A token whose covariance is not above 0 does not lower the entropy and
    is never selected, so nothing is if all advantages are equal; the paper's ranking would take it if too few others
    were left.

    All (B, T); returns bool, False where masked.
    """
    check_share(kl_cov_ratio=kl_cov_ratio)
    mask = as_mask(response_mask)
    covariances = token_covariances(old_log_probs, advantages, mask)
    count = max(1, int(kl_cov_ratio * int(mask.sum())))
    return exactly_smallest(-covariances, mask & (covariances > 0), count, random_draws)
