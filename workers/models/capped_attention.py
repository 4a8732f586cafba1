"""Attention with soft caps or attention sinks, which PyTorch's scaled dot-product attention does not support.

A soft cap c replaces each score s by c * tanh(s / c) (Gemma 2, arXiv:2408.00118, section 2). An attention sink is a
learnt score for each head that takes part in the softmax but has no value (gpt-oss, arXiv:2508.10925, section 2.2).
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Maximum number of scores that are computed at a time. A part is never smaller than the scores of one row and one key
# head with all its query heads.
SCORES = 2**25


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention outputs (B, H, n, D). The scores are computed in at least float32.

    Each part of the computation has at most `SCORES` scores, but at least those of one key head in one row. Scores are
    not kept for the backward pass, which computes them again.

    Args:
        query: (B, H, n, D) queries.
        key: (B, K, m, D) keys; the number K of key heads divides the number H of query heads.
        value: (B, K, m, D) values.
        bias: (B, 1, n, m) bias of the scores: 0, or minus infinity at keys that a query must ignore.
        scale: factor of the scores.
        softcap: cap of the scores, or None.
        sinks: (H,) score of each head's sink, or None.
    """
    rows, heads, queries, _ = query.shape
    copies, one = heads // key.size(1), queries * key.size(2)
    key_heads = max(1, min(key.size(1), SCORES // (one * copies)))
    per_part = max(1, SCORES // (one * copies * key_heads))
    parts = []
    for row in range(0, rows, per_part):
        some = slice(row, row + per_part)
        of_heads = []
        for head in range(0, key.size(1), key_heads):
            own, other = slice(head * copies, (head + key_heads) * copies), slice(head, head + key_heads)
            sink = None if sinks is None else sinks[own]
            arguments = query[some, own], key[some, other], value[some, other], bias[some], scale, softcap, sink
            if torch.is_grad_enabled():
                of_heads.append(checkpoint(_attention, *arguments, use_reentrant=False))
            else:
                of_heads.append(_attention(*arguments))
        parts.append(torch.cat(of_heads, 1))
    return torch.cat(parts)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    copies = query.size(1) // key.size(1)
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : key.size(2)]
    found: Tensor = weights.to(value.dtype) @ value
    return found
