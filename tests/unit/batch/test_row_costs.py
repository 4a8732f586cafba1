import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rltrain.batch.row_costs import RowWork, causal_pairs, row_work

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "Qwen2Config": SIZES,
    "LlamaConfig": SIZES | {"head_dim": 12},
    "Qwen3Config": SIZES | {"head_dim": 16},
    "Starcoder2Config": SIZES,
    "GPT2Config": {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}


def model_of(name):
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**CONFIGS[name]), attn_implementation="eager")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_work_of_a_token_is_the_weights_of_the_layers_and_of_an_output_those_of_the_head(name):
    model = model_of(name)
    head = model.get_output_embeddings()
    matrices = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    work = row_work(model.config.to_dict(), head=True)
    assert work.token == sum(m.weight.numel() for m in matrices)
    assert work.output == head.weight.numel()
    assert row_work(model.config.to_dict(), head=False).output == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_torch_counts_the_same_operations_where_every_token_attends_to_every_token(name):
    """For a row of T tokens, eager attention computes all T * T token pairs, whereas causal attention needs only T * (T
    + 1) / 2 pairs.
    """
    model, tokens = model_of(name), 24
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    work = row_work(model.config.to_dict(), head=True)
    ((window, pair),) = work.attention
    assert window is None
    square = tokens * (work.token + work.output) + pair * tokens**2
    # The rotary position embedding computes its angles with a small matrix product.
    rotations = counter.get_total_flops() / 2 - square
    assert 0 <= rotations <= 0.002 * square
    assert work.of(tokens, tokens) == square - pair * (tokens**2 - tokens * (tokens + 1) // 2)


def test_of_a_mixture_a_token_computes_the_experts_that_it_is_sent_to():
    moe = SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "model_type": "qwen3_moe"}
    attention = row_work(SIZES, head=False).token - 3 * 3 * 32 * 80
    assert row_work(moe, head=False).token - attention == 3 * (3 * 32 * 40 + 32 * 6)
    shared = moe | {"shared_expert_intermediate_size": 50}
    assert row_work(shared, head=False).token - row_work(moe, head=False).token == 3 * 3 * 32 * 50


@given(tokens=st.integers(0, 30), window=st.none() | st.integers(1, 30))
def test_pairs_are_counted_one_by_one(tokens, window):
    seen = sum(1 for query in range(tokens) for key in range(query + 1) if window is None or query - key < window)
    assert causal_pairs(tokens, window) == seen


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, {None: 3}),
        ({"sliding_window": 8}, {8: 3}),
        ({"sliding_window": 8, "use_sliding_window": False}, {None: 3}),
        ({"sliding_window": 8, "max_window_layers": 2}, {None: 2, 8: 1}),
        ({"sliding_window": 8, "max_window_layers": 28}, {None: 3}),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
         {8: 2, None: 1}),
        ({"layer_types": ["linear_attention", "full_attention", "linear_attention"]}, {None: 1}),
    ],
)  # fmt: skip
def test_each_layer_attends_as_the_config_says(keys, windows):
    pair = 2 * SIZES["hidden_size"]
    assert dict(row_work(SIZES | keys, head=True).attention) == {w: n * pair for w, n in windows.items()}


def test_a_long_row_costs_more_than_two_of_half_its_length_and_in_a_window_hardly():
    full, near = row_work(SIZES, head=True), row_work(SIZES | {"sliding_window": 4}, head=True)
    assert full.of(1000, 0) > 1.5 * 2 * full.of(500, 0)
    assert near.of(1000, 0) == pytest.approx(2 * near.of(500, 0), rel=1e-3)


@pytest.mark.parametrize("model", [{}, {"hidden_size": 32}, {"num_hidden_layers": 2, "hidden_size": "wide"}])
def test_of_a_config_that_says_too_little_the_work_is_the_tokens(model):
    work = row_work(model, head=True)
    assert work == RowWork()
    assert work.of_rows([3, 5], [1, 4]) == [3, 5]


def test_a_config_that_leaves_out_what_can_be_derived_is_enough():
    least = {"hidden_size": 32, "num_hidden_layers": 1}
    assert row_work(least, head=True) == RowWork(4 * 32 * 32 + 3 * 32 * 128, 0, ((None, 64),))
