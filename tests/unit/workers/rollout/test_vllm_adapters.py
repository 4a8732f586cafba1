"""Tests of the models and settings that `rollout.vllm.adapters=separate` accepts and refuses."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from tests.attention_families import FAMILIES

vllm_engine = pytest.importorskip("workers.rollout.engines.vllm.engine", reason="needs vLLM", exc_type=ImportError)
vllm_adapters = pytest.importorskip("workers.rollout.engines.vllm.adapters", reason="needs vLLM", exc_type=ImportError)
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip


def options_of(monkeypatch, path, *overrides):
    """Return the options with which an engine is created, without creating the engine."""
    made = []
    monkeypatch.setattr(vllm_engine, "InProcessVLLM", lambda *arguments: made.append(arguments[-1]))
    monkeypatch.setattr(vllm_engine, "check_weights", lambda *_: None)
    vllm_engine.make(compose(["rollout.vllm.process=inprocess", *overrides])[0], str(path), [2])
    return made[0]


def saved(path, family, **sizes):
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES.get(family, {}) | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return path


def refusal(monkeypatch, path, *overrides):
    with pytest.raises(ConfigError) as caught:
        options_of(monkeypatch, path, "rollout.vllm.adapters=separate", *overrides)
    message = str(caught.value)
    assert message.startswith("rollout.vllm.adapters=separate: ")
    assert message.endswith("; use rollout.vllm.adapters=merged")
    return message


def test_adapters_are_merged_unless_the_config_says_otherwise(start, monkeypatch):
    assert options_of(monkeypatch, start, "model.lora={rank:4}").adapters is None
    assert options_of(monkeypatch, start, "rollout.vllm.adapters=separate").adapters is None
    lora = options_of(monkeypatch, start, "model.lora={rank:4}", "rollout.vllm.adapters=separate").adapters
    assert lora is not None
    assert lora.rank == 4


def test_models_to_which_vllm_cannot_apply_adapters_are_refused_by_name(tmp_path, monkeypatch):
    mixture = saved(tmp_path / "mixture", "qwen3_moe")
    message = refusal(monkeypatch, mixture, "model.lora={rank:4,targets:[q_proj]}")
    assert "Qwen3MoeForCausalLM has experts" in message
    stablelm = saved(tmp_path / "stablelm", "stablelm")
    message = refusal(monkeypatch, stablelm, "model.lora={rank:4,targets:[q_proj]}")
    assert "vLLM applies no adapters to StableLmForCausalLM" in message


def test_float32_adapters_on_a_gpu_are_refused(start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "need model.dtype=bfloat16" in refusal(monkeypatch, start, "model.lora={rank:4}")
    separate = ["model.lora={rank:4}", "rollout.vllm.adapters=separate", "model.dtype=bfloat16"]
    assert options_of(monkeypatch, start, *separate).adapters is not None


def test_a_rank_for_which_vllm_has_no_memory_is_refused(start, monkeypatch):
    assert "at most rank 512, but model.lora.rank is 600" in refusal(monkeypatch, start, "model.lora={rank:600}")


@pytest.mark.parametrize(("rank", "reserved"), [(1, 1), (4, 8), (8, 8), (33, 64), (512, 512)])
def test_vllm_reserves_memory_for_the_next_rank_that_it_has(start, rank, reserved):
    lora = compose([f"model.lora={{rank:{rank},targets:[q_proj,down_proj]}}"])[0].model.lora
    assert vllm_adapters.adapter_arguments(start, lora) == {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": reserved, "lora_target_modules": ["down_proj", "q_proj"],
    }  # fmt: skip
