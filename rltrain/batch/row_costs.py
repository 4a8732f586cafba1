"""How much a model computes for a row of text, estimated from its Hugging Face config: pure, no model is built.

The unit is one multiply-add of a forward pass; a backward pass costs twice as much of everything, so shares stay.
Norms, activations and rotations are left out: they are under 1% of a model worth balancing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Their feed-forward layers are two matrices; everybody else's have a gate, which makes three.
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
_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENTION = ("full_attention", *_WINDOWED)  # layers of other types cost nothing that grows with the row's square


@dataclass(frozen=True)
class RowWork:
    """Multiply-adds of one model.

    Attributes:
        token: of one token, in the matrices of all layers.
        output: of one response token, in the head.
        attention: (window, multiply-adds of one pair of tokens) of layers that attend alike; window None: all before.
    """

    token: int = 1
    output: int = 0
    attention: tuple[tuple[int | None, int], ...] = ()

    def of(self, tokens: int, outputs: int) -> int:
        """A causal row of so many tokens, the head computed for `outputs` of them."""
        pairs = sum(cost * causal_pairs(tokens, window) for window, cost in self.attention)
        return tokens * self.token + outputs * self.output + pairs

    def of_rows(self, tokens: Sequence[int], outputs: Sequence[int]) -> list[int]:
        """Each of these rows."""
        return [self.of(length, count) for length, count in zip(tokens, outputs, strict=True)]


def causal_pairs(tokens: int, window: int | None) -> int:
    """(query, key) pairs of a row in which each token sees itself and those before it, `window` in all."""
    near = tokens if window is None else min(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * near


def row_work(model: Mapping[str, Any], *, head: bool) -> RowWork:
    """The work of a model with this config; `head`: whether response tokens go through its vocabulary head.

    A config that names no width or no layers gives tokens as the only work: long rows then look too cheap.
    """
    hidden = _number(model, "hidden_size", "n_embd", "d_model")
    layers = _number(model, "num_hidden_layers", "n_layer", "num_layers")
    if not hidden or not layers:
        return RowWork()
    heads = _number(model, "num_attention_heads", "n_head", "num_heads") or 1
    head_dim = _number(model, "head_dim") or hidden // heads
    key_heads = _number(model, "num_key_value_heads") or heads
    projections = 2 * hidden * head_dim * (heads + key_heads)  # queries and output; keys and values
    windows: dict[int | None, int] = {}
    for window in _windows(model, layers):
        windows[window] = windows.get(window, 0) + 2 * heads * head_dim  # a query with a key, a weight with a value
    return RowWork(
        layers * (projections + _feed_forward(model, hidden)),
        hidden * (_number(model, "vocab_size") or 0) if head else 0,
        tuple(windows.items()),
    )


def _feed_forward(model: Mapping[str, Any], hidden: int) -> int:
    """Of one token in one layer; of a mixture's experts, those that it is sent to."""
    matrices = 2 if model.get("model_type") in _UNGATED else 3
    width = _number(model, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    experts = _number(model, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return matrices * hidden * width
    one = _number(model, "moe_intermediate_size") or width
    chosen = (_number(model, "num_experts_per_tok") or 1) * one
    shared = _number(model, "shared_expert_intermediate_size") or (_number(model, "n_shared_experts") or 0) * one
    return matrices * hidden * (chosen + shared) + hidden * experts


def _windows(model: Mapping[str, Any], layers: int) -> Iterable[int | None]:
    """What each layer that attends sees: its window, or None for all before."""
    window = _number(model, "sliding_window", "attention_chunk_size") if model.get("use_sliding_window", True) else None
    kinds = model.get("layer_types")
    if not isinstance(kinds, Sequence):
        full = _number(model, "max_window_layers") or 0
        kinds = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(layers - full, 0)
    return [window if kind in _WINDOWED else None for kind in kinds if kind in _ATTENTION]


def _number(model: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a number, as architectures call it."""
    return next((int(model[name]) for name in names if isinstance(model.get(name), int)), None)
