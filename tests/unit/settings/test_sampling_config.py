"""Tests of the config sections `data.difficulty` and `trainer.reuse`."""

import pytest
import yaml

from rltrain.base.errors import ConfigError
from rltrain.run.checks import check_prompt_count
from rltrain.run.epochs import with_epochs_as_steps
from rltrain.settings.algorithm_rules import check_algorithm
from rltrain.settings.compose import compose
from rltrain.settings.sampling_config import DifficultyConfig, ReuseConfig

STALE = "trainer.max_staleness=2"
DEFAULT = {
    "easy_threshold": 1.0, "hard_threshold": 0.0, "easy_fraction": 0.1, "hard_fraction": 0.1, "unseen_fraction": 0.3,
}  # fmt: skip


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_both_are_off_by_default():
    config, _ = compose([])
    assert (config.data.difficulty, config.trainer.reuse) == (None, None)
    assert (config.trainer.reused_groups, config.trainer.steps_ahead, config.takes_turns) == (0, 0, True)


def test_an_empty_mapping_or_one_key_turns_difficulty_on():
    config, text = compose(["data.difficulty={}"])
    assert config.data.difficulty == DifficultyConfig(**DEFAULT)
    assert yaml.safe_load(text)["data"]["difficulty"] == DEFAULT
    changed = DifficultyConfig(**DEFAULT | {"hard_fraction": 0.4})
    assert compose(["data.difficulty.hard_fraction=0.4"])[0].data.difficulty == changed
    assert compose(["data.difficulty={hard_fraction:0.4}"])[0].data.difficulty == changed
    assert compose(["data.difficulty={}", "data.difficulty=null"])[0].data.difficulty is None
    assert changed.normal_fraction == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("3", "data.difficulty=3: must be null, or a mapping, as in data.difficulty={} or"),
        ("{easy:0.1}", "unknown config key 'data.difficulty.easy'; the nearest known key is 'data.difficulty.easy_"),
        ("{easy_fraction:0}", "data.difficulty.easy_fraction must be in (0, 1), got 0.0"),
        ("{hard_fraction:1}", "data.difficulty.hard_fraction must be in (0, 1), got 1.0"),
        ("{unseen_fraction:-1}", "data.difficulty.unseen_fraction must be in (0, 1), got -1.0"),
        ("{easy_threshold:0}", "data.difficulty.easy_threshold must be in (0, 1], got 0.0"),
        ("{hard_threshold:1}", "data.difficulty.hard_threshold must be in [0, 1), got 1.0"),
        (
            "{easy_threshold:0.5,hard_threshold:0.5}",
            "data.difficulty.hard_threshold=0.5 is not below easy_threshold=0.5: a prompt would be hard and easy at "
            "once; lower hard_threshold, or raise easy_threshold",
        ),
        (
            "{easy_fraction:0.4,unseen_fraction:0.5}",
            "data.difficulty.easy_fraction=0.4, hard_fraction=0.1, unseen_fraction=0.5: these fractions leave nothing "
            "for the normal prompts; use fractions whose sum is below 1",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(value, message):
    assert refusal(f"data.difficulty={value}").startswith(message)


def test_pools_have_no_order_that_shuffle_could_turn_off():
    assert refusal("data.difficulty={}", "data.shuffle=false") == (
        "data.shuffle=false with data.difficulty: prompts are sampled from pools, so their order in the data cannot be "
        "kept; use data.shuffle=true, or data.difficulty=null"
    )


SMALL = ["data.difficulty={}", "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=4"]


@pytest.mark.parametrize(
    ("overrides", "least", "reasons"),
    [
        ([], 4, "trainer.prompts_per_step=4"),
        (["trainer.max_staleness=2"], 12, "trainer.prompts_per_step=4, 2 steps ahead"),
        (["trainer.max_staleness=2", "trainer.reuse.groups=1"], 4, "trainer.prompts_per_step=4"),
        (["algorithm.dynamic_sampling=3"], 12, "trainer.prompts_per_step=4, algorithm.dynamic_sampling=3"),
    ],
)
def test_there_must_be_a_prompt_for_each_group_in_flight(overrides, least, reasons):
    config = compose([*SMALL, *overrides])[0]
    check_prompt_count(config, least)
    with pytest.raises(ConfigError) as error:
        check_prompt_count(config, least - 1)
    assert str(error.value) == (
        f"data.difficulty with {least - 1} training prompts: up to {least} prompt groups are in flight at once "
        f"({reasons}), and each group needs a different prompt; use more training prompts, lower these settings, or "
        "set data.difficulty=null"
    )
    check_prompt_count(compose([*SMALL[1:], *overrides])[0], 1)


def test_groups_are_reused_for_the_whole_staleness_bound_unless_the_engines_run_ahead():
    config = compose([STALE, "trainer.reuse={groups:4}"])[0]
    assert config.trainer.reuse == ReuseConfig(groups=4, steps=2)
    assert (config.trainer.reused_groups, config.trainer.steps_ahead, config.takes_turns) == (4, 0, True)
    ahead = compose([STALE, "trainer.reuse={groups:4,steps:1}"])[0]
    assert (ahead.trainer.steps_ahead, ahead.takes_turns) == (1, False)
    assert compose([STALE, "trainer.reuse.groups=4"])[0].trainer.reuse == config.trainer.reuse
    assert config.algorithm.correction.level == "token"  # reused answers are stale


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.reuse={groups:4}"],
            "trainer.reuse.groups=4 with max_staleness=0: the answers of a group that is trained on again are at least "
            "one weight version old; use trainer.max_staleness=1 or more, or trainer.reuse=null",
        ),
        (
            [STALE, "trainer.reuse={groups:4,steps:3}"],
            "trainer.reuse.steps=3 with max_staleness=2: the answers of a reused group could be staler than "
            "max_staleness allows; use at most trainer.reuse.steps=2",
        ),
        (
            [STALE, "trainer.reuse={groups:64}"],
            "trainer.reuse.groups=64 with prompts_per_step=64: a training step also needs new prompt "
            "groups; use at most trainer.reuse.groups=63",
        ),
        ([STALE, "trainer.reuse={groups:0}"], "trainer.reuse.groups must be >= 1, got 0"),
        ([STALE, "trainer.reuse={groups:1,steps:0}"], "trainer.reuse.steps must be >= 1, got 0"),
        ([STALE, "trainer.reuse={steps:1}"], "trainer.reuse={'steps': 1}: must be null, or a mapping with a number"),
        ([STALE, "trainer.reuse=4"], "trainer.reuse=4: must be null, or a mapping with a number of groups, as in"),
        (
            [STALE, "trainer.reuse={groups:1,steps:1}", "trainer.deterministic=true", "rollout=hf"],
            "trainer.max_staleness=2 with deterministic=true: the moment at which the weights change during an "
            "answer depends on timing; use max_staleness=0, or trainer.reuse.steps=2",
        ),
    ],
)  # fmt: skip
def test_reuse_that_cannot_be_is_refused(overrides, message):
    assert refusal(*overrides).startswith(message)


def test_groups_whose_engines_do_not_run_ahead_are_deterministic():
    compose([STALE, "trainer.reuse={groups:1}", "trainer.deterministic=true", "rollout=hf"])


def test_one_answer_to_a_prompt_never_has_different_outcomes():
    with pytest.raises(
        ConfigError, match=r"^rollout\.samples_per_prompt=1: trainer\.reuse compares the answers to one"
    ):
        check_algorithm(
            compose([STALE, "trainer.reuse.groups=1", "rollout.samples_per_prompt=1", "algorithm=reinforce_plus_plus"])[
                0
            ]
        )


def test_an_epoch_takes_more_steps_if_a_part_of_each_step_is_reused():
    words = ["trainer.total_epochs=1", "trainer.prompts_per_step=32", STALE]
    assert with_epochs_as_steps(compose(words)[0], 96).trainer.total_steps == 3
    assert with_epochs_as_steps(compose([*words, "trainer.reuse.groups=8"])[0], 96).trainer.total_steps == 4
