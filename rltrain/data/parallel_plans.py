"""Plans of tensor parallelism, which transformers publishes for each model family: how ranks divide the matrices."""

from collections.abc import Mapping
from typing import Any

# Styles of a matrix in a plan. With COLUMNS, each rank computes some of the matrix's outputs. With ROWS, each rank has
# some of the matrix's inputs.
COLUMNS, ROWS = "colwise", "rowwise"
# Style of a module, such as a norm of queries, that each rank stores in full and applies only to the attention heads
# that the rank computes.
OF_HEADS = "replicated_with_grad_allreduce"


def tensor_plan(model: Mapping[str, Any]) -> dict[str, str]:
    """Return a model's plan, which maps patterns of module names to styles, or {} if transformers publishes no plan.

    Args:
        model: the model's own config, as returned by `model_config`.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = model.get("model_type")
    found = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    return dict(getattr(found, "base_model_tp_plan", None) or {})


def divides_heads(plan: Mapping[str, str]) -> bool:
    """Return whether a plan of tensor parallelism gives each rank some of the attention heads."""
    return any(style == COLUMNS and ("attn" in name or "attention" in name) for name, style in plan.items())
