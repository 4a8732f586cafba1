"""Group sequence policy optimization (GSPO), a policy loss with one importance ratio for a whole response."""

from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_clip_ratios,
    clipped_ratio,
    masked,
    masked_row_mean,
    policy_metrics,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("gspo", aggregations=("seq-mean-token-mean", "seq-mean-token-sum"))
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the token-level form of GSPO's clipped loss with the length-normalised sequence ratio.

        l_t = -min(s_t A_t, clip(s_t, 1-low, 1+high) A_t)                      arXiv 2507.18071 eq. 13
        s_t = sg[s] pi(y_t) / sg[pi(y_t)],  s = (pi(y) / pi_old(y))^(1/|y|)    eq. 14 and 7; sg: stop-gradient

    At every token, s_t has the same value s, which is the geometric mean of the ratios of the row's trained tokens. The
    gradient of l_t is -s A_t grad log pi(y_t), and 0 where s is clipped. Every row must be complete: under sequence
    parallelism, gather the log-probs of a row before the loss is called.

    The loss is defined for the aggregations seq-mean-token-mean and seq-mean-token-sum. With seq-mean-token-mean, if
    all advantages A_t of a row are equal, the mean of l_t over the row's tokens has the same value and gradient as the
    sequence loss (eq. 5 of the GSPO paper). The aggregation seq-mean-token-sum gives the sequence loss times the length
    of the row, which is the loss of LUSPO (arXiv 2602.05261). Aggregations other than seq-mean-token-mean and
    seq-mean-token-sum weight a row by its length, and divide the loss by a number that neither the GSPO paper nor the
    LUSPO paper uses.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. `gspo` returns the metric sums
    `clip_fraction`, `ratio_mean` and `ppo_kl`.
    """
    check_clip_ratios(clip_ratio_low, clip_ratio_high)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    sequence_log_ratio = masked_row_mean(log_ratio.detach(), mask)
    ratio = (sequence_log_ratio + (log_ratio - log_ratio.detach())).exp()
    effective, clipped = clipped_ratio(ratio, advantage, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    return -advantage * effective, policy_metrics(log_ratio, ratio, clipped, mask)
