"""Tests that models are loaded onto empty models, and that a sample holds one decoder layer of each kind."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from workers.models.loading import load_model, load_sample_layers
from workers.models.packed_forward import PACKED

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def saved(folder, kind="llama", **settings):
    """Save a small random model, and return the model and its directory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **settings}))
    model.save_pretrained(folder)
    return model, str(folder)


def test_a_model_has_the_weights_of_its_files_packed_attention_and_no_dropout(tmp_path):
    model, path = saved(tmp_path, num_hidden_layers=2)
    loaded = load_model(AutoModelForCausalLM, path)
    assert not loaded.training
    assert loaded.config._attn_implementation == PACKED
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_what_the_caller_changes_in_the_empty_model_holds_in_the_loaded_model(tmp_path):
    model, path = saved(tmp_path, num_hidden_layers=2)

    def arrange(empty):
        assert all(parameter.is_meta for parameter in empty.parameters())
        for parameter in empty.model.layers[0].parameters():
            parameter.requires_grad_(False)

    loaded = load_model(AutoModelForCausalLM, path, arrange=arrange)
    frozen = {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".layers.0." in name}


def test_a_parameter_that_the_files_lack_gets_the_value_that_the_caller_gives(tmp_path):
    _, path = saved(tmp_path, num_hidden_layers=2)

    def arrange(empty):
        empty.score = nn.Linear(32, 1, bias=False, device="meta")

    def first_value(name, shape):
        assert name == "score.weight"
        return torch.full(shape, 3.0)

    loaded = load_model(AutoModelForTokenClassification, path, new_head=True, arrange=arrange, first_value=first_value)
    assert torch.equal(loaded.score.weight, torch.full((1, 32), 3.0))
    with pytest.raises(AssertionError, match=r"score.weight is not in the weight files, and `first_value` is None"):
        load_model(AutoModelForTokenClassification, path, new_head=True, arrange=arrange)


def test_a_sample_has_the_first_layer_of_each_kind_with_the_weights_of_that_layer(tmp_path):
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model, path = saved(tmp_path, "gemma3_text", num_hidden_layers=5, layer_types=types, sliding_window=16)
    sample = load_sample_layers(AutoModelForCausalLM, path)
    assert len(sample.model.layers) == 2
    for layer, number in zip(sample.model.layers, (0, 2), strict=True):
        for name, parameter in model.model.layers[number].named_parameters():
            assert torch.equal(layer.get_parameter(name), parameter), (number, name)
    assert torch.equal(sample.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_layers_whose_parameters_have_other_shapes_are_of_another_kind(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    _, path = saved(tmp_path, "qwen3_moe", num_hidden_layers=4, **sizes)
    layers = load_sample_layers(AutoModelForCausalLM, path).model.layers
    assert [type(layer.mlp).__name__ for layer in layers] == ["Qwen3MoeSparseMoeBlock", "Qwen3MoeMLP"]
