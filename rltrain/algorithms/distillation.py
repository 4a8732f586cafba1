"""Distillation on the policy's own answers: the reverse KL from the policy to a teacher, as an advantage or as a loss.

The policy samples an answer, and a teacher scores the tokens of the answer. Training with `distilled_advantages` or
with `sampled_teacher_kl` lowers the reverse KL divergence KL(pi || pi_T) at each token, averaged over the contexts that
the policy visits. The functions of `rltrain.algorithms.distillation` need only the log-probs of the sampled tokens,
whereas `rltrain.algorithms.full_kl` computes the exact divergence over the vocabulary.
"""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask, masked, safe_log_ratio


def distilled_advantages(
    advantages: Tensor,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    taught: Tensor,
    *,
    coef: float = 1.0,
    outcome_coef: float = 1.0,
) -> Tensor:
    """Add the log-ratio of teacher to policy to the advantages (MOPD of MiMo-V2-Flash, arXiv 2601.02780 eqs. 8 and 9).

        A_t = coef log(pi_T(y_t) / pi_old(y_t)) + outcome_coef A_outcome,t

    pi_old is the policy before the update, pi_T is the teacher, and A_outcome is the advantage that was estimated from
    the rewards (`outcome_coef` is alpha in arXiv 2601.02780). If the loss is -A log pi and pi equals pi_old, the
    log-ratio term of A changes the expected gradient of the loss by `coef` times the gradient of KL(pi || pi_T) in the
    visited contexts (eq. 6).

    All tensors have the shape (B, T). `taught` is True at the tokens of answers that a teacher has scored. At all
    tokens that are not `taught`, the log-ratio term of A_t is exactly 0, whatever `teacher_log_probs` holds. The
    log-ratio log(pi_T / pi_old) is clamped to [-20, 20]. The returned advantages have no gradient.
    """
    log_ratio = safe_log_ratio(teacher_log_probs.detach(), old_log_probs, as_mask(taught))
    return outcome_coef * as_float(advantages.detach()) + coef * log_ratio


def sampled_teacher_kl(log_probs: Tensor, old_log_probs: Tensor, teacher_log_probs: Tensor, taught: Tensor) -> Tensor:
    """Estimate the reverse KL(pi || pi_T) and its gradient from the sampled tokens: (B, T).

        l_t = r_t d_t,   d_t = log(pi(y_t) / pi_T(y_t)),   r_t = pi(y_t) / pi_old(y_t)
        grad l_t = r_t d_t grad log pi(y_t)

    For tokens that were sampled from pi_old, the mean of the estimates l_t is the reverse KL divergence, and the mean
    of the gradients grad l_t is the gradient of the reverse KL divergence (arXiv 2601.02780 eqs. 5 and 6). The
    importance ratio r_t is 1 in the first optimizer step on the answers. The log-ratios d_t and log r_t are clamped to
    [-20, 20], both in the value of l_t and in its gradient.

    `taught` is True at the tokens of answers that a teacher has scored. At all tokens that are not `taught`, the
    estimate is exactly 0 and has no gradient, whatever the log-probs are.
    """
    mask = as_mask(taught)
    now = masked(log_probs, mask)
    difference = safe_log_ratio(now.detach(), teacher_log_probs, mask)
    weight = safe_log_ratio(now.detach(), old_log_probs, mask).exp() * difference
    # `now` holds the policy's log-probs of the sampled tokens. The difference `now - now.detach()` has the value 0 and
    # the gradient of `now`, so the term `weight * (now - now.detach())` changes only the gradient of the result, not
    # its value.
    return torch.where(mask, weight + weight * (now - now.detach()), 0)
