"""Which matrices of a model tensor parallelism divides, as transformers publishes it for each model family."""

from collections.abc import Mapping
from typing import Any

COLUMNS, ROWS = "colwise", "rowwise"  # Styles of matrices that are divided by their outputs, and by their inputs.
OF_HEADS = "replicated_with_grad_allreduce"  # Style of a module that each rank applies to its own heads.


def tensor_plan(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the published plan: it maps name patterns of modules to styles. The plan is {} if there is none.

    Args:
        model: the model's own config, as returned by `model_config`.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = model.get("model_type")
    found = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    return dict(getattr(found, "base_model_tp_plan", None) or {})


def divides_heads(plan: Mapping[str, str]) -> bool:
    """Return whether the plan divides attention heads."""
    return any(style == COLUMNS and ("attn" in name or "attention" in name) for name, style in plan.items())
