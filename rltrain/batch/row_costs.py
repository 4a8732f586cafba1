"""Estimate of a model's compute cost for a row of text, from the model's Hugging Face config alone.

The unit of all costs is one multiply-add of a forward pass. A backward pass costs twice as much as the forward pass in
every part of the model, so the cost ratio of two rows is the same with and without the backward pass. The estimate
leaves out norms, activations and rotary embeddings, which are under 1% of the cost of a large model. Balancing the rows
over the ranks matters only for large models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Model types whose feed-forward layers have two matrices. In model types that `_UNGATED` does not list, a feed-forward
# layer has a third matrix, the gate.
_UNGATED = {
    "bloom",
    "codegen",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "phi",
    "starcoder2",
}
# Attention may read at most KEYS times as many keys in a micro-batch as the micro-batch's token limit. The keys of a
# shared prompt are read once for each answer, so many short answers to a long prompt would need much memory for keys.
KEYS = 2
_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENTION = ("full_attention", *_WINDOWED)  # Layer types whose cost grows with the number of token pairs.


@dataclass(frozen=True)
class RowWork:
    """The numbers of multiply-adds per token and per token pair, from which the forward-pass cost of a row is computed.

    Attributes:
        token: number of multiply-adds per token in the weight matrices of all layers, without the vocabulary head.
        output: number of multiply-adds in the vocabulary head for each response token.
        attention: for each group of layers with the same attention window, the pair (window, multiply-adds per pair of
            tokens). An attention window of None means that a token attends to all preceding tokens.
    """

    token: int = 1
    output: int = 0
    attention: tuple[tuple[int | None, int], ...] = ()

    def of(self, tokens: int, outputs: int) -> int:
        """Return the number of multiply-adds for the forward pass of one row.

        Args:
            tokens: number of tokens in the row.
            outputs: number of tokens of the row for which the vocabulary head is computed.
        """
        pairs = sum(cost * causal_pairs(tokens, window) for window, cost in self.attention)
        return tokens * self.token + outputs * self.output + pairs

    def of_rows(self, tokens: Sequence[int], outputs: Sequence[int]) -> list[int]:
        """Return the number of multiply-adds for the forward pass of each row.

        Args:
            tokens: number of tokens in each row.
            outputs: for each row, the number of tokens for which the vocabulary head is computed.
        """
        return [self.of(length, count) for length, count in zip(tokens, outputs, strict=True)]


def causal_pairs(tokens: int, window: int | None) -> int:
    """Return the number of (query, key) pairs that causal attention computes in a row of `tokens` tokens.

    Each token attends to itself and to the preceding tokens, but to at most `window` tokens in total.
    """
    near = tokens if window is None else min(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * near


def row_work(model: Mapping[str, Any], *, head: bool) -> RowWork:
    """Return the compute cost of rows for a model with the given config.

    If the config lacks the hidden size or the number of layers, each token costs 1, which underestimates the cost of
    long rows relative to short rows.

    Args:
        model: the Hugging Face config of the model, as a mapping.
        head: whether response tokens go through the model's vocabulary head.
    """
    hidden = _number(model, "hidden_size", "n_embd", "d_model")
    layers = _number(model, "num_hidden_layers", "n_layer", "num_layers")
    if not hidden or not layers:
        return RowWork()
    heads = _number(model, "num_attention_heads", "n_head", "num_heads") or 1
    head_dim = _number(model, "head_dim") or hidden // heads
    key_heads = _number(model, "num_key_value_heads") or heads
    # The weight matrices of queries and outputs each have hidden * head_dim * heads elements. The weight matrices of
    # keys and values each have hidden * head_dim * key_heads elements.
    projections = 2 * hidden * head_dim * (heads + key_heads)
    windows: dict[int | None, int] = {}
    for window in attention_windows(model, layers):
        # For each pair of tokens, each dimension of an attention head costs one multiply-add for query * key, and one
        # for attention weight * value.
        windows[window] = windows.get(window, 0) + 2 * heads * head_dim
    return RowWork(
        layers * (projections + _feed_forward(model, hidden)),
        hidden * (_number(model, "vocab_size") or 0) if head else 0,
        tuple(windows.items()),
    )


def _feed_forward(model: Mapping[str, Any], hidden: int) -> int:
    """Return the multiply-adds of one token in the feed-forward part of one layer.

    For a mixture-of-experts model, `_feed_forward` counts the multiply-adds of the router, of the experts that the
    token is routed to, and of the shared experts.
    """
    matrices = 2 if model.get("model_type") in _UNGATED else 3
    width = _number(model, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    experts = _number(model, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return matrices * hidden * width
    one = _number(model, "moe_intermediate_size") or width
    chosen = (_number(model, "num_experts_per_tok") or 1) * one
    shared = _number(model, "shared_expert_intermediate_size") or (_number(model, "n_shared_experts") or 0) * one
    return matrices * hidden * (chosen + shared) + hidden * experts


def attention_windows(model: Mapping[str, Any], layers: int) -> list[int | None]:
    """Return the attention window of each attention layer.

    An attention window of None means that a token attends to all preceding tokens.
    """
    window = _number(model, "sliding_window", "attention_chunk_size") if model.get("use_sliding_window", True) else None
    kinds = model.get("layer_types")
    if not isinstance(kinds, Sequence):
        full = _number(model, "max_window_layers") or 0
        kinds = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(layers - full, 0)
    return [window if kind in _WINDOWED else None for kind in kinds if kind in _ATTENTION]


def _number(model: Mapping[str, Any], *names: str) -> int | None:
    """Return the first integer that the config stores under one of the keys `names`; None if there is no such integer.

    Different model types store a dimension, such as the hidden size, under different config keys.
    """
    return next((int(model[name]) for name in names if isinstance(model.get(name), int)), None)
