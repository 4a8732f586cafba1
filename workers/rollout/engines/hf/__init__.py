"""Rollout engine with the library transformers, for small models and for machines without vLLM."""

from rltrain.settings.engine_description import EngineDescription

DESCRIPTION = EngineDescription(
    title="transformers",
    make="workers.rollout.engines.hf.engine:make",
    repeats=True,
    records_experts=True,
    image_models=("idefics3", "llava"),
    library_bytes=370 << 20,
)
