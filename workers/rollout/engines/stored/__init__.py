"""Rollout engine without a model, which returns the stored answers of an earlier run."""

from rltrain.settings.engine_description import EngineDescription

DESCRIPTION = EngineDescription(
    title="stored answers",
    make="workers.rollout.engines.stored.engine:make",
    generates=False,
    repeats=True,
    library_bytes=200 << 20,
)
