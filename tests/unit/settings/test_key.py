"""Tests of what the schema declares for each key: meaning, bounds, and whether a resumed run may change the key."""

import dataclasses
import typing

import pytest

from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose
from rltrain.settings.key import changeable_keys, declared_keys, key, section
from rltrain.settings.overrides import OPTIONAL
from rltrain.settings.schema import Config, LoRAConfig
from rltrain.settings.typed import keys, parse

EVERY = tuple(declared_keys(Config))
# Keys that a resumed run may change, because they do not affect what the model learns.
# A resumed run may not change a key that is missing in CHANGEABLE.
CHANGEABLE = {
    "actor.max_tokens_per_microbatch",
    "actor.offload_optimizer",
    "actor.share_prefixes",
    "algorithm.distillation.max_concurrent",
    "algorithm.distillation.retries",
    "algorithm.distillation.timeout_s",
    "critic.max_tokens_per_microbatch",
    "critic.offload_optimizer",
    "data.val",
    "data.val_sets",
    "trainer.eval_samples",
    "trainer.total_epochs",
    "trainer.trace",
    "data.val_size",
    "model.activation_checkpointing",
    "model.compile",
    "profile",
    "trainer.trackers",
    "model.cpu_offload",
    "placement.actor_ranks",
    "placement.address",
    "placement.env_vars",
    "placement.environment_workers",
    "placement.gpu_memory_gb",
    "placement.gpus_per_node",
    "placement.launcher",
    "placement.max_rollout_replicas",
    "placement.node_memory_gb",
    "placement.nodes",
    "placement.reward_spares",
    "placement.reward_workers",
    "placement.rollout_replicas",
    "placement.context_ranks",
    "placement.expert_ranks",
    "placement.tensor_ranks",
    "placement.sequence_ranks",
    "placement.shard_ranks",
    "placement.share_ranks",
    "placement.start_timeout_s",
    "placement.threads_per_worker",
    "reward.concurrency",
    "reward.max_failed_fraction",
    "reward.memory_mb",
    "reward.timeout_s",
    "rollout.engine_options",
    "rollout.environment_memory_mb",
    "rollout.max_concurrent_sequences",
    "rollout.max_log_prob_gap",
    "rollout.verify_sync",
    "rollout.weight_transport",
    "rollout.vllm.adapters",
    "rollout.vllm.arguments",
    "rollout.vllm.gpu_memory_utilization",
    "rollout.vllm.kv_cache_mb",
    "rollout.vllm.process",
    "rollout.vllm.quantization",
    "rollout.vllm.tensor_parallel_size",
    "trainer.checkpoint_dir",
    "trainer.eval_every",
    "trainer.hang_timeout_s",
    "trainer.keep_best",
    "trainer.keep_checkpoints",
    "trainer.max_restarts",
    "trainer.max_skipped_updates",
    "trainer.output_dir",
    "trainer.resume",
    "trainer.sample_every",
    "trainer.save_every",
    "trainer.total_steps",
    "verbose",
}


@section
class Small:
    """A config section with one bound of each kind."""

    count: int = key("Count.", at_least=1)
    share: float = key("Share.", above=0, at_most=1)
    decay: float | None = key("Decay.", at_least=0, below=1)
    least: float = key("Least.", above=0, refusal="{name}={value:g}: nothing; rule {rule}")
    most: float = key("Most.", at_most=7)
    under: float = key("Under.", below=7)

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ConfigError("count=13: bad luck")


GOOD = {"count": 1, "share": 1.0, "decay": 0.0, "least": 1.0, "most": 7.0, "under": 6.0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"count": 0}, "count must be >= 1, got 0"),
        ({"share": 0.0}, "share must be in (0, 1], got 0.0"),
        ({"share": 1.5}, "share must be in (0, 1], got 1.5"),
        ({"decay": -0.5}, "decay must be in [0, 1) or null, got -0.5"),
        ({"decay": 1.0}, "decay must be in [0, 1) or null, got 1.0"),
        ({"least": 0.0}, "least=0: nothing; rule > 0"),
        ({"most": 8.0}, "most must be <= 7, got 8.0"),
        ({"under": 7.0}, "under must be < 7, got 7.0"),
        ({"count": 13}, "count=13: bad luck"),
        ({"count": 13, "most": 8.0}, "most must be <= 7, got 8.0"),
    ],
)
def test_a_section_refuses_values_outside_the_bounds_of_its_keys_before_its_own_rules(changed, message):
    Small(**GOOD)
    Small(**GOOD | {"decay": None})
    with pytest.raises(ConfigError) as error:
        Small(**GOOD | changed)
    assert str(error.value) == message
    with pytest.raises(ConfigError):
        dataclasses.replace(Small(**GOOD), **changed)


def test_a_section_is_frozen_and_takes_every_key_by_its_name():
    small = Small(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        small.count = 2
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'under'"):
        Small(**{name: value for name, value in GOOD.items() if name != "under"})
    with pytest.raises(TypeError, match="positional"):
        Small(1)


def test_a_section_inside_another_class_inherits_the_bounds():
    @section
    class Larger(Small):
        more: int = key("More.", at_least=2)

    Larger(**GOOD, more=2)
    with pytest.raises(ConfigError, match=r"^more must be >= 2, got 1$"):
        Larger(**GOOD, more=1)
    with pytest.raises(ConfigError, match=r"^count=13: bad luck$"):
        Larger(**GOOD | {"count": 13}, more=2)


def test_every_key_and_section_has_a_meaning_that_is_a_sentence():
    for one in EVERY:
        assert one.key.meaning[0].isupper() or one.key.meaning.startswith(("true: ", "fixed: ")), one.path
        assert one.key.meaning.endswith("."), one.path
        assert " " in one.key.meaning.strip(), one.path
        assert "  " not in one.key.meaning, one.path


def test_the_declared_keys_are_the_keys_that_a_user_can_set():
    inside = (
        *(f"{path}." for path in OPTIONAL), "reward.functions[].", "reward.models[].", "rollout.tools[].",
        "algorithm.distillation.teachers[].",
    )  # fmt: skip
    whole = {*OPTIONAL, "reward.functions", "reward.models", "rollout.tools", "algorithm.distillation.teachers"}
    leaves = {
        one.path for one in EVERY if (one.section is None or one.path in whole) and not one.path.startswith(inside)
    }
    assert leaves == set(keys(Config))


def test_the_changeable_keys_are_those_that_do_not_affect_what_is_learned():
    sections = {one.path for one in EVERY if one.section is not None}
    assert changeable_keys(Config) - sections == CHANGEABLE
    assert changeable_keys(Config) & sections == {"placement", "rollout.vllm"}


def test_bounds_are_declared_of_numbers_alone():
    for one in EVERY:
        kinds = {one.hint, *typing.get_args(one.hint)}
        assert not one.key.bounds or kinds & {int, float}, one.path


def changed(values, path, value):
    head, _, rest = path.partition(".")
    return values | {head: changed(values[head], rest, value) if rest else value}


def outside(one):
    """Return values that lie just outside the bounds of a key."""
    step = 1 if int in {one.hint, *typing.get_args(one.hint)} else 0.5
    low = [] if one.key.at_least is None else [type(step)(one.key.at_least) - step]
    high = [] if one.key.at_most is None else [one.key.at_most + step]
    return [*low, *high, *(bound for bound in (one.key.above, one.key.below) if bound is not None)]


BOUNDED = [one for one in EVERY if one.key.bounds and not one.path.startswith(tuple(f"{path}." for path in OPTIONAL))]


@pytest.mark.parametrize("one", BOUNDED, ids=lambda one: one.path)
def test_every_bound_of_the_schema_is_checked(one):
    values = dataclasses.asdict(compose([])[0])
    for value in outside(one):
        with pytest.raises(ConfigError) as error:
            parse(Config, changed(values, one.path, value))
        assert str(error.value).startswith(f"{one.path} must be {one.key.bounds}")


def test_the_bounds_of_adapters_are_checked():
    LoRAConfig(rank=1, alpha=0.1, targets=["q_proj"])
    for wrong, message in (
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"alpha": 0.0}, "alpha must be > 0, got 0: ada"),
    ):
        with pytest.raises(ConfigError) as error:
            LoRAConfig(**{"rank": 1, "alpha": 0.1, "targets": ["q_proj"]} | wrong)
        assert str(error.value).startswith(message)
