"""Settings of tiny random models of several families, some with sliding windows, soft caps, sinks or experts."""

from typing import Any

SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
# For each model type, the config settings that a test adds to the sizes of a small model with two layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 1.0},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 8},
    "gpt_oss": {**SLIDING, **EXPERTS},
    "olmo2": {},
    "mixtral": {**EXPERTS, "sliding_window": 6},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 16},
    "olmoe": EXPERTS,
}
