"""Tests that settings are refused before any worker starts if the chosen algorithm functions do not support them."""

import re
from contextlib import contextmanager

import pytest

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, columns_of
from rltrain.base.errors import ConfigError
from rltrain.settings.algorithm_rules import ALIASES, check_algorithm, needs_critic
from rltrain.settings.compose import compose
from rltrain.settings.config_groups import choices
from tests.presets import preset

# Estimators that give credit to the turns of a conversation.
IN_TURNS = ["gigpo", "turn_gae", "turn_rloo"]
GAME = "rollout.environment=rltrain.environments.higher_lower:HigherLower"


def choice_of(estimator):
    """Return the overrides that select an estimator, with an environment if the estimator needs one."""
    return [f"advantage_estimator={estimator}", *([GAME] if estimator in IN_TURNS else [])]


def config_of(*overrides):
    whole = ("rollout.", "critic.", "reward.")
    return compose([text if text.startswith(whole) else f"algorithm.{text}" for text in overrides])[0]


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        check_algorithm(config_of(*overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


def accepted(*overrides):
    check_algorithm(config_of(*overrides))


def test_the_budget_of_a_critic_counts_where_there_is_one():
    small = "critic.max_tokens_per_microbatch=31"
    check_algorithm(compose(["algorithm=grpo", small])[0])
    with pytest.raises(ConfigError, match=r"^critic\.max_tokens_per_microbatch=31 is below .* use at least 32$"):
        check_algorithm(compose(["algorithm=ppo", small])[0])


@pytest.mark.parametrize("name", choices("algorithm"))
def test_every_preset_passes(name):
    check_algorithm(compose(preset(name))[0])


@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
def test_every_loss_passes_with_its_defaults(loss):
    accepted(f"loss_mode={loss}")


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_every_estimator_passes_with_its_defaults(estimator):
    accepted(*choice_of(estimator))


@pytest.mark.parametrize("estimator", IN_TURNS)
def test_credit_per_turn_without_an_environment_is_refused(estimator):
    assert refusal(f"advantage_estimator={estimator}") == (
        f"algorithm.advantage_estimator={estimator} gives credit to the turns of a conversation, but each answer of "
        "this run has one turn; set rollout.environment, rollout.tools or rollout.agent, or use another estimator"
    )
    accepted(f"advantage_estimator={estimator}", "rollout.tools=[my_tools.py:price]")


def test_estimators_that_give_credit_to_turns_are_those_that_read_the_turn():
    names = ADVANTAGE_ESTIMATORS.names()
    assert [name for name in names if "turn_index" in columns_of(ADVANTAGE_ESTIMATORS.get(name))] == IN_TURNS


# Tests of the names and options of algorithm functions


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["loss_mode=vanila"],
            "algorithm.loss_mode=vanila: unknown policy loss; the nearest is 'vanilla', and all names are",
        ),
        (["advantage_estimator=gea"], "algorithm.advantage_estimator=gea: unknown advantage estimator; the nearest is"),
        (["loss_mode=zzz"], "algorithm.loss_mode=zzz: unknown policy loss; use one of "),
        (
            ["kl_loss.kl_estimator=ful"],
            "kl_loss.kl_estimator=ful: unknown KL estimator; the nearest is 'full', and all",
        ),
        (["kl_in_reward.kl_estimator=k9"], "algorithm.kl_in_reward.kl_estimator=k9: unknown KL estimator; use one of "),
        (
            ["loss.clip=0.2"],
            "algorithm.loss.clip=0.2: 'vanilla' has no such knob; it takes clip_ratio_low, clip_ratio_",
        ),
        (
            ["loss_mode=clip_cov", "loss.clip=1"],
            "algorithm.loss.clip=1: 'clip_cov' has no such knob; it takes clip_rati",
        ),
        (
            ["loss_mode=clip_cov", "loss.kl_cov_ratio=0.1"],
            "algorithm.loss.kl_cov_ratio=0.1: 'clip_cov' has no such knob",
        ),
        (
            ["loss.clip_ratio_low=wide"],
            "algorithm.loss.clip_ratio_low='wide': 'vanilla' expects a float here, like its",
        ),
        (["loss.clip_ratio_low=true"], "algorithm.loss.clip_ratio_low=True: 'vanilla' expects a float here"),
        (
            ["loss_mode=clip_cov", "loss.clip_cov_lb=low"],
            "algorithm.loss.clip_cov_lb='low': 'clip_cov' expects a float",
        ),
        (["loss.clip_ratio_low=-1"], "algorithm.loss.clip_ratio_low=-1 must be >= 0"),
        (["loss_mode=clip_cov", "loss.clip_cov_ratio=2"], "algorithm.loss.clip_cov_ratio=2"),
        (["loss_mode=clip_cov", "loss.clip_cov_lb=9"], "algorithm.loss.clip_cov_lb=9 must be <= clip_cov_ub=5.0; swap"),
        (["loss_mode=top_entropy", "loss.entropy_fraction=0"], "algorithm.loss.entropy_fraction=0"),
        (
            ["advantage.norm_by_std=1"],
            "algorithm.advantage.norm_by_std=1: 'grpo' expects a bool here, like its default",
        ),
        (["advantage.lam=1.0"], "algorithm.advantage.lam=1.0: 'grpo' has no such knob; it takes norm_by_std; remove"),
        (
            ["advantage_estimator=rloo", "advantage.k=1"],
            "algorithm.advantage.k=1: 'rloo' has no such knob; it takes non",
        ),
        (["advantage_estimator=gae", "advantage.gamma=2"], "algorithm.advantage.gamma=2 must be in [0, 1]"),
        (
            ["advantage_estimator=gdpo", "advantage.weights=[1.0,2.0]"],
            "algorithm.advantage.weights has shape (2,) for 1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_name_or_knob_and_a_bad_value_are_refused_with_what_would_do(overrides, message):
    assert message in refusal(*overrides)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_names_the_function_that_was_meant(alias, name):
    if name in POLICY_LOSSES.names():
        key, kind = "loss_mode", "policy loss"
    else:
        key, kind = "advantage_estimator", "advantage estimator"
    said = f"algorithm.{key}={alias}: unknown {kind}; the nearest is '{name}', and all names are "
    assert refusal(f"{key}={alias}").startswith(said)


def test_aliases_are_what_presets_and_papers_call_their_functions():
    assert ALIASES == {
        "ppo": "vanilla", "ppo_clip": "vanilla", "grpo": "vanilla", "dapo": "vanilla", "dr_grpo": "grpo",
        "gmpo": "geo_mean", "otb": "optimal_token_baseline", "reinforce++": "reinforce_plus_plus",
    }  # fmt: skip
    assert refusal("advantage_estimator=gmpo").startswith("algorithm.advantage_estimator=gmpo: unknown")
    # geo_mean is the name of a loss, not of an advantage estimator
    assert "'geo_mean'" not in refusal("advantage_estimator=gmpo")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            "[0.0]",
            "algorithm.advantage.weights=[0.0]: if all weights are 0, nothing is learnt; set at least one above 0",
        ),
        ("[null]", "algorithm.advantage.weights=[None]: 'gdpo' expects a list of numbers here, like its default ()"),
        ("[a]", "algorithm.advantage.weights=['a']: 'gdpo' expects a list of numbers here, like its default ()"),
        ("[true]", "algorithm.advantage.weights=[True]: 'gdpo' expects a list of numbers here, like its default ()"),
        ("1.0", "algorithm.advantage.weights=1.0: 'gdpo' expects a list of numbers here, like its default ()"),
    ],
)
def test_weights_that_weigh_nothing_or_are_no_numbers_are_refused(weights, message):
    assert refusal("advantage_estimator=gdpo", f"advantage.weights={weights}") == message
    accepted("advantage_estimator=gdpo", "advantage.weights=[1]")


def test_a_knob_that_no_tensor_holds_is_refused_in_one_line_with_its_section():
    def overflows(log_probs, old_log_probs, advantages, response_mask, *, power=1.0):
        return log_probs * float(10 ** int(power)), {}

    with registered(POLICY_LOSSES, "overflows", overflows):
        said = refusal("loss_mode=overflows", "loss.power=400")
        assert said.startswith("algorithm.loss: 'overflows' raises an error with the parameters power=400 (")
        accepted("loss_mode=overflows")


# Columns


@contextmanager
def registered(registry, name, function):
    """Context manager that registers a function under `name`, and removes the function at the end."""
    registry.register(name)(function)
    try:
        yield
    finally:
        del registry._entries[name]


def test_a_loss_that_reads_the_references_log_probs_needs_a_term_that_brings_them():
    def towards_reference(log_probs, old_log_probs, advantages, response_mask, ref_log_probs):
        return log_probs - ref_log_probs, {}

    with registered(POLICY_LOSSES, "towards_reference", towards_reference):
        loss = "loss_mode=towards_reference"
        assert refusal(loss) == (
            "algorithm.loss_mode=towards_reference reads ref_log_probs: without a KL term there is no reference model; "
            "set algorithm.kl_loss.kl_loss_coef"
        )
        assert "reads ref_log_probs" in refusal(loss, "kl_loss.kl_loss_coef=0.1", "kl_loss.kl_estimator=full")
        accepted(loss, "kl_loss.kl_loss_coef=0.1")
        accepted(loss, "kl_in_reward.kl_coef=0.1")
    assert "towards_reference" not in POLICY_LOSSES.names()


@pytest.mark.parametrize("column", ["ref_hidden", "full_kl", "rewards"])
def test_a_loss_that_reads_what_no_batch_holds_for_it_is_refused(column):
    made = {}
    exec(f"def reads(log_probs, {column}): return log_probs, {{}}", made)
    with registered(POLICY_LOSSES, "reads", made["reads"]):
        assert refusal("loss_mode=reads") == (
            f"algorithm.loss_mode=reads, advantage_estimator=grpo: one of them reads the column '{column}', which "
            "does not exist in this run; rltrain/batch/data_proto.py lists all columns"
        )


def test_knobs_of_a_loss_and_of_its_selector_are_set_together():
    accepted("loss_mode=clip_cov", "loss.clip_ratio_low=0.1", "loss.clip_cov_ratio=0.01")
    accepted("loss_mode=top_entropy", "loss.entropy_fraction=1.0", "loss.clip_ratio_c=5.0")


def test_each_reward_function_brings_its_weight_to_an_estimator_that_weighs_them():
    two = "reward.functions=[{name: a, path: 'x:y', weight: 2.0}, {name: b, path: 'x:z', weight: 0.5}]"
    gdpo = [two, "algorithm.advantage_estimator=gdpo"]
    check_algorithm(compose(gdpo)[0])
    check_algorithm(compose([*gdpo, "algorithm.advantage.weights=[1.0,3.0]"])[0])
    with pytest.raises(ConfigError, match=r"^algorithm.advantage.weights has shape \(1,\) for 2 components"):
        check_algorithm(compose([*gdpo, "algorithm.advantage.weights=[1.0]"])[0])


@pytest.mark.parametrize("estimator", ["grpo", "gae", "remax", "reinforce"])
def test_rewards_that_are_normalised_in_their_group_need_a_group(estimator):
    settings = [f"algorithm.advantage_estimator={estimator}", "reward.aggregation=normalize_then_sum"]
    message = r"^rollout\.samples_per_prompt=1: .* compares the answers to one prompt, so all advantages would be 0"
    with pytest.raises(ConfigError, match=message):
        check_algorithm(compose([*settings, "rollout.samples_per_prompt=1"])[0])
    if estimator == "remax":
        with pytest.raises(ConfigError, match=r"normalize_then_sum with remax: the baseline is the score of a single"):
            check_algorithm(compose(settings)[0])
    else:
        check_algorithm(compose(settings)[0])


# KL


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_straight_through_form_has_no_place_in_a_reward(estimator):
    assert refusal(f"kl_in_reward.kl_estimator={estimator}+") == (
        f"algorithm.kl_in_reward.kl_estimator={estimator}+: the '+' changes only the gradient of the estimate, and a "
        f"reward has no gradient; use {estimator}"
    )
    accepted(f"kl_in_reward.kl_estimator={estimator}", "kl_in_reward.kl_coef=0.1")


def test_k1_alone_teaches_nothing_as_a_loss():
    k1 = ["kl_loss.kl_estimator=k1", "kl_loss.kl_loss_coef=0.1"]
    assert refusal(*k1) == (
        "algorithm.kl_loss.kl_estimator=k1: the expected gradient of k1 is zero, so k1 only adds noise; use k1+, "
        "k3, or ratio_weighted=true"
    )
    accepted(*k1, "kl_loss.ratio_weighted=true")
    accepted(k1[0])
    for other in ("k1+", "k2", "k3", "abs", "full"):
        accepted(f"kl_loss.kl_estimator={other}", k1[1])


REFRESH = "reference.refresh_every=10"


def test_a_reference_is_updated_only_where_there_is_one():
    said = refusal(REFRESH)
    assert said == (
        "algorithm.reference.refresh_every=10: without a KL term there is no reference model to update; set "
        "algorithm.kl_loss.kl_loss_coef or kl_in_reward.kl_coef, or refresh_every=0"
    )
    for kl in ("kl_loss.kl_loss_coef=0.1", "kl_in_reward.kl_coef=0.1"):
        accepted(REFRESH, kl)
        accepted(REFRESH, kl, "reference.refresh_coef=0.5")
    assert "there is no reference model to update" in refusal(REFRESH, "kl_loss.kl_estimator=full")


def test_the_reference_of_adapters_is_not_updated():
    with pytest.raises(ConfigError) as error:
        check_algorithm(
            compose(["model.lora={rank:4}", f"algorithm.{REFRESH}", "algorithm.kl_loss.kl_loss_coef=0.1"])[0]
        )
    assert str(error.value) == (
        "algorithm.reference.refresh_every=10 with model.lora: the reference is the base model without adapters, and "
        "the actor's adapters cannot be merged into it without rounding; use model.lora=null, or refresh_every=0"
    )


def test_gdpo_reads_no_token_rewards_so_none_may_be_changed():
    gdpo = "advantage_estimator=gdpo"
    assert refusal(gdpo, "kl_in_reward.kl_coef=0.1") == (
        "algorithm.kl_in_reward.kl_coef=0.1: gdpo reads the score of each reward function and not the token rewards, "
        "which contain the KL penalty; use algorithm.kl_loss"
    )
    accepted(gdpo, "kl_loss.kl_loss_coef=0.1")
    for setting in (
        "reward_shaping.bias=1", "reward_shaping.scale=2", "reward_shaping.clip=1", "reward_shaping.overlong_buffer=4",
        "reward_normalization.mean_level=batch", "reward_normalization.std_level=group",
    ):  # fmt: skip
        assert refusal(gdpo, setting) == (
            "algorithm.reward_shaping or reward_normalization with gdpo: this estimator reads the score of each "
            "reward function, not the shaped sum of the scores; shape the scores in the functions"
        ), setting
        accepted(setting)
    gate = "reward.functions=[{path: 'x:y'}, {path: 'x:z', name: form, gate: true}]"
    aggregations = [f"reward.aggregation={name}" for name in ("normalize_then_sum", "x.py:y")]
    for setting in (gate, *aggregations):
        found = "gate=true of reward function 'form'" if setting is gate else setting
        with pytest.raises(
            ConfigError, match=f"^{re.escape(found)} with gdpo: this estimator adds up the .*functions itself"
        ):
            check_algorithm(compose([setting, f"algorithm.{gdpo}"])[0])
        check_algorithm(compose([setting])[0])
    # the overlong penalty is off, because the config has no overlong buffer
    accepted(gdpo, "reward_shaping.overlong_penalty=2")
    accepted(gdpo, "advantage_normalization.std_level=batch", "suppress_truncated=true")


@pytest.mark.parametrize(
    "setting",
    [
        "reward_shaping.bias=1", "reward_shaping.overlong_buffer=4", "reward_shaping.group_length_weight=0.1",
        "reward_normalization.mean_level=batch",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["w_reinforce", "gtpo", "grpo_s"])
def test_an_estimator_that_reads_only_successes_takes_no_change_of_scores(name, setting):
    assert refusal(f"advantage_estimator={name}", setting) == (
        f"algorithm.reward_shaping or reward_normalization with {name}: this estimator reads only whether an "
        "answer is correct, so these settings would have no effect; remove them"
    )
    accepted(f"advantage_estimator={name}", "advantage_normalization.std_level=batch")


def test_a_length_reward_needs_other_answers_to_the_same_prompt_to_compare_with():
    weight = "reward_shaping.group_length_weight=0.1"
    accepted(weight)
    message = "algorithm.reward_shaping.group_length_weight compares the answers to one prompt"
    assert message in refusal(weight, "advantage_estimator=reinforce", "rollout.samples_per_prompt=1")
    assert refusal(weight, "advantage_estimator=remax") == (
        "algorithm.reward_shaping.group_length_weight=0.1 with remax: the length reward compares several answers "
        "to a prompt, but the baseline is the score of a single greedy answer; use "
        "algorithm.reward_shaping.overlong_buffer"
    )


def test_an_estimator_that_reads_only_successes_takes_no_kl_penalty_in_the_reward():
    assert refusal("advantage_estimator=w_reinforce", "kl_in_reward.kl_coef=0.1") == (
        "algorithm.kl_in_reward.kl_coef=0.1: w_reinforce reads only whether an answer is correct and not the token "
        "rewards, which contain the KL penalty; use algorithm.kl_loss"
    )
    accepted("advantage_estimator=w_reinforce", "kl_loss.kl_loss_coef=0.1")


def test_maxrl_divides_by_the_mean_score_so_settings_that_lower_scores_are_refused():
    maxrl = "advantage_estimator=maxrl"
    for setting in (
        "reward_shaping.bias=-0.5", "reward_shaping.scale=-1", "reward_shaping.overlong_buffer=4",
        "reward_shaping.group_length_weight=0.1", "reward_normalization.mean_level=batch",
        "reward_normalization.std_level=group", "kl_in_reward.kl_coef=0.1",
    ):  # fmt: skip
        assert refusal(maxrl, setting) == (
            "algorithm.advantage_estimator=maxrl with reward_normalization, a KL penalty, or shaping that "
            "lowers or negates scores: the estimator divides by the mean score of the group, so scores must be >= 0; "
            "turn off the settings that can make scores negative, or use algorithm.kl_loss for a KL term"
        ), setting
        accepted(setting)
    accepted(maxrl, "reward_shaping.bias=1", "reward_shaping.scale=2", "reward_shaping.clip=5")
    accepted(maxrl, "kl_loss.kl_loss_coef=0.1", "suppress_truncated=true")


# Tests of truncated answers whose return ends with the critic's value

CONTRADICTIONS = [
    ([], "with grpo: this estimator has no critic"),
    (["advantage_estimator=gae", "suppress_truncated=true"], "with suppress_truncated=true: bootstrap_truncated add"),
    (["advantage_estimator=gae", "mask_truncated=true"], "with mask_truncated=true: no token of a truncated answer is"),
    (
        ["advantage_estimator=gae", "advantage={gamma:0.0}"],
        "with algorithm.advantage.gamma=0: the critic's value is multiplied",
    ),
]


@pytest.mark.parametrize(("settings", "message"), CONTRADICTIONS)
def test_H1_a_cut_answer_that_could_not_end_with_a_value_is_refused(settings, message):
    assert refusal("bootstrap_truncated=true", *settings).startswith(f"algorithm.bootstrap_truncated=true {message}")
    accepted(*settings)


def test_a_cut_answer_that_is_in_no_statistic_may_end_with_a_value():
    reward = "reward_normalization.mean_level=batch"
    accepted("bootstrap_truncated=true", "advantage_estimator=gae", "exclude_truncated=true", reward)


# Tests of the critic's warm-up, and of the loss of correct answers


def test_H1_a_warm_up_without_a_critic_is_refused():
    assert refusal("critic.warmup_steps=3") == (
        "critic.warmup_steps=3 with grpo: this estimator has no critic to warm up; use critic.warmup_steps=0, or "
        "algorithm=ppo"
    )
    for estimator in ("gae", "decoupled_gae", "length_adaptive_gae"):
        accepted(f"advantage_estimator={estimator}", "critic.warmup_steps=3")


NLL = "positive_nll_coef=0.1"


@pytest.mark.parametrize(
    "reward",
    [
        ["reward.functions=[{path: length_penalty, outcome: true}]"],
        ["reward.functions=[json_schema,rltrain.rewards.length:length_penalty]"],
        ["reward.functions=[]", "reward.models=[rm]"],
        ["reward.functions=[{path: exact_answer, success: null}]"],
    ],
)
def test_H1_the_loss_of_correct_answers_is_refused_if_nothing_can_say_which_answers_are_correct(reward):
    assert refusal(NLL, *reward) == (
        "algorithm.positive_nll_coef=0.1: no reward function or model decides whether an answer is correct, so the "
        "term would be 0; set `success` for one of them, or use algorithm.positive_nll_coef=0"
    )
    accepted(*reward)


@pytest.mark.parametrize(
    "reward",
    [
        [],
        ["reward.functions=[exact_answer,length_penalty]"],
        ["reward.functions=[{path: json_schema, success: 1}]"],
        ["reward.functions=[my.py:score]"],  # a user's function may return RewardResult.success
        ["reward.functions=[]", "reward.models=[{path: rm, success: 0.5}]"],
    ],
)
def test_the_loss_of_correct_answers_is_accepted_if_something_may_say_which_answers_are_correct(reward):
    accepted(NLL, *reward)


# Tests of the rejection's bounds on the log-prob difference between engine and actor


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_a_lower_bound_is_refused_where_values_are_never_negative(estimator):
    rejection = [f"rejection.kl_estimator={estimator}", "rejection.upper=0.5"]
    assert refusal(*rejection, "rejection.lower=-0.1").startswith(
        f"algorithm.rejection.lower=-0.1 with kl_estimator='{estimator}': the estimator is never negative, so a lower"
    )
    accepted(*rejection)
    accepted("rejection.kl_estimator=k1", "rejection.lower=-0.1")


def test_bounds_of_the_rejection_must_let_data_that_agree_through():
    assert refusal("rejection.kl_estimator=k1", "rejection.upper=-0.1").startswith(
        "algorithm.rejection.lower=None, upper=-0.1: lower <= 0 <= upper must hold"
    )


# Groups


# Advantage estimators that read the column `uid`, because they compare the answers to one prompt.
IN_GROUPS = [
    "gdpo", "gigpo", "gpg", "grpo", "grpo_passk", "grpo_s", "gtpo", "maxrl", "opo", "optimal_token_baseline",
    "reinforce_plus_plus_baseline", "rloo", "turn_rloo",
]  # fmt: skip


def test_estimators_that_compare_in_groups_are_those_that_read_the_group():
    names = ADVANTAGE_ESTIMATORS.names()
    assert [name for name in names if "uid" in columns_of(ADVANTAGE_ESTIMATORS.get(name))] == IN_GROUPS
    assert {n for n in names if ADVANTAGE_ESTIMATORS.metadata(n)["statistics"] == "group"} <= set(IN_GROUPS)


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_one_sample_a_prompt_is_refused_exactly_where_answers_are_compared_in_groups(estimator):
    settings = [*choice_of(estimator), "rollout.samples_per_prompt=1"]
    if estimator in IN_GROUPS:
        assert refusal(*settings) == (
            f"rollout.samples_per_prompt=1: {estimator} compares the answers to one prompt, so all advantages would be "
            "0; use at least 2"
        )
    else:
        accepted(*settings)
    accepted(*choice_of(estimator), "rollout.samples_per_prompt=2")


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
@pytest.mark.parametrize("setting", ["reward_normalization.mean_level=group", "reward_normalization.std_level=group"])
def test_one_sample_a_prompt_has_no_group_for_what_needs_one(setting, estimator):
    assert refusal(f"advantage_estimator={estimator}", setting, "rollout.samples_per_prompt=1").startswith(
        f"rollout.samples_per_prompt=1: algorithm.{setting} compares the answers to one prompt"
    )
    accepted(f"advantage_estimator={estimator}", setting)


@pytest.mark.parametrize("setting", ["mean_level=group", "std_level=group"])
def test_one_sample_a_prompt_has_no_group_of_advantages_unless_a_critic_tells_its_tokens_apart(setting):
    one, setting = "rollout.samples_per_prompt=1", f"advantage_normalization.{setting}"
    for estimator in ("reinforce", "remax", "reinforce_plus_plus"):
        assert refusal(f"advantage_estimator={estimator}", setting, one).startswith(
            f"rollout.samples_per_prompt=1: algorithm.{setting} compares the answers to one prompt, so all advantages"
        )
        accepted(f"advantage_estimator={estimator}", setting)
        accepted(f"advantage_estimator={estimator}", setting.replace("group", "batch"), one)
    accepted("advantage_estimator=gae", setting, one)


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_dynamic_sampling_drops_groups_so_it_is_for_estimators_that_compare_in_groups(estimator):
    settings = [*choice_of(estimator), "dynamic_sampling=2"]
    if estimator in IN_GROUPS:
        accepted(*settings)
        return
    assert refusal(*settings) == (
        f"algorithm.dynamic_sampling=2 with {estimator}: this estimator also learns from groups whose answers "
        "all have the same outcome, which dynamic sampling drops; use algorithm.dynamic_sampling=0"
    )
    assert refusal(*settings, "rollout.samples_per_prompt=1").startswith(
        "rollout.samples_per_prompt=1: algorithm.dynamic_sampling compares the answers to one prompt"
    )


# Tests of configs in which reward scores would not affect the advantages


def test_a_greedy_baseline_and_normalised_scores_would_be_on_two_scales():
    remax = "advantage_estimator=remax"
    for level in ("mean_level=batch", "std_level=batch"):
        assert refusal(remax, f"reward_normalization.{level}") == (
            "algorithm.reward_normalization with remax: the baseline (the score of a greedy answer) is not normalised, "
            "so scores and baseline would be on different scales; use algorithm.advantage_normalization"
        )
        accepted(remax, f"advantage_normalization.{level}")
    accepted(remax, "reward_shaping.scale=2")


def test_suppressing_and_excluding_say_the_same_twice():
    assert refusal("suppress_truncated=true", "exclude_truncated=true") == (
        "algorithm.exclude_truncated=true with suppress_truncated=true: suppress_truncated includes exclude_truncated; "
        "set only one of them"
    )


def test_excluding_needs_a_statistic_to_be_excluded_from():
    gae = ["advantage_estimator=gae", "exclude_truncated=true"]
    assert refusal(*gae) == (
        "algorithm.exclude_truncated=true with gae and no normalisation: the run computes no score "
        "statistics, so exclude_truncated has no effect; use suppress_truncated or mask_truncated"
    )
    accepted(*gae, "advantage_normalization.std_level=batch")
    accepted(*gae, "reward_normalization.mean_level=batch")
    accepted("exclude_truncated=true")
    accepted("advantage_estimator=gae", "suppress_truncated=true")


def test_only_estimators_that_read_values_need_a_critic():
    found = [
        name
        for name in ADVANTAGE_ESTIMATORS.names()
        if needs_critic(config_of(f"advantage_estimator={name}").algorithm)
    ]
    assert found == ["decoupled_gae", "gae", "length_adaptive_gae", "turn_gae"]


def test_a_loss_that_reads_the_engines_log_probs_is_refused_with_top_p_or_top_k():
    def reading(log_probs, old_log_probs, advantages, response_mask, rollout_log_probs):
        return -advantages * log_probs, {}

    POLICY_LOSSES.register("reading")(reading)
    try:
        check_algorithm(compose(["algorithm.loss_mode=reading"])[0])
        with pytest.raises(ConfigError, match=r"^rollout.top_k=5 with algorithm.loss_mode=reading, .* the two reads"):
            check_algorithm(compose(["algorithm.loss_mode=reading", "rollout.top_k=5"])[0])
    finally:
        del POLICY_LOSSES._entries["reading"]


def test_a_selector_that_compares_actor_and_engine_needs_the_actors_old_log_probs():
    accepted("loss_mode=m2po")
    assert refusal("loss_mode=m2po", "old_log_probs=rollout") == (
        "algorithm.old_log_probs=rollout with loss_mode=m2po: the loss selects tokens by the ratio of the "
        "actor's to the engine's probability, which would always be 1; use algorithm.old_log_probs=actor"
    )
    accepted("loss_mode=kl_cov", "old_log_probs=rollout")


# Tests of the supervised loss


def test_a_supervised_loss_needs_answers_and_answers_need_a_supervised_loss():
    coef, answers = "algorithm.sft_coef=0.5", "data.sft_response={solution} #{answer}"
    check_algorithm(compose([coef, answers])[0])
    found = []
    for override in (coef, answers):
        with pytest.raises(ConfigError) as error:
            check_algorithm(compose([override])[0])
        found.append(str(error.value))
    assert found == [
        "algorithm.sft_coef=0.5 with data.sft_response=null: there are no supervised answers to train on; name the "
        "column that holds them, as in data.sft_response=solution, or set algorithm.sft_coef=0",
        "data.sft_response={solution} #{answer} with algorithm.sft_coef=0: nothing would be learned from supervised "
        "answers; set algorithm.sft_coef above 0, or data.sft_response=null",
    ]


@pytest.mark.parametrize("name", choices("algorithm"))
def test_every_preset_goes_with_a_supervised_loss(name):
    check_algorithm(compose(preset(name, "algorithm.sft_coef=0.1", "data.sft_response=answer"))[0])
