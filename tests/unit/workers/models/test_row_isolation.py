"""Tests of the check that a model computes each row of a pack independently of the other rows."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MistralConfig,
    Qwen2MoeConfig,
)

from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose
from rltrain.tasks.tiny_model import tiny_model
from workers.models.packed_forward import PACKED, policy_output
from workers.models.row_isolation import check_policy_rows_apart, check_rows_apart
from workers.rollout.engines.hf.engine import make as make_hf_engine
from workers.training.actor import ActorWorker
from workers.training.critic import CriticWorker
from workers.training.reference import ReferenceWorker
from workers.training.reward_model import RewardModelWorker

LACKING = "model.layers.1.mlp.down_proj.weight"
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# names that configs of older models use for the sizes of a model
OLDER = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
GOOD = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "gemma3_text": {}, "phi3": {}, "phi": {}, "olmo2": {},
    "granite": {}, "cohere": {}, "gpt_neox": {}, "gpt2": OLDER, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "smollm3": {}, "glm4": {},
    "starcoder2": {},
}  # fmt: skip
LEAKING = {
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "qwen3_next": DELTA, "qwen3_5_text": DELTA,
    "bamba": {"attn_layer_indices": [1], **STATES}, "mamba": {}, "rwkv": {}, "falcon_h1": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, **STATES},
    "bloom": {"n_layer": 2, "n_head": 4}, "codegen": OLDER | {"rotary_dim": 4},
}  # fmt: skip
FAILING = {"stablelm": {}, "nemotron": {}, "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4}}


def config_of(kind: str, sizes):
    return AutoConfig.for_model(kind, **{**SIZES, **sizes, "num_labels": 1})


def checked(kind: str, sizes) -> None:
    torch.manual_seed(0)
    check(AutoModelForCausalLM.from_config(config_of(kind, sizes), attn_implementation=PACKED).float().eval())


def check(model) -> None:
    run = lambda packed: policy_output(model, packed, temperature=1.0)  # noqa: E731
    check_rows_apart(model, model.get_output_embeddings(), run, "model.path=here")


@pytest.mark.parametrize(("kind", "sizes"), GOOD.items())
def test_B6_architectures_that_mix_tokens_in_attention_alone_are_accepted(kind, sizes):
    checked(kind, sizes)


@pytest.mark.parametrize(("kind", "sizes"), LEAKING.items())
def test_B6_architectures_whose_rows_see_each_other_are_refused(kind, sizes):
    with pytest.raises(
        ConfigError, match=r"^model.path=here: \w+ForCausalLM lets rows that are packed together influence"
    ):
        checked(kind, sizes)


@pytest.mark.parametrize(("kind", "sizes"), FAILING.items())
def test_architectures_without_a_packed_forward_pass_are_refused(kind, sizes):
    with pytest.raises(ConfigError, match=r"ForCausalLM fails in a packed forward pass \(\w+Error: .+\); use a model"):
        checked(kind, sizes)


def test_the_model_and_the_random_streams_stay_as_they_are():
    model = tiny_model().eval()
    model.set_attn_implementation(PACKED)
    before, stream = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_one_row_that_rounds_otherwise_is_not_taken_for_a_leak():
    """Rounding may make a mixture-of-experts model choose a different expert for a single token."""
    model, passes = tiny_model().eval(), []
    model.set_attn_implementation(PACKED)

    def jump(module, arguments, output):
        passes.append(len(passes))
        return output + (0.1 if len(passes) == 2 else 0.0)

    model.get_input_embeddings().register_forward_hook(jump)
    check(model)
    assert len(passes) == 4


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("worker", "kind", "key"),
    [(ActorWorker, AutoModelForCausalLM, "model.path="), (ReferenceWorker, AutoModelForCausalLM, "model.path="),
     (CriticWorker, AutoModelForTokenClassification, "model.path="),
     (RewardModelWorker, AutoModelForSequenceClassification, "reward model ")],
)  # fmt: skip
def test_every_role_tries_its_model_out(worker, kind, key, tmp_path):
    torch.manual_seed(0)
    kind.from_config(config_of("bloom", LEAKING["bloom"])).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"^{key}{tmp_path}: Bloom\w+ lets rows that are packed together influence each "
    ):
        worker(compose([])[0], str(tmp_path))


def test_a_model_whose_attention_cannot_be_exchanged_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(config_of("gptj", OLDER | {"rotary_dim": 4})).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^model.path={tmp_path}: this model implements its own attention, which"):
        ActorWorker(compose([])[0], str(tmp_path))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("role", "key"),
    [("actor", "model.path="), ("reference", "model.path="), ("critic", "model.path="), ("rollout", "model.path="),
     ("reward_model", "reward model ")],
)  # fmt: skip
def test_no_role_starts_from_weights_that_lack_a_tensor(role, key, start, reward_model, tmp_path):
    folder, name = shutil.copytree(reward_model if role == "reward_model" else start, tmp_path / "m"), LACKING
    tensors = load_file(folder / "model.safetensors")
    save_file({one: tensor for one, tensor in tensors.items() if one != name}, folder / "model.safetensors")
    roles = {
        "actor": ActorWorker, "reference": ReferenceWorker, "critic": CriticWorker, "reward_model": RewardModelWorker,
        "rollout": lambda config, path: make_hf_engine(config, path, [2]),
    }  # fmt: skip
    with pytest.raises(
        ConfigError, match=rf"^{key}{folder}: its weights lack {name}, so they do not match the Qwen2For"
    ):
        roles[role](compose(["rollout=hf"])[0], str(folder))


def test_windows_that_a_model_applies_only_through_its_mask_are_refused(tmp_path):
    """Qwen2-MoE does not pass its window to the attention function."""
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, max_position_embeddings=64, use_sliding_window=True, sliding_window=8,
        max_window_layers=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^key: Qwen2MoeForCausalLM does not pass its sliding window of 8 tokens"):
        check_policy_rows_apart(str(tmp_path), "key")


def test_windows_that_reach_packed_attention_are_accepted(tmp_path):
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_policy_rows_apart(str(tmp_path), "key")
