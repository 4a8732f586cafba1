"""The plain policy gradient, registered as REINFORCE and as group policy gradient (GPG)."""

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
    """Compute minus advantage times log-probability, independent of the old policy.

        l = -A log pi(y_t)                     REINFORCE, Williams 1992; for language models arXiv 2402.14740
                                               GPG, arXiv 2504.02546: the same loss with the "gpg" advantage estimator

    A is the advantage, and r = pi / pi_old is the ratio of the current to the old probability. The loss computes log pi
    as log pi_old + log r, where the log-ratio log r is clamped to [-20, 20]. Because the log-ratio is clamped, the loss
    is finite even where pi is 0. The gradient is -A grad log pi at tokens whose log-ratio is in [-20, 20], and 0 at all
    other tokens. `old_log_probs` is used only to clamp the log-ratio and to compute metrics.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The returned metric sums are
    `clip_fraction` (always 0), `ratio_mean` and `ppo_kl`.
    """
    mask = as_mask(response_mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    losses = -masked(advantages.detach(), mask) * safe_log_prob(log_ratio, old_log_probs, mask)
    return losses, policy_metrics(log_ratio, log_ratio.detach().exp(), torch.zeros_like(mask), mask)
