import pytest

from rltrain.monitoring.alarms import COLLAPSED_SHARE, PERSISTENT_STEPS, START_STEPS, WINDOW_STEPS, Alarms
from rltrain.settings.compose import compose


def alarms(*overrides: str) -> Alarms:
    return Alarms(compose(["rollout=hf", "rollout.max_log_prob_gap=0.05", *overrides])[0])


def looks(made: Alarms, name: str, values: list[float | None], **others: float) -> list[list[str]]:
    """Return a list with the alarms of each step; the first step has the number 1."""
    return [made.look(step, {name: value, **others}) for step, value in enumerate(values, start=1)]


def steps_with(found: list[list[str]]) -> list[int]:
    return [step for step, messages in enumerate(found, start=1) if messages]


def test_an_alarm_is_told_when_it_begins_and_again_only_after_it_had_stopped():
    found = looks(alarms(), "rollout/log_prob_gap", [0.01, 0.06, 0.07, 0.05, 0.2, 0.2])
    assert steps_with(found) == [2, 5]
    assert found[1][0].startswith(
        "step 2: the log-probs of engine and actor differ by 0.06 nats per token, above rollout.max_log_prob_gap=0.05"
    )


def test_an_alarm_about_the_gap_of_a_quantized_engine_names_the_quantization():
    quantized = ["rollout=vllm", "model.dtype=bfloat16", "rollout.vllm.quantization=fp8_per_block"]
    ((told,),) = looks(alarms(*quantized), "rollout/log_prob_gap", [0.06])
    assert told.endswith("verify_sync on, and either use rollout.vllm.quantization=null or raise the limit")


def test_E1_the_gap_of_the_update_counts_where_the_actor_made_no_pass_of_its_own():
    assert steps_with(looks(alarms(), "actor/engine_gap", [0.01, 0.06])) == [2]


def test_answers_of_older_weights_differ_from_the_actor_and_should():
    assert not steps_with(looks(alarms(), "rollout/log_prob_gap", [0.3, 0.6], **{"rollout/staleness_max": 1.0}))


@pytest.mark.parametrize("restriction", ["rollout.top_p=0.9", "rollout.top_k=5"])
def test_with_top_p_or_top_k_engine_and_actor_differ_and_should(restriction):
    for name in ("rollout/log_prob_gap", "actor/engine_gap"):
        assert not steps_with(looks(alarms(restriction), name, [0.3, 0.6]))


def test_entropy_that_stays_far_below_its_start_is_told_once_it_persists():
    low = 0.6 * COLLAPSED_SHARE * 0.9
    values = [0.5, 0.6, 0.7, *[0.1] * 10, low, 0.1, *[low] * (PERSISTENT_STEPS + 2)]
    found = looks(alarms(), "rollout/entropy", values)
    begins = START_STEPS + 10 + 2 + PERSISTENT_STEPS
    assert steps_with(found) == [begins]
    assert f"below 0.03 (5% of its initial value) for {PERSISTENT_STEPS} steps" in found[begins - 1][0]


def test_batches_in_which_no_group_has_a_spread_are_told_once_they_persist():
    found = looks(alarms(), "reward/same_outcome_fraction", [1.0, 1.0, 0.9, *[1.0] * 9, 0.5, *[1.0] * PERSISTENT_STEPS])
    assert steps_with(found) == [3 + PERSISTENT_STEPS, 13 + PERSISTENT_STEPS]


TEACHER = "algorithm.distillation.teachers=[m]"


def test_answers_without_a_distillation_term_are_told_and_what_becomes_of_them():
    for name, effect in (
        ("mopd", "for answers without a distillation term, the training step uses only rewards"),
        ("distill", "the training step leaves out answers without a distillation term"),
    ):
        found = looks(alarms(f"algorithm={name}", TEACHER), "actor/teacher_missing_fraction", [0.0, 0.05, 0.25, 1.0, 0])
        assert steps_with(found) == [3]
        assert found[2][0].startswith(f"step 3: 25% of the answers have no distillation term, above 5%, and {effect}: ")


def test_equal_outcomes_are_no_alarm_where_teachers_teach_alone():
    equal = [1.0] * 20
    assert not steps_with(looks(alarms("algorithm=distill", TEACHER), "reward/same_outcome_fraction", equal))
    assert steps_with(looks(alarms("algorithm=mopd", TEACHER), "reward/same_outcome_fraction", equal))


def test_a_group_of_one_never_has_a_spread_and_that_is_no_alarm():
    one = alarms("algorithm=ppo", "rollout.samples_per_prompt=1")
    assert not steps_with(looks(one, "reward/same_outcome_fraction", [1.0] * 20))


def test_a_reward_that_loses_most_of_what_was_learnt_is_told():
    rising = [0.2 + 0.04 * step for step in range(20)]
    found = looks(alarms(), "reward/mean", [*rising, *[0.1] * 10], **{"reward/std": 0.3})
    begun = steps_with(found)
    assert len(begun) == 1
    assert 20 + 2 <= begun[0] <= 20 + WINDOW_STEPS
    assert "its best value was 0.88" in found[begun[0] - 1][0]


@pytest.mark.parametrize("spread", [0.3, 0.5])
def test_a_reward_that_only_wavers_is_not(spread):
    wavering = [
        0.5 + (-1) ** step * 0.1 + (0.2 if step > 20 else 0.0) - (0.15 if step > 40 else 0.0) for step in range(60)
    ]
    assert not steps_with(looks(alarms(), "reward/mean", wavering, **{"reward/std": spread}))


def test_numbers_that_are_missing_or_not_finite_say_nothing():
    made = alarms()
    for step in range(1, 10):
        assert (
            made.look(step, {"rollout/entropy": None, "reward/mean": float("nan"), "rollout/log_prob_gap": None}) == []
        )


def test_the_history_looked_at_again_puts_the_alarms_back_to_where_they_were():
    values = [0.9, 0.9, 0.9, *[0.001] * (PERSISTENT_STEPS + 3)]
    whole, after = alarms(), alarms()
    expected = looks(whole, "rollout/entropy", values)
    cut = PERSISTENT_STEPS + 1
    assert looks(after, "rollout/entropy", values[:cut]) == expected[:cut]
    rest = [after.look(step, {"rollout/entropy": value}) for step, value in enumerate(values[cut:], start=cut + 1)]
    assert rest == expected[cut:]
    assert after.__dict__.keys() == whole.__dict__.keys()
    assert after.sounding == whole.sounding == {"entropy"}
