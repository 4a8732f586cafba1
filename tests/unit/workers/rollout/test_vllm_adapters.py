"""Tests of the models and settings with which vLLM applies adapters beside the base weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from tests.attention_families import FAMILIES

vllm_engine = pytest.importorskip("workers.rollout.vllm_engine", reason="needs vLLM", exc_type=ImportError)
vllm_adapters = pytest.importorskip("workers.rollout.vllm_adapters", reason="needs vLLM", exc_type=ImportError)
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip


def beside(path, *overrides):
    return vllm_engine.adapters_beside(compose(list(overrides))[0], str(path))


@pytest.fixture
def mixture(tmp_path):
    config = CONFIG_MAPPING["qwen3_moe"](**SIZES | FAMILIES["qwen3_moe"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("gpu", "found"), [(True, 4), (False, None)])
def test_auto_means_separate_adapters_on_gpus_only(start, monkeypatch, gpu, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    lora = beside(start, "model.lora={rank:4}")
    assert (lora and lora.rank) == found


def test_a_model_without_adapters_needs_none(start):
    assert beside(start, "rollout.vllm.adapters=separate") is None


def test_merged_adapters_are_not_applied_beside_the_base_weights(start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert beside(start, "model.lora={rank:4}", "rollout.vllm.adapters=merged") is None


def test_adapters_of_a_mixture_of_experts_are_merged_or_refused(mixture, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    adapters = "model.lora={rank:4,targets:[q_proj]}"
    assert beside(mixture, adapters) is None
    with pytest.raises(ConfigError, match=r"adapters=separate: the weights of experts are .* adapters=merged"):
        beside(mixture, adapters, "rollout.vllm.adapters=separate")


def test_a_rank_for_which_vllm_has_no_memory_is_refused(start):
    with pytest.raises(ConfigError, match=r"at most rank 512, but model\.lora\.rank is 600"):
        beside(start, "model.lora={rank:600}", "rollout.vllm.adapters=separate")


@pytest.mark.parametrize(("rank", "reserved"), [(1, 1), (4, 8), (8, 8), (33, 64), (512, 512)])
def test_vllm_reserves_memory_for_the_next_rank_that_it_has(start, rank, reserved):
    lora = compose([f"model.lora={{rank:{rank},targets:[q_proj,down_proj]}}"])[0].model.lora
    assert vllm_adapters.adapter_arguments(start, lora) == {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": reserved, "lora_target_modules": ["down_proj", "q_proj"],
    }  # fmt: skip
