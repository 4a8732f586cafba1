"""Tests of which tokens are removed from the mask before mini-batches are made, and which columns a step needs."""

import pytest
import torch

from rltrain.algorithms import TOKEN_SELECTORS, columns_of, required_columns, uniform_draws
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.trajectories.token_rewards import (
    choose_trained,
    rows_of_actor_pass,
    with_columns_of_rows,
    with_random_draws,
)

LENGTHS = [3, 2, 1]


def config_of(*overrides):
    return compose([f"algorithm.{text}" for text in overrides])[0]


def batch(*, mask=(True,) * 6, reasons=("stop",) * 3) -> DataProto:
    """Return a batch with rows of 3, 2 and 1 tokens, where the log-probs of engine and actor differ by 9 nats."""
    made = DataProto.from_dict(
        {"responses": jagged([[1] * length for length in LENGTHS], torch.int64), "uid": torch.zeros(3).long()},
        {"finish_reason": list(reasons)},
    )
    old = torch.full((6,), -2.0)
    return made.with_values(
        "responses", response_mask=torch.tensor(mask), advantages=-torch.ones(6), old_log_probs=old,
        rollout_log_probs=old + 9.0, policy_version=torch.zeros(6, dtype=torch.int64),
    )  # fmt: skip


def chosen(made, *overrides):
    return choose_trained(made, config_of(*overrides).algorithm).values("response_mask").tolist()


def test_without_reason_nothing_is_taken_out():
    mask = (True, False, True, True, True, True)
    made = batch(mask=mask, reasons=("length",) * 3)
    assert chosen(made) == list(mask)
    assert choose_trained(made, config_of().algorithm).keys() == made.keys()


def test_C4_cut_answers_leave_the_mask_where_the_config_says_so_and_only_by_finish_reason():
    made = batch(reasons=("stop", "length", "abort"), mask=(True, False, True, True, True, True))
    assert chosen(made, "mask_truncated=true") == [True, False, True, False, False, True]
    for other in ("suppress_truncated=true", "exclude_truncated=true"):
        assert chosen(made, other) == [True, False, True, True, True, True]


@pytest.mark.parametrize("preset", ["icepop", "sequence_masking", "decoupled_ppo", "tis"])
def test_A4_correction_and_rejection_take_nothing_out_of_the_mask(preset):
    """A mean over a mini-batch divides by the number of tokens in the mask, including dropped tokens."""
    made, algorithm = batch(), compose([f"algorithm={preset}"])[0].algorithm
    assert choose_trained(made, algorithm).values("response_mask").tolist() == [True] * 6


# Tests of which steps need a forward pass of the actor

ONE_STEP = ["trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=4"]


def needs(*overrides) -> list[int]:
    """Return the rows, of the rows 0 to 3, for which a step needs a forward pass of the actor before the update."""
    config = compose([*ONE_STEP, *overrides])[0]
    size = config.trainer.prompts_per_minibatch
    parts = [list(range(first, first + size)) for first in range(0, 4, size)] * config.trainer.epochs_per_step
    return rows_of_actor_pass(config, parts, step=config.critic.warmup_steps + 1)


def test_one_optimizer_step_on_all_needs_no_pass_of_the_actor():
    assert not needs()
    for name in ("grpo", "ppo", "rloo", "gspo"):
        assert not needs(f"algorithm={name}", "algorithm.kl_in_reward.kl_coef=0"), name


def test_the_first_of_several_mini_batches_needs_no_pass_of_the_actor():
    assert needs("trainer.prompts_per_minibatch=2") == [2, 3]
    assert needs("trainer.prompts_per_minibatch=1", "algorithm=tis") == [1, 2, 3]


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_first_update_and_every_tenth_after_it_are_compared_with_a_pass_of_all_rows(warmup):
    config = compose(["algorithm=ppo", f"critic.warmup_steps={warmup}"])[0]
    passed = [rows_of_actor_pass(config, [[0], [1]], step=step) for step in range(warmup + 21)]
    assert passed[:warmup] == [[]] * warmup  # the critic's warm-up does not update the actor
    assert [number for number, rows in enumerate(passed[warmup:]) if rows == [0, 1]] == [0, 10, 20]
    assert passed[warmup + 1 : warmup + 10] == [[1]] * 9


def test_rows_that_are_trained_on_twice_need_the_pass():
    assert needs("trainer.prompts_per_minibatch=2", "trainer.epochs_per_step=2") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.epochs_per_step=2"],
        ["algorithm.kl_in_reward.kl_coef=0.1"],
        ["algorithm.kl_in_reward.kl_coef=0.1", "algorithm.kl_in_reward.kl_estimator=full"],
        ["algorithm.advantage_estimator=optimal_token_baseline"],
        ["algorithm.correction.level=token", "algorithm.correction.batch_normalize=true"],
        ["algorithm=icepop", "algorithm.correction.normalize=kept"],
        *([f"algorithm.loss_mode={name}"] for name in TOKEN_SELECTORS.names()),
    ],
    ids=" ".join,
)
def test_whoever_reads_the_policy_before_the_update_needs_the_pass(overrides):
    assert needs(*overrides) == [0, 1, 2, 3]
    assert needs(*overrides, "trainer.prompts_per_minibatch=2") == [0, 1, 2, 3]


def test_columns_of_some_rows_are_marked_and_zero_elsewhere():
    made = batch().pop(["old_log_probs"])[1]
    found = DataProto.from_dict(
        {"old_log_probs": jagged([[-1.0, -2.0, -3.0], [-4.0]], torch.float32),
         "entropies": jagged([[1.0, 2.0, 3.0], [4.0]], torch.float32)}
    )  # fmt: skip
    some = with_columns_of_rows(made, found, [0, 2])
    assert some.values("old_log_probs").tolist() == [-1, -2, -3, 0, 0, -4]
    assert some.values("entropies").tolist() == [1, 2, 3, 0, 0, 4]
    assert some.batch["has_old_log_probs"].tolist() == [True, False, True]
    everything = made.select(["response_mask"]).with_values("response_mask", old_log_probs=torch.zeros(6))
    assert "has_old_log_probs" not in with_columns_of_rows(made, everything.select(["old_log_probs"]), [0, 1, 2])


def test_the_engines_log_probs_save_the_pass_unless_something_else_of_the_actor_is_read():
    rollout = "algorithm.old_log_probs=rollout"
    assert not needs(rollout, "trainer.epochs_per_step=2", "algorithm.kl_in_reward.kl_coef=0.1")
    assert needs(rollout, "algorithm.kl_in_reward.kl_coef=0.1", "algorithm.kl_in_reward.kl_estimator=full")
    for name in TOKEN_SELECTORS.names():
        reads_entropies = "entropies" in columns_of(TOKEN_SELECTORS.get(name))
        assert bool(needs(rollout, f"algorithm.loss_mode={name}")) is reads_entropies, name


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.kl_loss.kl_loss_coef=0.1"], ["algorithm.entropy_coef=0.1"], ["algorithm.mask_truncated=true"],
        # the correction uses the log-probs of the update itself, which equal the old log-probs
        ["algorithm.correction.level=token"],
        ["algorithm.rejection.kl_estimator=k1", "algorithm.rejection.upper=0.1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_the_update_computes_itself_needs_no_pass(settings):
    assert not needs(*settings)


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
