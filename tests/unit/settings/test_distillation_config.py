"""Tests of the settings of distillation: short forms, and settings that contradict each other or cannot act."""

import pytest

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, columns_of
from rltrain.base.errors import ConfigError
from rltrain.settings.algorithm_rules import check_algorithm
from rltrain.settings.compose import compose
from rltrain.settings.distillation_config import DEMONSTRATION_TEMPLATE
from rltrain.trajectories.token_rewards import reads_actor_pass
from tests.presets import GAME

DISTILLATION = "algorithm.distillation"
URL = "http://127.0.0.1:8000/v1"
TWO = [f"{DISTILLATION}.teachers=[a/math,b/code]", f"{DISTILLATION}.teacher_column=domain"]
ONE = f"{DISTILLATION}.teachers=[a/math]"


def distillation_of(*overrides):
    return compose(overrides)[0].algorithm.distillation


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        check_algorithm(compose(overrides)[0])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_path_alone_is_a_teacher_that_has_the_last_part_of_the_path_as_its_name():
    settings = distillation_of(
        "algorithm=mopd",
        f"{DISTILLATION}.teachers=[runs/math/model,org/code@v1,{URL},reference,{{name: x, path: /d}}]",
        f"{DISTILLATION}.teacher_column=domain",
    )
    found = [(one.name, one.path, one.is_endpoint, one.is_model) for one in settings.teachers]
    assert found == [
        ("model", "runs/math/model", False, True),
        ("code", "org/code@v1", False, True),
        ("127.0.0.1:8000", URL, True, False),
        ("reference", "reference", False, False),
        ("x", "/d", False, True),
    ]
    assert [one.prompt_template for one in settings.teachers] == [None, None, None, DEMONSTRATION_TEMPLATE, None]
    assert [one.name for one in settings.models] == ["model", "code", "x"]


def test_teachers_on_the_ranks_are_roles_and_the_reference_is_the_one_that_there_is():
    teachers = f"{DISTILLATION}.teachers=[a/math,reference,{URL}]"
    config = compose(["algorithm=mopd", teachers, f"{DISTILLATION}.teacher_column=domain"])[0]
    assert config.roles(needs_critic=False) == ["actor", "reference", "teacher math"]
    assert (config.algorithm.needs_reference, config.algorithm.has_reference_kl) == (True, False)
    both = compose(["algorithm=mopd", ONE, "algorithm.kl_loss.kl_loss_coef=0.1"])[0]
    assert both.roles(needs_critic=False) == ["actor", "reference", "teacher math"]
    assert both.algorithm.has_reference_kl


@pytest.mark.parametrize(
    ("overrides", "properties"),
    [
        ([], (False, False, False, False)),
        (["algorithm=distill", ONE], (False, True, True, True)),
        (["algorithm=distill", ONE, f"{DISTILLATION}.kl=sampled"], (False, True, False, True)),
        (["algorithm=distill", ONE, f"{DISTILLATION}.outcome_coef=0.5"], (False, True, True, False)),
        (["algorithm=mopd", *TWO], (True, False, False, False)),
        (["algorithm=mopd", *TWO, f"{DISTILLATION}.outcome_coef=0"], (True, False, False, True)),
    ],
)
def test_what_is_on(overrides, properties):
    found = distillation_of(*overrides)
    assert (found.in_reward, found.in_loss, found.full, found.alone) == properties


def test_the_log_ratio_needs_the_actors_log_probs_before_the_update():
    assert reads_actor_pass(compose(["algorithm=mopd", ONE])[0])
    assert not reads_actor_pass(compose(["algorithm=distill", ONE])[0])
    assert not reads_actor_pass(compose(["algorithm=mopd", ONE, "algorithm.old_log_probs=rollout",
                                         "algorithm.correction.level=null", "algorithm.correction.lower=null",
                                         "algorithm.correction.upper=null"])[0])  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=distill"], "mode=loss without teachers: nothing could be distilled; name a teacher, as in "),
        ([ONE], "teachers=[math] with mode=null: the teachers would not be used; set "),
        ([f"{DISTILLATION}.outcome_coef=0"], "outcome_coef=0.0, teacher_column=None with mode=null: "),
        ([f"{DISTILLATION}.teacher_column=x"], "outcome_coef=1.0, teacher_column=x with mode=null: "),
        (["algorithm=mopd", TWO[0]], "teachers=[math, code] without teacher_column: the data does not say wh"),
        (["algorithm=mopd", ONE, f"{DISTILLATION}.kl=full"], "kl=full with mode=reward: the exact KL of a position "),
        (["algorithm=distill", f"{DISTILLATION}.teachers=[{URL}]"], f"kl=full with the endpoint {URL}: an endpoint "),
        (
            ["algorithm=mopd", f"{DISTILLATION}.teachers=[a/m,b/m]", TWO[1]],
            "teachers: two teachers are named 'm'; give each",
        ),
        (
            ["algorithm=mopd", f"{DISTILLATION}.teachers=[{{name: a b, path: m}}]"],
            "teachers: name 'a b': the name is part",
        ),
        (["algorithm=mopd", f"{DISTILLATION}.teachers=[{{name: '', path: m}}]"], "teachers: name '': the name is part"),
        (["algorithm=mopd", ONE, f"{DISTILLATION}.coef=0"], "coef must be > 0, got 0"),
        (["algorithm=mopd", ONE, f"{DISTILLATION}.mode=both"], "mode=both: unknown choice; use one of reward, loss"),
        (["algorithm=mopd", f"{DISTILLATION}.teachers=m"], "teachers=m: must be a list, as in "),
        (["algorithm=mopd", f"{DISTILLATION}.teachers=[{{name: m}}]"], "teachers: {'name': 'm'} names no teacher; "),
        (
            ["algorithm=mopd", f"{DISTILLATION}.teachers=[{{path: m, model: x}}]"],
            "teachers[0].model=x with path=m: only an endpoint has this setting; leave model out",
        ),
        (
            ["algorithm=mopd", f"{DISTILLATION}.teachers=[{{path: m, api_key_env: X}}]"],
            "teachers[0].api_key_env=X with path=m: only an endpoint has this setting",
        ),
        (
            ["algorithm=mopd", f"{DISTILLATION}.teachers=[{{path: reference, prompt_template: null}}]"],
            "teachers[0].path=reference without prompt_template: this teacher would only pull the policy back",
        ),
        (
            ["algorithm=mopd", f"{DISTILLATION}.teachers=[{{path: m, prompt_template: '{{x}}'}}]"],
            "teachers[0].prompt_template='{x}': the template has no {prompt}; add {prompt}",
        ),
        (
            ["algorithm=mopd", f"{DISTILLATION}.teachers=[{URL}]", "rollout.temperature=0.7"],
            f"rollout.temperature=0.7 with the endpoint {URL}: an endpoint gives log-probs at temperature 1",
        ),
        (["algorithm=mopd", ONE, "algorithm.dynamic_sampling=2"], "algorithm.dynamic_sampling=2 with distillation: "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(overrides, message):
    assert refusal(*overrides).removeprefix(f"{DISTILLATION}.").startswith(message)


ALONE = [
    "algorithm.advantage_estimator=gae", "algorithm.advantage.norm_by_std=false", "algorithm.reward_shaping.scale=2",
    "algorithm.reward_shaping.group_length_weight=0.1", "algorithm.reward_normalization.mean_level=batch",
    "algorithm.advantage_normalization.std_level=batch", "algorithm.kl_in_reward.kl_coef=0.1",
    "algorithm.suppress_truncated=true", "algorithm.exclude_truncated=true", "reward.aggregation=normalize_then_sum",
]  # fmt: skip
NO_POLICY_LOSS = [
    "algorithm.advantage_clip=5", "algorithm.correction.level=token", "algorithm.loss.clip_ratio_low=0.1",
]  # fmt: skip


@pytest.mark.parametrize("override", ALONE)
def test_H1_what_only_changes_the_rewards_advantage_is_refused_where_the_teachers_teach_alone(override):
    expected = "with algorithm.distillation.outcome_coef=0: the policy learns from the teachers alone"
    assert expected in refusal("algorithm=distill", ONE, override)
    check_algorithm(compose(["algorithm=mopd", ONE, override])[0])


@pytest.mark.parametrize("override", NO_POLICY_LOSS)
def test_H1_what_only_changes_the_policy_loss_is_refused_where_there_is_none(override):
    words = ["algorithm=distill", ONE, "algorithm.loss_mode=vanilla"]
    assert "with algorithm.distillation.outcome_coef=0" in refusal(*words, override)
    check_algorithm(compose([*words, override, f"{DISTILLATION}.outcome_coef=0.5"])[0])


CHOICES = {
    "advantage_estimator": ("grpo", set(ADVANTAGE_ESTIMATORS.names()) - {"grpo"}),
    # The quadratic penalty of dro acts without advantages.
    "loss_mode": ("reinforce", set(POLICY_LOSSES.names()) - {"reinforce", "dro"}),
    "old_log_probs": ("actor", {"rollout"}),
}


@pytest.mark.parametrize(("key", "value"), [(key, one) for key, (_, dead) in CHOICES.items() for one in sorted(dead)])
def test_H1_a_choice_that_cannot_act_where_the_teachers_teach_alone_is_refused(key, value):
    message = refusal("algorithm=distill", ONE, f"algorithm.{key}={value}", *GAME)
    if key == "advantage_estimator" and "values" in columns_of(ADVANTAGE_ESTIMATORS.get(value)):
        assert message.startswith(f"algorithm.advantage_estimator={value} (needs a critic) with algorithm.distillation")
    else:
        assert message == (
            f"algorithm.{key}={value} with algorithm.distillation.outcome_coef=0: the policy learns from the teachers "
            f"alone, so this choice would have no effect; use algorithm.{key}={CHOICES[key][0]}, or set "
            "algorithm.distillation.outcome_coef above 0"
        )
    check_algorithm(compose(["algorithm=distill", ONE, f"algorithm.{key}={CHOICES[key][0]}"])[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss_mode=m2po", f"{DISTILLATION}.outcome_coef=0.5"],
        ["algorithm.advantage_estimator=rloo", f"{DISTILLATION}.outcome_coef=0.5"],
        ["algorithm.old_log_probs=rollout", f"{DISTILLATION}.outcome_coef=0.5"],
        # Both KL estimates are multiplied by pi / pi_old.
        ["algorithm.old_log_probs=rollout", f"{DISTILLATION}.kl=sampled"],
        [
            "algorithm.old_log_probs=rollout",
            "algorithm.kl_loss.kl_loss_coef=0.1",
            "algorithm.kl_loss.ratio_weighted=true",
        ],
        ["algorithm.loss_mode=dro", "algorithm.old_log_probs=rollout"],
        ["algorithm.loss_mode=dro", "algorithm.loss.beta=0.2", "algorithm.correction.level=token"],
        ["algorithm.loss_mode=dro", "algorithm.rejection.kl_estimator=k3", "algorithm.rejection.upper=0.1"],
    ],
)
def test_H1_what_can_act_beside_the_teachers_is_accepted(overrides):
    check_algorithm(compose(["algorithm=distill", ONE, *overrides])[0])


def test_a_penalty_in_the_loss_leaves_the_bound_of_advantages_without_effect():
    assert "advantage_clip=5.0 with" in refusal(
        "algorithm=distill", ONE, "algorithm.loss_mode=dro", "algorithm.advantage_clip=5"
    )


def test_the_log_ratio_of_teachers_alone_is_an_advantage_on_which_every_loss_acts():
    for name in ("m2po", "cispo", "vanilla"):
        check_algorithm(
            compose(["algorithm=mopd", ONE, f"{DISTILLATION}.outcome_coef=0", f"algorithm.loss_mode={name}"])[0]
        )
    message = refusal("algorithm=mopd", ONE, f"{DISTILLATION}.outcome_coef=0", "algorithm.advantage_estimator=rloo")
    assert message.startswith("algorithm.advantage_estimator=rloo with algorithm.distillation.outcome_coef=0")


def test_a_reference_that_teaches_can_follow_the_actor_with_the_exact_kl():
    follow = ["algorithm.reference.refresh_every=1", "algorithm.reference.refresh_coef=0.01"]
    for kl in ("full", "sampled"):
        words = ["algorithm=distill", f"{DISTILLATION}.teachers=[reference]", f"{DISTILLATION}.kl={kl}"]
        check_algorithm(compose([*words, *follow])[0])
    assert "there is no reference model to update" in refusal("algorithm=distill", ONE, *follow)


def test_one_answer_to_a_prompt_is_enough_for_teachers_alone():
    one = "rollout.samples_per_prompt=1"
    check_algorithm(compose(["algorithm=distill", ONE, one])[0])
    assert "compares the answers to one prompt" in refusal("algorithm=mopd", ONE, one)
