"""Tests of the names and shapes that a model's weights have in Hugging Face files."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.attention_families import FAMILIES
from workers.models.checkpoint_form import in_checkpoint_form, products_in_checkpoint_form
from workers.sync.checks import probe

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("family", ["mistral", "gemma2", "mixtral", "qwen3_moe", "olmoe"])
def test_tensors_and_products_have_the_names_of_the_saved_files(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | FAMILIES[family]))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # The functions only use names and shapes of the model, which need not hold any weights.
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    found = in_checkpoint_form(empty, parameters)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    products = products_in_checkpoint_form(empty, {name: probe(tensor) for name, tensor in parameters.items()})
    assert products.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.allclose(products[name], probe(tensor), rtol=1e-5, atol=1e-6), name
