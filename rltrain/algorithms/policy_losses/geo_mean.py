"""Policy loss of GMPO, which clips token ratios in log space and takes their geometric mean over a response."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import (
    as_mask,
    check_clip_ratios,
    masked,
    masked_row_mean,
    policy_metrics,
    safe_log_ratio,
)
from rltrain.algorithms.registry import POLICY_LOSSES


@POLICY_LOSSES.register("geo_mean", aggregations=("seq-mean-token-mean",))
def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the token-level form of GMPO's loss with a geometric mean of clipped token ratios; arXiv 2507.20673.

        L = -A exp(1/|y| sum_t c_t),    c_t = min(log r_t, high) where A >= 0, max(log r_t, -low) where A < 0
        l_t = -s_t A_t,  s_t = exp(sg[1/|y| sum_k c_k] + c_t - sg[c_t])        sg: stop-gradient

    r_t = pi(y_t) / pi_old(y_t) is the ratio of the token y_t, A_t is the token's advantage, and |y| is the number
    of trained tokens in the row. `clip_ratio_low` and `clip_ratio_high` bound the log-ratio, so 0.4 means a clip
    range of (e^-0.4, e^0.4) for the ratio. At every token of a row, s_t has the same value s, which is the
    geometric mean of the row's clipped ratios. The gradient of the token's loss l_t is -s A_t grad log pi(y_t) at a
    token that is not clipped, and 0 at a clipped token. Clipping a token does not remove the gradient of other
    tokens. Under sequence parallelism, the caller must gather the log-probs of a whole row before calling
    `geo_mean`, because the geometric mean s covers all trained tokens of the row.

    The loss is defined for the aggregation seq-mean-token-mean. If all tokens of a row have the same advantage, the
    mean of the token losses l_t over the row has the same value and gradient as the sequence loss L of the GMPO paper.
    With an aggregation other than seq-mean-token-mean, longer rows have a larger weight in the loss, whereas all rows
    have the same weight in the GMPO paper.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. The returned metric sums are
    `clip_fraction`, `ratio_mean` (of the geometric mean s of the clipped ratios, not of the token ratios r_t) and
    `ppo_kl`.
    """
    check_clip_ratios(clip_ratio_low, clip_ratio_high)
    mask = as_mask(response_mask)
    advantage = masked(advantages.detach(), mask)
    log_ratio = safe_log_ratio(log_probs, old_log_probs, mask)
    kept = torch.where(advantage >= 0, log_ratio.clamp(max=clip_ratio_high), log_ratio.clamp(min=-clip_ratio_low))
    ratio = (masked_row_mean(kept.detach(), mask) + (kept - kept.detach())).exp()
    clipped = (kept != log_ratio) & (advantage != 0)
    return -advantage * ratio, policy_metrics(log_ratio, ratio, clipped, mask)
