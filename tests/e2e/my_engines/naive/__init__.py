"""A rollout engine in a package outside rltrain. It samples one token after the other, without a KV cache."""

from rltrain.settings.engine_description import EngineDescription
from rltrain.settings.schema import Config
from rltrain.settings.typed import require


def check(config: Config) -> None:
    rollout = config.rollout
    require(
        not rollout.is_restricted, f"{rollout.restriction}: the naive sampler samples from all tokens; leave it out"
    )
    require(not rollout.stop, "rollout.stop: the naive sampler knows no stop strings; use rollout.stop=[]")
    require(config.model.lora is None, "model.lora: the naive sampler cannot merge adapters; use model.lora=null")
    require(config.model.dtype == "float32", "model.dtype: the naive sampler computes only in float32")
    require(
        "answers_at_once" in rollout.engine_options,
        f"rollout.engine={rollout.engine} without its option: set 'rollout.engine_options={{answers_at_once: NUMBER}}'",
    )


DESCRIPTION = EngineDescription(
    title="naive sampler",
    make="tests.e2e.my_engines.naive.engine:make",
    environment={"NAIVE_SAMPLER": "1"},
    check=check,
    options={"answers_at_once": "Number of answers that are sampled at a time."},
    library_bytes=370 << 20,
)
