"""M2PO policy loss: a limit on the second moment of log importance weights, for answers sampled by older policies."""

import torch
from torch import Tensor

from rltrain.algorithms.policy_losses.clip_cov import clip_cov
from rltrain.algorithms.ratio import as_mask, check_positive, masked, safe_log_ratio
from rltrain.algorithms.registry import POLICY_LOSSES, TOKEN_SELECTORS


@POLICY_LOSSES.register("m2po", selected="dropped")
def m2po(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped loss on all tokens except those that the token selector drops; M2PO, arXiv 2510.01161.

        l = 0 where selected, else -min(r A, clip(r, 1-low, 1+high) A)

    The losses `m2po` and `clip_cov` compute the same formula, and differ only in their token selectors. The
    ratio r is pi(y_t) / pi_old(y_t), and A is the advantage. The policy pi_old is the actor's policy before the update,
    not the policy that sampled the answer. The M2PO paper has one ratio, pi(y_t) / pi_rollout(y_t), and no clipping.
    The ratio of the M2PO paper is r times pi_old / pi_rollout, and pi_old / pi_rollout is the weight of
    `algorithm.correction` at level token. If `algorithm.correction` is used at level token, the loss l is multiplied by
    the correction weight. The product of r and the correction weight is then the ratio of the M2PO paper, except where
    pi_old / pi_rollout is outside of the correction's bounds.

    The tokens are selected before the update, so the selection limits only the distance from the sampling policy to
    pi_old. The clip range limits how far the update moves the policy away from pi_old. Like `m2po`, AReaL's
    implementation of M2PO limits two distances separately: the distance from the sampling policy to pi_old, and the
    distance from pi_old to the current policy. In the first mini-batch after pi_old is recomputed, r is 1 and the clip
    has no effect.

    A token that the selector drops has no loss and no gradient. As in the M2PO paper, a dropped token still counts in
    the denominators of the loss aggregation. All tensors have the shape (B, T), and `selected` is the bool mask of
    the dropped tokens. Masked slots have loss 0 and no gradient. The returned metric sums are `clip_fraction` (number
    of tokens whose ratio is clipped), `selected_fraction` (number of dropped tokens), `ratio_mean` and `ppo_kl`.
    """
    ranges = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
    return clip_cov(log_probs, old_log_probs, advantages, response_mask, selected, **ranges)


@TOKEN_SELECTORS.register("m2po")
def select_m2po(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    m2_threshold: float = 0.04,
) -> Tensor:
    """Select tokens to drop, to limit the second moment of the log-ratios; M2PO, arXiv 2510.01161.

        x_t         =  log(pi_old(y_t) / pi_rollout(y_t))
        candidates  =  the tokens with A_t x_t > 0
        selected    =  the candidates with the largest x_t^2, as few as possible, such that the mean of x_t^2 over the
                       candidates that are not selected is at most m2_threshold

    A candidate for dropping is a token whose probability has already moved in the direction of its advantage. PPO's
    clipping, too, affects only tokens whose probability has moved in the direction of their advantage. A token whose
    probability has not moved in the direction of its advantage is never dropped. The mean of the squared log-ratios
    x_t^2 is computed over the candidates for dropping in the whole mini-batch. If even the smallest squared log-ratio
    x_t^2 of the candidates is above `m2_threshold`, all candidates are dropped. A candidate whose squared log-ratio
    x_t^2 equals that of a dropped token is dropped, too, so the order of rows does not matter.

    The selector runs once before the update, so the log-ratio x_t compares the policy before the update, pi_old, with
    the policy that sampled the tokens. In the M2PO paper, the log-ratio x_t compares the current policy with the
    sampling policy. The current policy equals pi_old in the first mini-batch after pi_old is recomputed. In a
    synchronous run, the log-ratio x_t is 0 except for numerical differences between the log-probs of the engine and of
    the actor, so few tokens are dropped.

    All tensors have the shape (B, T). Returns the bool mask (B, T) of the tokens to drop, which is False in masked
    slots.

    Raises:
        ValueError: if `m2_threshold` is not finite and positive.
    """
    check_positive(m2_threshold=m2_threshold)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(old_log_probs.detach(), rollout_log_probs, mask)
    candidates = advantage * log_ratio > 0
    squares = log_ratio.square()
    ordered = squares[candidates].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = int((means <= m2_threshold).sum())
    if kept == len(ordered):
        return candidates & False
    return candidates & (squares >= ordered[kept])
