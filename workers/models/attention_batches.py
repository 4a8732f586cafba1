"""Attention within the segments of a pack, computed without an attention kernel.

A pack is the segments of a prefix tree, concatenated without padding. A token attends to itself, to the earlier tokens
of its segment, and to all tokens of its segment's ancestors in the tree. Segments of similar length form an attention
batch, which is padded on the right. One call of sdpa, or of `capped_attention`, computes an attention batch.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.batch.jagged import offsets_of, ranges
from workers.models.capped_attention import capped_attention
from workers.models.varlen_attention import Bounds

# Minimum ratio of the smallest to the largest length in an attention batch.
SLACK = 0.75
# When segments with ancestors are grouped by length, lengths below SHORT count as SHORT. This gives fewer groups.
SHORT = 16


@dataclass(frozen=True)
class AttentionBatch:
    """Segments whose attention is computed together.

    Attributes:
        queries: (segments, L) position of each token among the queries, where L is the length of the longest segment
            in the attention batch.
        real: (segments, L) bool, False for entries of `queries` that are padding.
        keys: (segments, K) positions in the pack of the tokens of each segment's ancestors and then of its own tokens,
            padded on the right.
        depths: (segments,) number of tokens of each segment's ancestors.
        is_root: whether the segments are roots of the prefix tree, that is, have no ancestors.
    """

    queries: Tensor
    real: Tensor
    keys: Tensor
    depths: Tensor
    is_root: bool

    def bias(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """Return the bias to add to the scores (segments, 1, L, K): minus infinity at keys that a token must ignore.

        Args:
            dtype: dtype of the scores.
            window: maximum number of keys to which a token attends, including its own key; None for no maximum.
        """
        # A padded query gets the bias of the segment's last token, so that it attends to at least one key.
        steps = torch.arange(self.queries.size(1), device=self.queries.device)
        steps = torch.minimum(steps, self.real.sum(1, keepdim=True) - 1)
        own = (self.depths[:, None] + steps)[:, :, None]
        keys = torch.arange(self.keys.size(1), device=self.queries.device)
        ignored = keys > own if window is None else (keys > own) | (keys <= own - window)
        return torch.zeros(ignored.shape, dtype=dtype, device=ignored.device).masked_fill_(ignored, -torch.inf)[:, None]


class SegmentLayout:
    """The segments of a pack, and the tokens to which each segment attends.

    `SegmentLayout` is not a dataclass, because FSDP would copy a dataclass for each layer.

    Args:
        lengths: (S,) number of tokens in each segment, on the CPU.
        device: device on which attention is computed.
        depths: (S,) number of tokens of each segment's ancestors, on the CPU; None if no segment has ancestors.
        keys: (K,) for each segment, the positions in the pack of its ancestors' tokens and of its own tokens, on the
            CPU; None if no segment has ancestors.
        first: position in the pack of the first query. It is 0 unless the layout is a part of another one (`part`).
    """

    def __init__(
        self,
        lengths: Tensor,
        device: torch.device,
        depths: Tensor | None = None,
        keys: Tensor | None = None,
        *,
        first: int = 0,
    ) -> None:
        self.lengths, self.device, self.first = lengths, device, first
        self._biases: dict[tuple[int, torch.dtype, int | None], Tensor] = {}
        self.depths = torch.zeros_like(lengths) if keys is None or depths is None else depths
        self.keys = None if keys is None else keys.to(device)
        reach = self.lengths + self.depths
        of_queries = offsets_of(lengths).int().to(device)
        of_keys = of_queries if keys is None else offsets_of(reach).int().to(device)
        self.bounds = Bounds(of_queries, of_keys, int(lengths.max()), int(reach.max()))

    def to(self, device: torch.device) -> "SegmentLayout":
        """Return the layout for computing attention on `device`."""
        return SegmentLayout(self.lengths, device, self.depths, self.keys, first=self.first)

    def part(self, begin: int, end: int) -> "SegmentLayout":
        """Return the layout for the queries of the tokens at the positions `begin`, ..., `end - 1` of the pack.

        The queries attend to the same keys as in the whole pack. If the pack has no token at these positions, the
        layout has one query, which attends to the first token of the pack.
        """
        offsets = offsets_of(self.lengths)
        starts, ends = offsets[:-1].clamp(min=begin), offsets[1:].clamp(max=end)
        inside = starts < ends
        if not inside.any():
            one = torch.ones(1, dtype=torch.int64)
            return SegmentLayout(one, self.device, torch.zeros_like(one), torch.zeros_like(one))
        lengths, depths = (ends - starts)[inside], (self.depths + starts - offsets[:-1])[inside]
        if self.keys is None:
            keys = ranges(offsets[:-1][inside], depths + lengths)
        else:
            of_keys = offsets_of(self.lengths + self.depths)[:-1][inside]
            keys = self.keys.cpu()[ranges(of_keys, depths + lengths)]
        return SegmentLayout(lengths, self.device, depths, keys, first=begin)

    def keys_of_segments(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for all segments one after another, the keys and values (K, heads, D) to which they attend.

        Args:
            key: (N, heads, D) the keys of the pack's tokens.
            value: (N, heads, D) the values of the pack's tokens.
        """
        if self.keys is None:
            return key, value
        return key.index_select(0, self.keys), value.index_select(0, self.keys)

    @functools.cached_property
    def attention_batches(self) -> tuple[AttentionBatch, ...]:
        """Return the attention batches: groups of segments of similar length. Each group is computed together.

        The attention batches are computed on first access, because they are needed only if no attention kernel is
        usable.
        """
        roots = (self.depths == 0).nonzero()[:, 0]
        branches = (self.depths > 0).nonzero()[:, 0]
        reach = self.lengths + self.depths
        groups = [group for some in _similar(branches, self.lengths, SHORT) for group in _similar(some, reach, SHORT)]
        return (*map(self._of_roots, _similar(roots, self.lengths)), *map(self._of_branches, groups))

    @functools.cached_property
    def places(self) -> Tensor:
        """Return for each query (N,) its place among the padded queries of all attention batches."""
        queries = torch.cat([batch.queries.reshape(-1) for batch in self.attention_batches])
        real = torch.cat([batch.real.reshape(-1) for batch in self.attention_batches]).nonzero()[:, 0]
        return torch.empty_like(real).index_copy_(0, queries[real], real)

    def bias(self, number: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """Return `AttentionBatch.bias` of the attention batch with the given number.

        The bias is cached, so that all layers, which keep it until the backward pass, share one tensor.
        """
        key = number, dtype, window
        if key not in self._biases:
            self._biases[key] = self.attention_batches[number].bias(dtype, window)
        return self._biases[key]

    def _of_roots(self, chosen: Tensor) -> AttentionBatch:
        """Return the attention batch of segments that have no ancestors."""
        queries, real = _padded(self.bounds.query_offsets.cpu()[chosen], self.lengths[chosen])
        queries = queries.to(self.device)
        depths = self.depths[chosen].to(self.device)
        return AttentionBatch(queries, real.to(self.device), queries + self.first, depths, is_root=True)

    def _of_branches(self, chosen: Tensor) -> AttentionBatch:
        """Return the attention batch of segments that have ancestors."""
        queries, real = _padded(self.bounds.query_offsets.cpu()[chosen], self.lengths[chosen])
        depths = self.depths[chosen]
        places, _ = _padded(self.bounds.key_offsets.cpu()[chosen], self.lengths[chosen] + depths)
        assert self.keys is not None, "segments with ancestors need `keys`"
        return AttentionBatch(
            queries.to(self.device),
            real.to(self.device),
            self.keys.cpu()[places].to(self.device),
            depths.to(self.device),
            is_root=False,
        )


def _similar(segments: Tensor, lengths: Tensor, least: int = 1) -> list[Tensor]:
    """Divide segments into groups of similar length, the longest first. Lengths below `least` count as `least`."""
    order = segments[lengths[segments].argsort(descending=True, stable=True)]
    ordered = lengths[order].clamp(min=least)
    groups, begin = [], 0
    while begin < len(order):
        count = int((ordered[begin:] >= SLACK * int(ordered[begin])).sum())
        groups.append(order[begin : begin + count])
        begin += count
    return groups


def _padded(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ranges of the given starts and lengths as a padded index (ranges, L), and a mask of real entries."""
    steps = torch.arange(int(lengths.max()))
    real = steps < lengths[:, None]
    return torch.where(real, starts[:, None] + steps, 0), real


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile would recompile for every number of batches
def attention_in_batches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SegmentLayout,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention (N, H, D) with one call for each attention batch.

    Args:
        q: (N, H, D) queries of the pack's tokens, or of the part of the tokens that `layout` describes.
        k: (M, K, D) keys of all tokens; the number K of key heads divides the number H of query heads.
        v: (M, K, D) values of all tokens.
        layout: the segments of the queries.
        scaling: factor of the scores, or None for D ** -0.5.
        dropout: probability with which an attention weight is dropped; ignored with a soft cap or sinks.
        window: maximum number of keys to which a token attends, including its own key; None for no maximum.
        softcap: soft cap of the scores, or None.
        sinks: (H,) score of each head's attention sink, or None.
    """
    heads, outputs = q.size(1), list[Tensor]()
    for number, batch in enumerate(layout.attention_batches):
        rows, length = batch.queries.shape
        own, keys, values = (
            tensor.index_select(0, index.reshape(-1)).view(rows, -1, tensor.size(1), tensor.size(2)).transpose(1, 2)
            for tensor, index in ((q, batch.queries), (k, batch.keys), (v, batch.keys))
        )
        near = window if window is not None and window < batch.keys.size(1) else None
        capped = softcap is not None or sinks is not None
        causal = batch.is_root and near is None and not capped
        dtype = torch.promote_types(q.dtype, torch.float32) if capped else q.dtype
        bias = None if causal else layout.bias(number, dtype, near)
        if capped:
            scale = q.size(-1) ** -0.5 if scaling is None else scaling
            assert bias is not None, "attention with soft caps or sinks is causal through its bias"
            attended = capped_attention(own, keys, values, bias, scale=scale, softcap=softcap, sinks=sinks)
        else:
            attended = _sdpa(own, keys, values, bias, scaling, dropout)
        outputs.append(attended.transpose(1, 2).reshape(rows * length, heads, -1))
    return torch.cat(outputs).index_select(0, layout.places)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """Return attention outputs (B, H, n, D). Without a bias, each token attends to itself and all earlier tokens."""
    copies = query.size(1) // key.size(1)
    # On CUDA, sdpa in float32 would materialize all attention scores if query heads shared key heads, so the key heads
    # are repeated.
    if query.is_cuda and copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        is_causal=bias is None,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=key.size(1) != query.size(1),
    )
