"""Tests that a model which ranks cannot divide is refused before any worker starts."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose
from workers.models.division import check_division

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "options", "sizes", "message"),
    [
        ("qwen3", {}, {"tensor": 2}, ""),
        ("gemma2", {}, {"tensor": 2}, ""),
        ("olmo2", {}, {"tensor": 2}, ""),
        ("qwen3_moe", EXPERTS, {"tensor": 2, "expert": 3}, ""),
        ("mixtral", EXPERTS, {"expert": 2}, ""),
        ("gpt_oss", EXPERTS, {"expert": 2}, ""),
        ("gpt_oss", EXPERTS, {"tensor": 2}, r"M \(GptOssForCausalLM\) has no matrices that can be divided"),
        ("olmoe", EXPERTS, {"tensor": 2}, "has no matrices that can be divided"),
        ("qwen3", {"intermediate_size": 33}, {"tensor": 2}, "the 33 outputs of model.layers.0.mlp.gate_proj cannot"),
        ("qwen3", {}, {"expert": 2}, "has no experts that can be divided"),
        ("qwen3_moe", EXPERTS, {"expert": 4}, "has 6 experts; use a divisor of this number"),
        # Parameters that each rank would apply to its own heads, without a word in the plan.
        (
            "glm4_moe", {**EXPERTS, "n_routed_experts": 4, "use_qk_norm": True}, {"tensor": 2},
            "has the parameter model.layers.0.self_attn.q_norm.weight beside matrices that would be divided",
        ),
        (
            "deepseek_v2",
            {"n_routed_experts": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2},
            {"tensor": 2},
            "has the parameter model.layers.0.self_attn.q_a_proj.weight beside matrices that would be divided",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_models_that_ranks_cannot_divide_are_refused(family, options, sizes, message, tmp_path):
    CONFIG_MAPPING[family](**SIZES | options).save_pretrained(tmp_path)
    divided = [f"placement.{name}_ranks={size}" for name, size in sizes.items()]
    placement = compose(["placement.actor_ranks=12", *divided])[0].placement
    if message:
        with pytest.raises(ConfigError, match=message):
            check_division(str(tmp_path), "model.path=M", placement, experts=True)
    else:
        check_division(str(tmp_path), "model.path=M", placement, experts=True)


def test_a_teacher_may_have_no_experts_but_not_an_uneven_number_of_them(tmp_path):
    placement = compose(["placement.actor_ranks=4", "placement.expert_ranks=4"])[0].placement
    for family, options in (("qwen3", {}), ("qwen3_moe", EXPERTS)):
        CONFIG_MAPPING[family](**SIZES | options).save_pretrained(tmp_path / family)
    check_division(str(tmp_path / "qwen3"), "teacher=T", placement)
    with pytest.raises(ConfigError, match="teacher=T has 6 experts"):
        check_division(str(tmp_path / "qwen3_moe"), "teacher=T", placement)
