"""Policy loss of GRPO-S, which clips one importance ratio per response: the arithmetic mean of its token ratios."""

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


@POLICY_LOSSES.register("mean_ratio", aggregations=("seq-mean-token-mean",))
def mean_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the token-level form of GRPO-S's clipped loss with the mean ratio of a response; arXiv 2508.04349.

        L = -min(w A, clip(w, 1-low, 1+high) A),    w = 1/|y| sum_t r_t
        l_t = -min(w_t A_t, clip(w_t, 1-low, 1+high) A_t),  w_t = sg[w] + r_t - sg[r_t]        sg: stop-gradient

    r_t = pi(y_t) / pi_old(y_t) is the ratio of the token y_t, A_t is the token's advantage, and |y| is the number
    of trained tokens in the row. At every token of a row, w_t has the same value w, which is the arithmetic mean of the
    row's token ratios. The gradient of l_t is -r_t A_t grad log pi(y_t), and 0 where w is clipped. No single token is
    clipped. Every row must be complete: under sequence parallelism, gather the log-probs of a row before the loss is
    called.

    The loss is defined for the aggregation seq-mean-token-mean. If all tokens of a row have the same advantage, the
    mean of the token losses l_t over the row has the same value and gradient as the sequence loss L of the GRPO-S
    paper. With other aggregations, the weight of a row is proportional to its length.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The returned metric sums are
    `clip_fraction`, `ratio_mean` (of the mean ratio w) and `ppo_kl`.
    """
    check_clip_ratios(clip_ratio_low, clip_ratio_high)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    of_token = log_ratio.exp()
    ratio = masked_row_mean(of_token.detach(), mask) + (of_token - of_token.detach())
    effective, clipped = clipped_ratio(ratio, advantage, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    return -advantage * effective, policy_metrics(log_ratio, ratio, clipped, mask)
