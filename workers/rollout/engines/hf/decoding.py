"""The batch that the transformers engine decodes: unfinished answers and their key-value cache."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rltrain.batch.token_arrays import INT16, NOT_RECORDED
from workers.models.capped_attention import capped_attention
from workers.rollout.messages import Completion, Request
from workers.rollout.stop_strings import StopStrings

GROUPED = "rltrain_grouped"
ROOM = 32  # Number of spare columns (token positions) that a key-value cache gets when it grows.


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the same attention as transformers' `sdpa` function, without copying keys and values in a decoding step.

    If each row has one query (Q = 1), the query heads that share a key head are treated as several queries of one head,
    and no causal mask is needed.

    Soft caps and attention sinks, which `sdpa` ignores, are supported. In a decoding step (Q = 1), sliding windows are
    applied by cutting off keys, so `attention_mask` need not contain them.

    Shapes: query (B, H, Q, D), key and value (B, K, W, D), where K divides H. The returned attention output has the
        shape (B, Q, H, D).
    """
    batch, heads, queries, width = query.shape
    window = options.get("sliding_window")
    if queries == 1 and window is not None:
        # All rows end in the same column, so the window of the last token consists of the last columns. The mask of
        # `Batch.mask`, which all layers share, contains no windows.
        key, value = key[:, :, -window:], value[:, :, -window:]
        attention_mask = None if attention_mask is None else attention_mask[..., -window:]
    softcap, sinks, scale = options.get("softcap"), options.get("s_aux"), options.get("scaling")
    if softcap is not None or sinks is not None:
        bias = _bias(attention_mask, queries, key.size(2), query).expand(batch, -1, -1, -1)
        scale = width**-0.5 if scale is None else scale
        out = capped_attention(query, key, value, bias, scale=scale, softcap=softcap, sinks=sinks)
        return out.transpose(1, 2).contiguous(), None
    one_mask = attention_mask is None or attention_mask.size(1) == 1
    if queries > 1 or not one_mask or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    shared = query.reshape(batch, key.size(1), heads // key.size(1), -1)
    out = F.scaled_dot_product_attention(shared, key, value, attn_mask=attention_mask, scale=scale)
    return out.reshape(batch, 1, heads, -1), None


def _bias(mask: Tensor | None, queries: int, keys: int, like: Tensor) -> Tensor:
    """Return the bias to add to attention scores (B, 1, Q, W): a very low number at keys that a query must ignore.

    Args:
        mask: (B, 1, Q, W), True or 0 where a query attends to a key. None: attention is causal, and the queries are
            the last Q of the W tokens.
        queries: number Q of queries.
        keys: number W of keys.
        like: tensor with the dtype and device of the result.
    """
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
    if mask.dtype != torch.bool:
        return mask
    # The query of a padding token must ignore all keys. With minus infinity at all keys, its output would be NaN. The
    # bias is therefore the lowest finite number.
    least = torch.finfo(like.dtype).min
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, least)


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class RoomyLayer(DynamicLayer):
    """Cache of one layer's keys and values (B, K, W, D), with spare columns on the right for new tokens.

    The base class `DynamicLayer` of transformers copies the whole cache each time a token is added. `RoomyLayer`
    instead writes the keys and values of a new token into a spare column of the cache.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens on the right.

        Return the keys and values of all tokens in the cache.
        """
        width = self.get_seq_length()
        end = width + key_states.size(2)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.stores = [key_states, value_states]
        else:
            if end > self.stores[0].size(2):
                self.stores = [F.pad(store[:, :, :width], (0, 0, 0, end - width + ROOM)) for store in self.stores]
            for store, states in zip(self.stores, (key_states, value_states), strict=True):
                store[:, :, width:end] = states
        return self._use(end)

    def batch_select_indices(self, indices: Tensor, first: int = 0) -> None:
        """Keep only the rows at `indices`, in the order of `indices`.

        Drop the columns to the left of column `first`.
        """
        width = self.get_seq_length() - first
        self.stores = [store[:, :, first:][indices] for store in self.stores]
        self._use(width)

    def _columns(self) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values of this layer, without the spare columns for new tokens."""
        assert self.keys is not None, "the KV cache has no rows whose keys and values can be read"
        assert self.values is not None, "the KV cache has no rows whose keys and values can be read"
        return self.keys, self.values

    def join(self, other: "RoomyLayer") -> None:
        """Append the rows of another batch, `other`, along the batch dimension.

        If this batch and `other` have different numbers of columns, the narrower batch is padded on the left, so that
        all rows end in the same column.
        """
        width = max(self.get_seq_length(), other.get_seq_length())
        own, others = self._columns(), other._columns()
        self.stores = [_stacked(above, below, axis=2, room=ROOM) for above, below in zip(own, others, strict=True)]
        self._use(width)

    def _use(self, width: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (store[:, :, :width] for store in self.stores)
        return self.keys, self.values


@dataclass
class Batch:
    """A batch of answers to decode, with one row per answer (B rows) and one column per token position (W columns).

    All rows of the batch end in the same column, so shorter rows are padded on the left. Until `take` drops a finished
    row from the batch, the model still processes the row, but the row's outputs are ignored.

    Attributes:
        requests: For each row, the generation request whose answer is decoded in the row.
        ids: (B, W) token ids of prompts and answers.
        log_probs: (B, W) float32 log-probabilities of sampled tokens, and 0 for all other tokens and padding.
        versions: For each column, the version of the weights that sampled the column's tokens. All tokens of one column
            are sampled in the same generation step.
        rows: (B, 4) int64, for each row: first column of the prompt, first column of the answer, maximum tokens of the
            answer, seed.
        temperatures: (B,) float32 sampling temperatures.
        live: (B,) bool, False for finished answers.
        cache: Key-value cache of the columns (token positions) of `ids`. After `append` has added a column of tokens,
            the cache lacks this column until the model's next forward pass. The cache of a new batch is empty.
        padded: Whether at least one row is padded on the left.
        experts: (B, W, E) int16 numbers of the E experts that the model's routers chose for each token, `NOT_RECORDED`
            in columns on which the model has not run yet; None if no experts are recorded.
    """

    requests: list[Request]
    ids: Tensor
    log_probs: Tensor
    versions: list[int]
    rows: Tensor
    temperatures: Tensor
    live: Tensor
    cache: Any
    padded: bool
    experts: Tensor | None = None

    @property
    def width(self) -> int:
        """Return the number of columns W of the batch."""
        return len(self.versions)

    def mask(self, first: int) -> Tensor | None:
        """Return the attention mask (True for tokens, False for padding), or None if no row is padded.

        The attention mask's shape is (B, 1, 1, W) if `first` is the last column, and (B, W) otherwise.
        """
        if not self.padded:
            return None
        real = torch.arange(self.width, device=self.ids.device) >= self.rows[:, :1]
        return real[:, None, None] if first == self.width - 1 else real.long()

    def positions(self, first: int) -> Tensor:
        """Return the position ids of the columns from index `first` on.

        For a batch with B rows and W columns, the position ids have shape (B, W - first), or (1, W - first) if no row
        is padded.
        """
        columns = torch.arange(first, self.width, device=self.ids.device)[None]
        if not self.padded:
            return columns
        # A finished row may grow beyond the model's last position, so finished rows use position 0.
        return torch.where(self.live[:, None], columns - self.rows[:, :1], 0).clamp(min=0)

    def append(self, tokens: Tensor, log_probs: Tensor, version: int) -> None:
        """Add a column of sampled tokens (B,) with their log-probs (B,)."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        self.log_probs = torch.cat([self.log_probs, log_probs[:, None]], 1)
        self.versions.append(version)
        if self.experts is not None:
            self.experts = F.pad(self.experts, (0, 0, 0, 1), value=NOT_RECORDED)

    def images(self, first: int) -> tuple[Sequence[bytes], Tensor | None]:
        """Return the files of the images in the columns from index `first` on, and the places of their tokens.

        Images are in the prompts. If `first` is not 0, the columns contain no prompts.
        """
        if first or all(request.images is None for request in self.requests):
            return (), None
        places = torch.zeros_like(self.ids, dtype=torch.bool)
        for row, request in enumerate(self.requests):
            if request.images is not None:
                begin = int(self.rows[row, 0])
                places[row, begin : begin + len(request.prompt_ids)] = torch.tensor(request.images.numbers) > 0
        return [file for request in self.requests if request.images for _, file in request.images.files], places

    def record_experts(self, first: int, chosen: Tensor) -> None:
        """Record the experts that the model's routers chose in a forward pass on the columns from index `first` on.

        If the model runs on a column a second time, because the weights have changed, the experts of the first time
        are kept: the next token was sampled with them.

        Args:
            first: Index of the first column of the forward pass.
            chosen: (B * (W - first), E) int16 numbers of the experts, row by row.
        """
        found = chosen.view(len(self.ids), self.width - first, -1)
        if self.experts is None:
            assert first == 0, "the first forward pass of a batch runs on all columns"
            self.experts = found
        else:
            known = self.experts[:, first:]
            self.experts[:, first:] = torch.where(known == NOT_RECORDED, found, known)

    def finish(self, stops: Tensor, strings: StopStrings | None = None) -> list[Completion]:
        """Find the answers whose last token is in the last column, mark them as finished, and return them.

        An answer ends in the last column if one of three conditions holds: its token in the last column is in `stops`
        (S,), that token completes a stop string of `strings`, or the answer has its maximum length.
        """
        last, limits = self.ids[:, -1], self.rows[:, 1] + self.rows[:, 2]
        stopped = torch.isin(last, stops)
        if strings is not None:
            stopped |= self._completed(strings)
        ended = (self.live & (stopped | (limits == self.width))).nonzero()[:, 0]
        if not len(ended):
            return []
        self.live[ended] = False
        columns = self.rows[:, 1], self.ids, self.log_probs
        begins, tokens, log_probs = (column[ended].tolist() for column in columns)
        reasons = ["stop" if stop else "length" for stop in stopped[ended].tolist()]
        prompts = self.rows[ended, 0].tolist()
        experts = None if self.experts is None else self.experts[ended, :-1].cpu()
        return [
            Completion(
                self.requests[row].key,
                tokens[n][begins[n] :],
                log_probs[n][begins[n] :],
                reasons[n],
                self.versions[begins[n] :],
                experts=() if experts is None else array(INT16, experts[n, prompts[n] :].flatten().numpy().tobytes()),
            )
            for n, row in enumerate(ended.tolist())
        ]

    def _completed(self, strings: StopStrings) -> Tensor:
        """Return a bool mask (B,) of the unfinished answers whose token in the last column completes a stop string."""
        found, begins = torch.zeros_like(self.live), self.rows[:, 1].tolist()
        live = self.live.tolist()
        for row, token in enumerate(self.ids[:, -1].tolist()):
            if live[row] and strings.may_end(token):
                found[row] = strings.end(self.ids[row, begins[row] :].tolist())
        return found

    def take(self, rows: Tensor) -> None:
        """Keep only the rows with the indices `rows` (N,), in the order of `rows`, and drop all-padding columns."""
        first = int(self.rows[rows, 0].min())
        self.requests = [self.requests[row] for row in rows.tolist()]
        self.ids, self.log_probs = self.ids[rows, first:], self.log_probs[rows, first:]
        self.rows, self.temperatures, self.live = self.rows[rows], self.temperatures[rows], self.live[rows]
        self.rows[:, :2] -= first
        self.versions = self.versions[first:]
        if self.experts is not None:
            self.experts = self.experts[rows, first:]
        self.padded = bool((self.rows[:, 0] > 0).any())
        for layer in self.cache.layers:
            layer.batch_select_indices(rows, first)

    def join(self, other: "Batch") -> None:
        """Append the rows of another batch, `other`, so that all rows end in the same column.

        The key-value caches of this batch and of `other` must hold the keys and values of all columns.
        """
        self.padded = self.padded or other.padded or self.width != other.width
        width = max(self.width, other.width)
        rows = [batch.rows.clone() for batch in (self, other)]
        for own, batch in zip(rows, (self, other), strict=True):
            own[:, :2] += width - batch.width
        self.rows = torch.cat(rows)
        self.requests = self.requests + other.requests
        self.ids, self.log_probs = _stacked(self.ids, other.ids), _stacked(self.log_probs, other.log_probs)
        if self.experts is not None and other.experts is not None:
            self.experts = _stacked(self.experts, other.experts)
        self.versions = [0] * (width - self.width) + self.versions
        self.temperatures = torch.cat([self.temperatures, other.temperatures])
        self.live = torch.cat([self.live, other.live])
        for layer, below in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.join(below)


def new_cache() -> Any:
    """Return an empty key-value cache, to which the model's first forward pass adds the layers."""
    return Cache(layer_class_to_replicate=RoomyLayer)


def new_batch(requests: Sequence[Request], device: torch.device) -> Batch:
    """Return a batch of new requests with an empty cache."""
    lengths = [len(request.prompt_ids) for request in requests]
    width = max(lengths)
    ids = [[0] * (width - len(request.prompt_ids)) + request.prompt_ids for request in requests]
    rows = [
        (width - length, width, request.max_tokens, request.seed)
        for request, length in zip(requests, lengths, strict=True)
    ]
    return Batch(
        requests=list(requests),
        ids=torch.tensor(ids, device=device),
        log_probs=torch.zeros(len(requests), width, device=device),
        versions=[0] * width,
        rows=torch.tensor(rows, device=device),
        temperatures=torch.tensor([request.temperature for request in requests], device=device),
        live=torch.ones(len(requests), dtype=torch.bool, device=device),
        cache=new_cache(),
        padded=min(lengths) < width,
    )


def prompt_key(request: Request) -> tuple[int, ...]:
    """Return a key that two requests share exactly if they have the same prompt, including its images."""
    shown = () if request.images is None else (-number for number, _ in request.images.files)
    return (*request.prompt_ids, *shown)


def different_prompts(requests: Sequence[Request]) -> tuple[list[Request], list[int]]:
    """Find the distinct prompts of requests.

    Returns:
        A list with one request for each distinct prompt, and a list with the index of each request's prompt among the
        distinct prompts.
    """
    numbers: dict[tuple[int, ...], int] = {}
    which = [numbers.setdefault(prompt_key(request), len(numbers)) for request in requests]
    firsts = dict(zip(reversed(which), reversed(requests), strict=True))
    return [firsts[number] for number in range(len(numbers))], which


def _stacked(above: Tensor, below: Tensor, axis: int = 1, room: int = 0) -> Tensor:
    """Concatenate two tensors along axis 0, after padding them to equal lengths along `axis`.

    The tensor that is shorter along `axis` is padded with zeros on the left. `_stacked` appends `room` columns of zeros
    on the right of the concatenated tensor.
    """
    width = max(above.size(axis), below.size(axis))
    padding = [(0, 0)] * (above.ndim - 1 - axis)
    return torch.cat(
        [
            F.pad(part, [side for sides in (*padding, (width - part.size(axis), room)) for side in sides])
            for part in (above, below)
        ]
    )
