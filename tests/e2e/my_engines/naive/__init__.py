"""A rollout engine in a package outside rltrain. It samples one token after the other, without a KV cache."""

from rltrain.settings.engine_description import EngineDescription

DESCRIPTION = EngineDescription(
    title="naive sampler",
    make="tests.e2e.my_engines.naive.engine:make",
    environment={"NAIVE_SAMPLER": "1"},
    options={"answers_at_once": "Number of answers that are sampled at a time."},
    library_bytes=370 << 20,
)
