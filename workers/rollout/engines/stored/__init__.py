"""Rollout engine without a model, which returns the stored answers of an earlier run."""

from rltrain.settings.engine_description import EngineDescription

DESCRIPTION = EngineDescription(
    title="stored answers",
    make="workers.rollout.engines.stored.engine:make",
    generates=False,
    repeats=True,
    image_models=("idefics3", "llava"),
    library_bytes=200 << 20,
)
