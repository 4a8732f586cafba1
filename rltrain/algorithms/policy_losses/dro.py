"""Direct reward optimisation: a quadratic pull towards the old policy instead of clipping."""

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
    """Advantage times log-ratio, less a quadratic penalty; DRO, arXiv 2405.19107.

        l = -(A rho - beta/2 rho^2),    rho = log(pi(y_t) / pi_old(y_t)), clamped to [-20, 20]

    It is the paper's squared loss (A - beta rho)^2 / (2 beta) up to the constant A^2 / (2 beta): the gradient is
    -(A - beta rho) grad log pi, 0 where rho = A / beta. The paper has one term for a response, its own reward and a
    learnt value; here each token has one, with the advantage A in the place of reward minus value.

    All (B, T); masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction` (always 0), `ratio_mean`,
    `ppo_kl`.
    """
    check_positive(beta=beta)
    mask = as_mask(response_mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    losses = -(masked(advantages.detach(), mask) - beta / 2 * log_ratio) * log_ratio
    return losses, policy_metrics(log_ratio, log_ratio.detach().exp(), torch.zeros_like(mask), mask)
