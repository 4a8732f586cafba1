"""Direct reward optimisation (DRO) policy loss, in which a quadratic penalty replaces the clipping of ratios."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, check_positive, masked, policy_metrics, safe_log_ratio
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("dro")
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    beta: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute minus advantage times log-ratio, plus a quadratic penalty on the log-ratio; DRO, arXiv 2405.19107.

        l = -(A rho - beta/2 rho^2),    rho = log(pi(y_t) / pi_old(y_t)), clamped to [-20, 20]

    The loss equals the squared loss of the DRO paper, (A - beta rho)^2 / (2 beta), up to the constant A^2 / (2 beta).
    The gradient is -(A - beta rho) grad log pi, which is 0 where the log-ratio rho equals A / beta. The loss in the DRO
    paper has one term for each response, with the reward of the response and a learnt value. `dro` has one term for
    each token, with the advantage A in place of reward minus value.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The returned metric sums are
    `clip_fraction` (always 0), `ratio_mean` and `ppo_kl`.
    """
    check_positive(beta=beta)
    mask = as_mask(response_mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    losses = -(masked(advantages.detach(), mask) - beta / 2 * log_ratio) * log_ratio
    return losses, policy_metrics(log_ratio, log_ratio.detach().exp(), torch.zeros_like(mask), mask)
