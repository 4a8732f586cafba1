"""Tests of each rule of the doctor on both sides of the rule's threshold, and of causes and effects of findings."""

import re
from pathlib import Path

import pytest

from rltrain.monitoring.doctor.diagnosis import RULES, diagnose, table
from rltrain.monitoring.report.run_files import read_run
from tests.doctor_runs import HEALTHY, STEPS, line, run_with, write_samples

ROOT = Path(__file__).parents[4]


def findings(folder, *arguments, **named):
    return diagnose(read_run(run_with(folder, *arguments, **named), texts=False))


def names(folder, *arguments, **named) -> set[str]:
    return {finding.name for finding in findings(folder, *arguments, **named)}


def last(count, value, name=None, before=None):
    """Return one value per step, where the last `count` values are `value`.

    The earlier values are those of the metric `name` in the healthy run, or `before` if no metric name is given.
    """
    rest = HEALTHY[name] if name else [before] * STEPS
    return [*rest[: STEPS - count], *[value] * count]


def at(step, value, name):
    values = list(HEALTHY[name])
    values[step - 1] = value
    return values


def evaluation(step, value, name="eval/sampled_accuracy"):
    return {"step": step, name: value, "eval/sampled_reward": value}


FALLING = {"reward/mean": line(0.6, 0.5), "reward/accuracy": line(0.6, 0.5)}
RISE_AND_FALL = {"reward/mean": [*[0.2] * 5, *[0.6] * 5, *[0.45] * 10], "reward/accuracy": None, "reward/std": 0.1}
STALE = {"rollout/staleness_max": 2.0}
# The metric rises from 0.3 to 0.8: its best mean over 5 steps is 0.8, and its mean over the first 5 steps is 0.3.
LEARNT = [*[0.3] * 5, *[0.8] * 10]

# Each case has the name of a rule, metrics just beyond the rule's threshold, and metrics just within the threshold.
BOTH_SIDES = {
    "1% of the rewards fail": (
        "reward function fails",
        [{"reward/failed_fraction": 0.0101}], [{"reward/failed_fraction": 0.0099}],
    ),
    "half of the answers have no score": (
        "reward never applies",
        [{"reward/unscored_fraction": last(5, 0.51, before=0.0)}],
        [{"reward/unscored_fraction": last(5, 0.49, before=0.0)}],
    ),
    "5 steps without an outcome that differs": (
        "dead reward",
        [{"reward/same_outcome_fraction": last(5, 1.0, before=0.5)}],
        [{"reward/same_outcome_fraction": last(4, 1.0, before=0.5)}],
    ),
    "5 steps without spread of the step's scores": (
        "dead reward",
        [{"reward/std": last(5, 0.0, before=0.4)}, {"algorithm.advantage_estimator": "gae"}],
        [{"reward/std": last(4, 0.0, before=0.4)}, {"algorithm.advantage_estimator": "gae"}],
    ),
    "the reward rises by half a standard deviation and correct answers do not": (
        "reward hacking",
        [{"reward/mean": [*[0.3] * 10, *[0.53] * 10], "reward/accuracy": [*[0.3] * 10, *[0.319] * 10]}],
        [{"reward/mean": [*[0.3] * 10, *[0.52] * 10], "reward/accuracy": [*[0.3] * 10, *[0.319] * 10]}],
    ),
    "correct answers rise by 0.02": (
        "reward hacking",
        [{"reward/accuracy": [*[0.3] * 10, *[0.319] * 10]}], [{"reward/accuracy": [*[0.3] * 10, *[0.321] * 10]}],
    ),
    "the score of the outcome functions does not rise": (
        "reward hacking",
        [{"reward/accuracy": None, "reward/right/mean": 0.5}], [{"reward/accuracy": None}],
    ),
    "the reward falls by half of what was learnt and a standard deviation": (
        "reward fell",
        [{"reward/mean": [*LEARNT, *[0.34] * 5], "reward/accuracy": None}],
        [{"reward/mean": [*LEARNT, *[0.36] * 5], "reward/accuracy": None}],
    ),
    "half of the groups are missing": (
        "too few groups",
        [{"rollout/groups_missing": last(5, 32.0, before=0.0)}],
        [{"rollout/groups_missing": last(5, 31.0, before=0.0)}],
    ),
    "a KL of 0.5 and a lower reward": (
        "learning rate too high",
        [FALLING | {"actor/ppo_kl": at(1, 0.5, "actor/ppo_kl"), "reward/std": 0.1}],
        [FALLING | {"actor/ppo_kl": at(1, 0.49, "actor/ppo_kl"), "reward/std": 0.1}],
    ),
    "a KL of 0.5 before a reward that falls by less than half a standard deviation": (
        "learning rate too high",
        [FALLING | {"actor/ppo_kl": at(1, 0.5, "actor/ppo_kl"), "reward/std": 0.17}],
        [FALLING | {"actor/ppo_kl": at(1, 0.5, "actor/ppo_kl"), "reward/std": 0.19}],
    ),
    "a KL of 0.5 from which the policy recovers, and a later KL of 0.5 before a lower reward": (
        "learning rate too high",
        [RISE_AND_FALL | {"actor/ppo_kl": [0.5, *[0.02] * 8, 0.5, *[0.02] * 10]}],
        [RISE_AND_FALL | {"actor/ppo_kl": [0.5, *[0.02] * 8, 0.49, *[0.02] * 10]}],
    ),
    "a KL of 0.3 in 3 steps": (
        "learning rate too high",
        [{"actor/ppo_kl": last(3, 0.3, before=0.02)}], [{"actor/ppo_kl": last(2, 0.3, before=0.02)}],
    ),
    "a jump of the entropy by 3 where a step has one update": (
        "learning rate too high",
        [FALLING | {"actor/ppo_kl": 0.0, "reward/std": 0.1, "rollout/entropy": [0.6, *[0.199] * 19]}],
        [FALLING | {"actor/ppo_kl": 0.0, "reward/std": 0.1, "rollout/entropy": [0.6, *[0.21] * 19]}],
    ),
    "a jump of the entropy by 3 over two steps where a step has one update": (
        "learning rate too high",
        [FALLING | {"actor/ppo_kl": 0.0, "reward/std": 0.1, "rollout/entropy": [0.6, 0.35, *[0.199] * 18]}],
        [FALLING | {"actor/ppo_kl": 0.0, "reward/std": 0.1, "rollout/entropy": [0.6, 0.35, *[0.21] * 18]}],
    ),
    "one update is skipped": (
        "skipped updates", [{"critic/skipped_updates": at(9, 1.0, "critic/skipped_updates")}], [{}],
    ),
    "the entropy is below 5% for 5 steps": (
        "entropy collapsed",
        [{"rollout/entropy": last(5, 0.0199, before=0.4)}], [{"rollout/entropy": last(5, 0.0201, before=0.4)}],
    ),
    "the entropy is low for 5 steps": (
        "entropy collapsed",
        [{"rollout/entropy": last(5, 0.0, before=0.4)}], [{"rollout/entropy": last(4, 0.0, before=0.4)}],
    ),
    "the entropy doubles": (
        "entropy grows",
        [FALLING | {"rollout/entropy": last(5, 1.61, before=0.8)}],
        [FALLING | {"rollout/entropy": last(5, 1.59, before=0.8)}],
    ),
    "the entropy grows by 0.5 nats": (
        "entropy grows",
        [FALLING | {"rollout/entropy": last(5, 0.71, before=0.2)}],
        [FALLING | {"rollout/entropy": last(5, 0.69, before=0.2)}],
    ),
    "the policy is 1 nat from its reference": (
        "far from the reference",
        [{"actor/ref_kl": last(5, 1.01, before=0.2)}], [{"actor/ref_kl": last(5, 0.99, before=0.2)}],
    ),
    "the critic is no better than a constant": (
        "critic explains nothing",
        [{"critic/explained_variance": last(10, 0.0, before=0.1)}],
        [{"critic/explained_variance": last(10, 0.001, before=0.1)}],
    ),
    "the gap is above its limit and ten times that of the first step": (
        "stale weights",
        [{"rollout/log_prob_gap": last(3, 0.021, before=1e-3)}],
        [{"rollout/log_prob_gap": last(3, 0.019, before=1e-3)}],
    ),
    "the gap is above its limit for 3 steps": (
        "stale weights",
        [{"rollout/log_prob_gap": last(3, 0.1, before=1e-3)}],
        [{"rollout/log_prob_gap": last(2, 0.1, before=1e-3)}],
    ),
    "the gap was large from the first step": (
        "engine and actor differ",
        [{"rollout/log_prob_gap": 0.021}], [{"rollout/log_prob_gap": 0.019}],
    ),
    "stale answers have a gap above the limit": (
        "stale answers without correction",
        [STALE | {"rollout/log_prob_gap": 0.021}], [STALE | {"rollout/log_prob_gap": 0.019}],
    ),
    "stale answers are corrected": (
        "stale answers without correction",
        [STALE | {"rollout/log_prob_gap": 0.03}],
        [STALE | {"rollout/log_prob_gap": 0.03}, {"algorithm.correction.level": "token"}],
    ),
    "half of the tokens remain after weighting": (
        "answers too old",
        [STALE | {"rollout/effective_sample_size": last(5, 0.49, before=0.9)}],
        [STALE | {"rollout/effective_sample_size": last(5, 0.51, before=0.9)}],
    ),
    "half of the answers are cut": (
        "answers cut",
        [{"rollout/truncated_fraction": last(3, 0.5, before=0.1)}],
        [{"rollout/truncated_fraction": last(3, 0.49, before=0.1)}],
    ),
    "answers are cut for 3 steps": (
        "answers cut",
        [{"rollout/truncated_fraction": last(3, 1.0, before=0.1)}],
        [{"rollout/truncated_fraction": last(2, 1.0, before=0.1)}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH_SIDES)
def test_a_rule_speaks_beyond_its_threshold_and_not_within_it(tmp_path, case):
    name, beyond, within = BOTH_SIDES[case]
    for folder, arguments, expected in (("beyond", beyond, {name}), ("within", within, set())):
        metrics, config = (*arguments, None)[:2]
        assert names(tmp_path / folder, metrics, config=config) == expected


def test_every_rule_has_a_case_from_both_sides():
    elsewhere = {"evaluation got worse"}
    assert {rule.name for rule in RULES} == {name for name, _, _ in BOTH_SIDES.values()} | elsewhere


def test_a_run_that_learns_has_no_finding_at_any_of_its_steps(tmp_path):
    for steps in range(STEPS + 1):
        assert names(tmp_path / str(steps), steps=steps) == set()


# Evaluations


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [(0.9, 0.84, True), (0.9, 0.86, False), (0.5, 0.42, True), (0.5, 0.44, False)],
)  # With 400 prompts, two standard errors of the difference are 0.042 at accuracy 0.9 and 0.071 at accuracy 0.5.
def test_an_accuracy_that_falls_by_5_points_and_two_standard_errors_is_worse(tmp_path, before, after, found):
    rows = [evaluation(0, 0.3), evaluation(10, before), evaluation(20, after)]
    assert names(tmp_path, evaluations=rows) == ({"evaluation got worse"} if found else set())


@pytest.mark.parametrize(("after", "found"), [(0.38, True), (0.40, False)])
def test_a_reward_without_accuracy_is_measured_in_standard_deviations(tmp_path, after, found):
    rows = [{"step": step, "eval/aime/sampled_reward": value} for step, value in [(0, 0.2), (10, 0.5), (20, after)]]
    assert names(tmp_path, evaluations=rows) == ({"evaluation got worse"} if found else set())


def test_an_evaluation_that_falls_with_the_training_reward_is_no_overfitting(tmp_path):
    rows = [evaluation(0, 0.9), evaluation(20, 0.2)]
    assert names(tmp_path, FALLING, evaluations=rows) == set()


# Samples


def test_the_error_of_a_reward_function_is_quoted(tmp_path):
    folder = run_with(tmp_path, {"reward/failed_fraction": at(7, 0.5, "reward/failed_fraction")})
    write_samples(folder, "step_000007", [{"right": 0.0}] * 3, ["", "TypeError: no number", "TypeError: no number"])
    (finding,) = diagnose(read_run(folder, texts=False))
    assert (finding.name, finding.step) == ("reward function fails", 7)
    assert finding.evidence == [
        "on average 2% of a step's rewards failed; the largest share was 50%, in step 7",
        "in step 7, 2 of 2 failures have this error: TypeError: no number",
    ]  # fmt: skip


def test_a_run_that_failed_rewards_stopped_names_them_without_a_step(tmp_path):
    folder = run_with(tmp_path, steps=0)
    write_samples(folder, "failed_000001", [{"right": None}], ["ValueError: odd"])
    (finding,) = diagnose(read_run(folder, texts=False))
    assert finding.name == "reward function fails"
    assert finding.evidence[0] == "the run stopped at step 1 because too many rewards failed"


def test_one_of_several_functions_that_never_applies_is_named(tmp_path):
    folder = run_with(tmp_path)
    write_samples(folder, "step_000020", [{"right": 1.0, "judge": None}] * 3)
    (finding,) = diagnose(read_run(folder, texts=False))
    assert finding.name == "reward never applies"
    assert finding.evidence == ["reward function 'judge' returned None for each answer of step 20"]


def test_a_damaged_table_of_samples_is_a_note(tmp_path):
    folder = run_with(tmp_path)
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "step_000020.parquet").write_bytes(b"PAR1")
    run = read_run(folder, texts=False)
    assert diagnose(run) == []
    assert run.notes[0].startswith("rollouts/step_000020.parquet: cannot be read")


# Tests of findings that are causes or effects of other findings

DEAD = {"reward/same_outcome_fraction": 1.0, "reward/std": 0.0, "reward/mean": 0.0, "reward/accuracy": 0.0}


def test_a_learning_rate_that_ends_everything_is_the_only_finding(tmp_path):
    after = {name: [HEALTHY[name][0], *[value] * 19] for name, value in DEAD.items()}
    after |= {"rollout/truncated_fraction": [0.1, *[1.0] * 19], "rollout/entropy": [0.8, *[0.02] * 19]}
    after |= {"actor/ppo_kl": at(1, 6.0, "actor/ppo_kl")}
    (finding,) = findings(tmp_path, after, config={"actor.lr": 0.04})
    assert finding.name == "learning rate too high"
    assert "actor.lr=0.04 is too high for this model and algorithm" in finding.causes
    assert sorted(finding.effects) == ["answers cut (from step 2)", "dead reward (from step 2)"]


def test_what_was_there_from_the_first_step_is_no_effect_of_an_update(tmp_path):
    both = DEAD | {"actor/ppo_kl": last(3, 0.4, before=0.0)}
    assert names(tmp_path, both) == {"dead reward", "learning rate too high"}


def test_answers_that_are_all_cut_explain_a_dead_reward(tmp_path):
    (finding,) = findings(tmp_path, DEAD | {"rollout/truncated_fraction": 1.0})
    assert (finding.name, finding.effects) == ("answers cut", ["dead reward (from step 1)"])
    assert "rollout.max_response_length=16" in finding.evidence


def test_a_collapsed_entropy_explains_a_reward_that_dies_before_it(tmp_path):
    dead = {"reward/same_outcome_fraction": last(9, 1.0, before=0.5)}
    (finding,) = findings(tmp_path, dead | {"rollout/entropy": [0.61, *last(8, 0.02, before=0.6)[1:]]})
    assert (finding.name, finding.effects) == ("entropy collapsed", ["dead reward (from step 12)"])
    assert finding.evidence[0] == "the entropy fell from 0.61 to 0.02 nats per token by step 13"


def test_a_solved_task_has_neither_a_dead_reward_nor_a_collapsed_entropy(tmp_path):
    done = {"reward/same_outcome_fraction": last(8, 1.0, before=0.5), "rollout/entropy": last(8, 0.001, before=0.5)}
    solved = {"reward/mean": line(0.3, 1.0), "reward/accuracy": last(8, 0.99, before=0.5)}
    assert names(tmp_path / "solved", done | solved) == set()
    unknown = {"reward/mean": line(0.3, 1.0), "reward/accuracy": None, "reward/std": last(8, 0.0, before=0.4)}
    assert names(tmp_path / "without accuracy", done | unknown) == set()
    assert names(tmp_path / "not solved", done) == {"entropy collapsed"}


def test_a_reward_without_spread_is_no_finding_where_teachers_alone_train_the_policy(tmp_path):
    assert names(tmp_path / "rewards", DEAD) == {"dead reward"}
    assert names(tmp_path / "teachers", DEAD, config={"algorithm.distillation": {"outcome_coef": 0.0}}) == set()


# Damage


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    bad = {"reward/mean": None, "actor/ppo_kl": "much", "rollout/entropy": [None, True, *[float("inf")] * 18]}
    assert names(tmp_path, bad) == set()


def test_a_run_without_a_config_is_judged_by_its_metrics(tmp_path):
    folder = run_with(tmp_path, DEAD)
    (folder / "config.yaml").write_text("- no\n- mapping\n")
    run = read_run(folder, texts=False)
    assert [finding.name for finding in diagnose(run)] == ["dead reward"]
    assert run.notes == ["config.yaml: holds no config"]


def test_the_guide_lists_every_rule_as_the_code_says_it():
    guide = (ROOT / "docs" / "when-a-run-goes-wrong.md").read_text()
    assert table() in guide


def test_every_key_that_a_rule_advises_exists(tmp_path):
    settings = (ROOT / "docs" / "settings.md").read_text()
    known = set(re.findall(r"`([a-z_.]+)`", settings))
    advised = set()
    for number, (_, beyond, _) in enumerate(BOTH_SIDES.values()):
        metrics, config = (*beyond, None)[:2]
        for finding in findings(tmp_path / str(number), metrics, config=config):
            texts = " ".join([*finding.evidence, *finding.causes, *finding.changes])
            groups = "actor|critic|algorithm|rollout|trainer|reward|data|model"
            advised |= set(re.findall(rf"\b(?:{groups})\.[a-z_]+(?:\.[a-z_]+)*", texts))
    assert {"actor.lr", "rollout.verify_sync"} <= advised
    assert {key for key in advised if key not in known and not key.startswith("algorithm.loss.")} == set()
