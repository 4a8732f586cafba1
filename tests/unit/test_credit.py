import dataclasses

import pytest
import torch

from rltrain.algorithms import FixedKLController
from rltrain.compose import compose
from rltrain.credit import estimate_advantages, kl_controller, penalize_kl, zero_spread_fraction
from rltrain.protocol import DataProto, jagged


def algorithm(*overrides):
    return compose(overrides)[0].algorithm


def batch(scores, *, uid=None, valid=None, lengths=None) -> DataProto:
    """Rows with these scores on their last tokens; invalid rows are masked."""
    rows = len(scores)
    lengths = lengths or [2] * rows
    made = DataProto.from_dict(
        {"responses": jagged([[1] * length for length in lengths], torch.int64), "scores": torch.tensor(scores),
         "uid": torch.tensor(uid or [0] * rows), "valid": torch.tensor(valid or [True] * rows)}
    )  # fmt: skip
    tokens = torch.zeros(sum(lengths))
    tokens[made.offsets("responses")[1:] - 1] = made.batch["scores"]
    mask = made.batch["valid"].repeat_interleave(torch.tensor(lengths))
    return made.with_values(
        "responses", response_mask=mask, token_level_scores=torch.where(mask, tokens, 0.0), token_level_rewards=tokens
    )


def with_log_probs(made: DataProto, old: float, ref: float) -> DataProto:
    ones = torch.ones(len(made.values("responses")))
    return made.with_values("responses", old_log_probs=old * ones, ref_log_probs=ref * ones)


# KL in the reward


def test_the_penalty_is_the_coefficient_times_the_kl_of_each_trained_token():
    made = with_log_probs(batch([1.0, 5.0], valid=[True, False]), -1.0, -1.5)
    config = algorithm("algorithm.kl_in_reward.kl_coef=0.2").kl_in_reward
    result, metrics = penalize_kl(made, config, kl_controller(config))
    assert result.padded("token_level_rewards").tolist() == [pytest.approx([-0.1, 0.9]), [0, 0]]
    assert metrics == pytest.approx({"reward/kl": 0.5, "reward/kl_coef": 0.2})
    assert "token_level_rewards" in result
    assert made.values("token_level_scores").tolist() == [0, 1, 0, 0]


def test_B8_without_a_coefficient_or_a_reference_the_rewards_are_the_scores():
    made = batch([1.0, 0.5])
    off = algorithm().kl_in_reward
    on = algorithm("algorithm.kl_in_reward.kl_coef=0.2").kl_in_reward
    for candidate, config in ((with_log_probs(made, -1.0, -9.0), off), (made, on)):
        result, metrics = penalize_kl(candidate, config, kl_controller(config))
        assert result.values("token_level_rewards").tolist() == [0, 1, 0, 0.5]
        assert metrics == {}


def test_the_adaptive_controller_is_told_the_kl_and_the_number_of_sequences_and_acts_on_the_next_step():
    config = algorithm(
        "algorithm.kl_in_reward.kl_coef=0.2", "algorithm.kl_in_reward.controller=adaptive",
        "algorithm.kl_in_reward.target=0.1", "algorithm.kl_in_reward.horizon=10",
        "trainer.prompts_per_step=1", "trainer.prompts_per_minibatch=1",
    ).kl_in_reward  # fmt: skip
    controller = kl_controller(config)
    made = with_log_probs(batch([1.0, 0.0]), -1.0, -1.5)  # KL .5 = five times the target: an error of +.2
    _, metrics = penalize_kl(made, config, controller)
    assert metrics["reward/kl_coef"] == 0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 2 / 10))
    assert penalize_kl(made, config, controller)[1]["reward/kl_coef"] == pytest.approx(0.208)
    assert type(kl_controller(algorithm().kl_in_reward)) is FixedKLController


def test_a_batch_without_trained_tokens_has_no_kl():
    made = with_log_probs(batch([1.0], valid=[False]), -1.0, -9.0)
    config = algorithm("algorithm.kl_in_reward.kl_coef=0.2").kl_in_reward
    result, metrics = penalize_kl(made, config, kl_controller(config))
    assert metrics["reward/kl"] == 0.0
    assert result.values("token_level_rewards").tolist() == [0, 0]


# Advantages


def test_grpo_compares_within_groups_and_leaves_failed_rows_out():
    made = batch([1.0, 0.0, 8.0, 4.0, 0.0, 4.0], uid=[3, 3, 3, 9, 9, 9], valid=[True, True, False, True, True, True])
    config = algorithm("algorithm.advantage.norm_by_std=false")
    result, metrics = estimate_advantages(made, config)
    thirds = [4 / 3, -8 / 3, 4 / 3]
    assert result.padded("advantages")[:, 0].tolist() == pytest.approx([0.5, -0.5, 0, *thirds])
    assert result.padded("returns").tolist() == result.padded("advantages").tolist()
    assert metrics["actor/advantage_abs_mean"] == pytest.approx((0.5 + 0.5 + sum(map(abs, thirds))) / 5)
    assert "critic/explained_variance" not in metrics
    assert result.offsets("advantages") is made.offsets("responses")


def test_C7_whitening_uses_trained_tokens_only():
    made = batch([3.0, 1.0, 100.0], valid=[True, True, False], lengths=[1, 1, 3])
    made = made.with_values("responses", values=torch.tensor([0.0, 0.0, 50, 50, 50]))
    result, metrics = estimate_advantages(made, algorithm("algorithm=ppo"))
    assert result.values("advantages").tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0, 0], abs=1e-5)
    assert result.values("returns").tolist()[:2] == [3.0, 1.0]  # not whitened
    assert metrics["critic/explained_variance"] == 0.0


@pytest.mark.parametrize(("values", "explained"), [([3.0, 1.0], 1.0), ([2.0, 2.0], 0.0), ([1.0, 3.0], -3.0)])
def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one(values, explained):
    made = batch([3.0, 1.0], lengths=[1, 1]).with_values("responses", values=torch.tensor(values))
    config = dataclasses.replace(algorithm("algorithm=ppo"), advantage={"gamma": 1.0, "lam": 1.0})
    assert estimate_advantages(made, config)[1]["critic/explained_variance"] == pytest.approx(explained)


def test_equal_targets_explain_nothing():
    made = batch([2.0, 2.0], lengths=[1, 1]).with_values("responses", values=torch.tensor([0.0, 1.0]))
    assert estimate_advantages(made, algorithm("algorithm=ppo"))[1]["critic/explained_variance"] == 0.0


def test_every_row_failed_gives_zero_advantages_and_finite_metrics():
    made = batch([1.0, 2.0], valid=[False, False])
    result, metrics = estimate_advantages(made, algorithm())
    assert result.values("advantages").tolist() == [0] * 4
    assert metrics == {"reward/zero_spread_fraction": 1.0, "actor/advantage_abs_mean": 0.0}


@pytest.mark.parametrize(
    ("scores", "uid", "valid", "share"),
    [
        ([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [True] * 4, 0.5),
        ([0.3, 0.3, 0.3, 0.1], [4, 4, 4, 2], [True] * 4, 1.0),  # equal in float32, and a group of one
        ([1.0, 0.0, 1.0, 0.0], [0, 1, 0, 1], [True] * 4, 1.0),  # groups are found by uid, not by position
        ([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [True, False, True, True], 0.5),  # a failed row is no spread
        ([-1.0, 0.0, -1.0, 0.0], [0, 0, 1, 1], [True, False, False, True], 1.0),
        ([1.0, 0.0], [0, 0], [False, False], 1.0),
    ],
)
def test_C3_the_share_of_groups_without_spread(scores, uid, valid, share):
    assert zero_spread_fraction(batch(scores, uid=uid, valid=valid)) == share
