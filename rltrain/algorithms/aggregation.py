"""Aggregation of token losses into a scalar loss; only this module divides a loss by a number of tokens or rows."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate_loss(
    token_losses: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    *,
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    max_response_length: int | None = None,
) -> Tensor:
    """Sum `token_losses` (B, T) over the trained tokens, and scale the sum according to `loss_agg_mode`:

        token-mean               sum_bt l_bt / num_tokens                                 DAPO, arXiv 2503.14476 eq. 8
        token-sum                sum_bt l_bt                                              no division
        seq-mean-token-sum       sum_bt l_bt / num_sequences
        seq-mean-token-mean      sum_b (sum_t l_bt / |mask_b|) / num_sequences            GRPO, arXiv 2402.03300 eq. 3
        seq-mean-token-sum-norm  sum_bt l_bt / (num_sequences * max_response_length)      Dr GRPO, arXiv 2503.20783

    `num_tokens` is the number of trained tokens of the whole mini-batch, over all micro-batches and ranks.
    `num_sequences` is the number of rows with a trained token in the whole mini-batch. If `num_tokens` and
    `num_sequences` are counted over the whole mini-batch, the losses of the micro-batches add up to the loss of the
    mini-batch, for every split into micro-batches. A count (`num_tokens` or `num_sequences`) that is None is computed
    from `response_mask`. Masked tokens, and rows with no trained token, add exactly 0 to the result. If the batch has
    no trained token, the result is 0.

    Raises:
        ValueError: if `loss_agg_mode` is unknown, or if seq-mean-token-sum-norm gets no `max_response_length` >= 1.
    """
    mask = as_mask(response_mask)
    losses = masked(token_losses, mask)
    row_tokens = mask.sum(-1)
    tokens = _count(row_tokens.sum() if num_tokens is None else num_tokens, losses)
    sequences = _count((row_tokens > 0).sum() if num_sequences is None else num_sequences, losses)
    match loss_agg_mode:
        case "token-mean":
            return losses.sum() / tokens
        case "token-sum":
            return losses.sum()
        case "seq-mean-token-sum":
            return losses.sum() / sequences
        case "seq-mean-token-mean":
            return (losses.sum(-1) / row_tokens.clamp(min=1)).sum() / sequences
        case "seq-mean-token-sum-norm":
            return losses.sum() / (sequences * _length(max_response_length))
    raise ValueError(f"loss_agg_mode={loss_agg_mode!r} is not known; use one of: {', '.join(LOSS_AGG_MODES)}")


def _count(number: int | Tensor, like: Tensor) -> Tensor:
    """Return max(number, 1) as a tensor, so that the loss of a batch without trained tokens is 0, not NaN."""
    return torch.as_tensor(number, dtype=like.dtype, device=like.device).clamp(min=1)


def _length(max_response_length: int | None) -> int:
    if max_response_length is None or max_response_length < 1:
        raise ValueError(
            f"max_response_length={max_response_length} must be >= 1, because seq-mean-token-sum-norm divides by it; "
            "pass the length limit of the responses"
        )
    return max_response_length
