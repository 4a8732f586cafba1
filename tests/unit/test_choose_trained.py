"""What leaves the mask and what weighs differently, and which columns a step needs for that."""

import math

import pytest
import torch

from rltrain.algorithms import TOKEN_SELECTORS, columns_of, required_columns, uniform_draws
from rltrain.compose import compose
from rltrain.credit import choose_trained, needs_actor_pass, with_random_draws
from rltrain.protocol import DataProto, jagged

OLD = [-1.0, -1.0, -1.0, -2.0, -2.0, -3.0]  # rows of 3, 2 and 1 tokens
LENGTHS = [3, 2, 1]


def config_of(*overrides):
    return compose([f"algorithm.{text}" for text in overrides])[0]


def batch(*, log_weights=(0.0,) * 6, mask=(True,) * 6, reasons=("stop",) * 3, advantages=(1.0,) * 6) -> DataProto:
    """`log_weights`: log of the actor's probability over the engine's at each token."""
    made = DataProto.from_dict(
        {"responses": jagged([[1] * length for length in LENGTHS], torch.int64), "uid": torch.zeros(3).long()},
        {"finish_reason": list(reasons)},
    )
    old = torch.tensor(OLD)
    return made.with_values(
        "responses", response_mask=torch.tensor(mask), advantages=torch.tensor(advantages), old_log_probs=old,
        rollout_log_probs=old - torch.tensor(log_weights),
    )  # fmt: skip


def chosen(made, *overrides):
    result, metrics = choose_trained(made, config_of(*overrides).algorithm)
    return result.values("response_mask").tolist(), result, metrics


def test_without_reason_nothing_is_taken_out():
    mask = (True, False, True, True, True, True)
    found, result, metrics = chosen(batch(log_weights=(5.0,) * 6, mask=mask, reasons=("length",) * 3))
    assert (found, metrics) == (list(mask), {})
    assert "correction_weights" not in result


def test_C4_cut_answers_leave_the_mask_where_the_config_says_so_and_only_by_finish_reason():
    made = batch(reasons=("stop", "length", "abort"), mask=(True, False, True, True, True, True))
    found, _, _ = chosen(made, "mask_truncated=true")
    assert found == [True, False, True, False, False, True]
    for other in ("suppress_truncated=true", "exclude_truncated=true"):
        assert chosen(made, other)[0] == [True, False, True, True, True, True]


# Rejection

REJECT = ["rejection.kl_estimator=abs", "rejection.upper=0.5"]


def test_a_row_too_far_from_the_engine_leaves_the_mask():
    made = batch(log_weights=(0.9, 0.0, 0.3, -0.8, 0.4, 0.0))  # mean |d|: .4, .6, 0
    found, result, metrics = chosen(made, *REJECT)
    assert found == [True] * 3 + [False] * 2 + [True]
    assert "correction_weights" not in result
    assert metrics == pytest.approx({
        "rollout/rejection_divergence": 2.4 / 6, "rollout/rejection_outside_fraction": 2 / 6,
        "rollout/rejection_dropped_fraction": 2 / 6,
    })  # fmt: skip


def test_token_and_max_are_other_levels_of_rejection():
    made = batch(log_weights=(0.9, 0.0, 0.3, -0.8, 0.4, 0.0))
    assert chosen(made, *REJECT, "rejection.level=token")[0] == [False, True, True, False, True, True]
    assert chosen(made, *REJECT, "rejection.level=max")[0] == [False] * 5 + [True]


def test_a_lower_bound_rejects_what_the_actor_likes_more_than_the_engine():
    made = batch(log_weights=(0.6, 0.6, 0.6, -0.6, -0.6, 0.0))
    k1 = ["rejection.kl_estimator=k1"]
    assert chosen(made, *k1, "rejection.lower=-0.5")[0] == [False] * 3 + [True] * 3
    assert chosen(made, *k1, "rejection.upper=0.5")[0] == [True] * 3 + [False] * 2 + [True]


def test_only_negative_keeps_what_has_a_good_advantage():
    made = batch(log_weights=(0.9,) * 6, advantages=(1.0, 1.0, 1.0, -1.0, -1.0, 1.0))
    assert chosen(made, *REJECT)[0] == [False] * 6
    assert chosen(made, *REJECT, "rejection.only_negative=true")[0] == [True] * 3 + [False] * 2 + [True]


def test_rejection_is_measured_over_what_truncation_left():
    made = batch(log_weights=(0.9, 0.9, 0.9, 0.1, 0.1, 0.3), reasons=("length", "stop", "stop"))
    found, _, metrics = chosen(made, *REJECT, "mask_truncated=true")
    assert found == [False] * 3 + [True] * 3
    assert metrics["rollout/rejection_divergence"] == pytest.approx(0.5 / 3)
    assert metrics["rollout/rejection_dropped_fraction"] == 0.0


# Correction

CORRECT = ["correction.level=token", "correction.upper=2.0"]


def test_D8_weights_are_the_actors_probability_over_the_engines_up_to_the_cap():
    made = batch(log_weights=(0.0, math.log(1.5), math.log(4.0), math.log(0.25), 0.0, 0.0))
    found, result, metrics = chosen(made, *CORRECT)
    assert found == [True] * 6
    assert result.values("correction_weights").tolist() == pytest.approx([1.0, 1.5, 2.0, 0.25, 1.0, 1.0])
    assert metrics["rollout/correction_weight_mean"] == pytest.approx(6.75 / 6)
    assert metrics["rollout/correction_outside_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout/correction_dropped_fraction"] == 0.0


def test_D8_without_bounds_weights_are_the_ratio_itself():
    made = batch(log_weights=(0.0, math.log(1.5), math.log(4.0), math.log(0.25), 0.0, 0.0))
    found, result, metrics = chosen(made, "correction.level=token")
    assert found == [True] * 6
    assert result.values("correction_weights").tolist() == pytest.approx([1.0, 1.5, 4.0, 0.25, 1.0, 1.0])
    assert metrics["rollout/correction_outside_fraction"] == 0.0


def test_D8_where_engine_and_actor_agree_every_weight_is_one():
    _, result, metrics = chosen(batch(), "correction.level=sequence", "correction.upper=2.0")
    assert result.values("correction_weights").tolist() == [1.0] * 6
    assert metrics["rollout/correction_weight_mean"] == 1.0


def test_sequence_and_geometric_weigh_a_row_as_a_whole():
    made = batch(log_weights=(0.1, 0.2, 0.3, -0.2, -0.4, 0.5))
    for level, expected in (("sequence", (0.6, -0.6, 0.5)), ("geometric", (0.2, -0.3, 0.5))):
        weights = chosen(made, f"correction.level={level}", "correction.upper=2.0")[1].values("correction_weights")
        by_token = [math.exp(value) for value, n in zip(expected, LENGTHS, strict=True) for _ in range(n)]
        assert weights.tolist() == pytest.approx(by_token)


@pytest.mark.parametrize(
    ("mode", "mask", "weights"),
    [
        ("mask", [True, True, False, True, True, True], [1.0, 1.0, 0.0, 1.0, 1.0, 0.25]),
        ("reject", [False, False, False, True, True, True], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
    ],
)
def test_A4_what_the_correction_drops_leaves_the_mask(mode, mask, weights):
    made = batch(log_weights=(0.0, 0.0, math.log(4.0), 0.0, 0.0, math.log(0.25)))
    found, result, metrics = chosen(made, *CORRECT, f"correction.mode={mode}")
    assert found == mask
    assert result.values("correction_weights").tolist() == pytest.approx(weights)
    assert metrics["rollout/correction_dropped_fraction"] == pytest.approx(mask.count(False) / 6)


def test_the_lower_bound_of_the_correction_acts():
    made = batch(log_weights=(0.0,) * 5 + (math.log(0.25),))
    settings = [*CORRECT, "correction.lower=0.5"]
    assert chosen(made, *settings)[1].values("correction_weights").tolist() == pytest.approx([1.0] * 5 + [0.5])


def test_the_correction_comes_after_the_rejection_and_its_means_are_over_what_is_left():
    made = batch(log_weights=(0.9, 0.9, 0.9, 0.0, 0.0, math.log(1.2)))
    found, result, metrics = chosen(made, *REJECT, *CORRECT)
    assert found == [False] * 3 + [True] * 3
    assert result.values("correction_weights").tolist() == pytest.approx([0.0] * 3 + [1.0, 1.0, 1.2])
    assert metrics["rollout/correction_weight_mean"] == pytest.approx(3.2 / 3)
    assert metrics["rollout/rejection_dropped_fraction"] == 0.5


def test_a_batch_without_trained_tokens_has_finite_metrics():
    made = batch(mask=(False,) * 6)
    found, _, metrics = chosen(made, *REJECT, *CORRECT)
    assert found == [False] * 6
    assert all(math.isfinite(value) for value in metrics.values())


# Does a step need the actor's pass?

ONE_STEP = ["trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=4"]


def needs(*overrides, one_step=True):
    return needs_actor_pass(compose([*(ONE_STEP if one_step else []), *overrides])[0])


def test_one_optimizer_step_on_all_needs_no_pass_of_the_actor():
    assert not needs()
    for name in ("grpo", "ppo", "rloo", "gspo"):
        assert not needs(f"algorithm={name}", "algorithm.kl_in_reward.kl_coef=0"), name


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.prompts_per_minibatch=2"],
        ["trainer.epochs_per_step=2"],
        ["algorithm.kl_in_reward.kl_coef=0.1"],
        ["algorithm.kl_in_reward.kl_coef=0.1", "algorithm.kl_in_reward.kl_estimator=full"],
        ["algorithm.correction.level=token"],
        ["algorithm.rejection.kl_estimator=k1", "algorithm.rejection.upper=0.1"],
        ["algorithm.advantage_estimator=optimal_token_baseline"],
        *([f"algorithm.loss_mode={name}"] for name in TOKEN_SELECTORS.names()),
    ],
    ids=" ".join,
)
def test_whoever_reads_the_policy_before_the_update_needs_the_pass(overrides):
    assert needs(*overrides)


def test_the_engines_log_probs_save_the_pass_unless_something_else_of_the_actor_is_read():
    rollout = "algorithm.old_log_probs=rollout"
    assert not needs(rollout, "trainer.epochs_per_step=2", "algorithm.kl_in_reward.kl_coef=0.1")
    assert needs(rollout, "algorithm.kl_in_reward.kl_coef=0.1", "algorithm.kl_in_reward.kl_estimator=full")
    for name in TOKEN_SELECTORS.names():
        reads_entropies = "entropies" in columns_of(TOKEN_SELECTORS.get(name))
        assert needs(rollout, f"algorithm.loss_mode={name}") is reads_entropies, name


@pytest.mark.parametrize(
    "setting", ["algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.entropy_coef=0.1", "algorithm.mask_truncated=true"]
)
def test_what_the_update_computes_itself_needs_no_pass(setting):
    assert not needs(setting)


# Draws


@pytest.mark.parametrize("name", ["vanilla", *TOKEN_SELECTORS.names()])
def test_random_draws_are_there_where_a_selector_chooses_by_chance_and_keyed_by_seed_and_step(name):
    config = config_of(f"loss_mode={name}")
    result = with_random_draws(batch(), config, 3)
    if "random_draws" not in required_columns("grpo", name):
        assert "random_draws" not in result
        return
    expected = uniform_draws(torch.tensor(LENGTHS), seed=config.trainer.seed, step=3)
    assert torch.equal(result.values("random_draws"), expected)
    assert not torch.equal(with_random_draws(batch(), config, 4).values("random_draws"), expected)
    other = compose([f"algorithm.loss_mode={name}", "trainer.seed=9"])[0]
    assert not torch.equal(with_random_draws(batch(), other, 3).values("random_draws"), expected)


def test_some_selector_does_choose_by_chance():
    assert [name for name in TOKEN_SELECTORS.names() if "random_draws" in required_columns("grpo", name)]
