"""The plain policy gradient, as REINFORCE and as group policy gradient."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked, policy_metrics, safe_log_prob, safe_log_ratio
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("gpg", uses_ratio=False)
@POLICY_LOSSES.register("reinforce", uses_ratio=False)
def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus advantage times log-probability, whatever the old policy was.

        l = -A log pi(y_t)                     REINFORCE, Williams 1992; for language models arXiv 2402.14740
                                               GPG, arXiv 2504.02546: the same, with advantages of its own estimator

    A: advantage. log pi is written log pi_old + log r, with log r clamped to [-20, 20]: the value is finite where pi is
    0, and the gradient is -A grad log pi inside the clamp and 0 beyond it. `old_log_probs` serve for that, and for the
    metrics, only.

    All (B, T); masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction` (always 0), `ratio_mean`,
    `ppo_kl`.
    """
    mask = as_mask(response_mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    losses = -masked(advantages.detach(), mask) * safe_log_prob(log_ratio, old_log_probs, mask)
    return losses, policy_metrics(log_ratio, log_ratio.detach().exp(), torch.zeros_like(mask), mask)
