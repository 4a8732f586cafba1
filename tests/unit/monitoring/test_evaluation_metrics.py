"""Tests of the metrics that evaluations report."""

import itertools
import math

import pytest
import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.monitoring.evaluation_metrics import evaluated_sets, evaluation_metrics, pass_at_k

NAN = math.nan


def answers(uid, successes, valid=None) -> DataProto:
    """Return a batch of answers of one token each, with score 1 for a correct answer and score 0 otherwise."""
    count = len(uid)
    scores = torch.tensor(successes).nan_to_num(0.0)
    valid = torch.ones(count, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return DataProto.from_dict(
        {"prompts": jagged([[1]] * count, torch.int64), "responses": jagged([[2]] * count, torch.int64),
         "policy_version": jagged([[0]] * count, torch.int64), "uid": torch.tensor(uid), "scores": scores,
         "successes": torch.tensor(successes), "valid": valid, "failed": ~valid,
         "failed_function": torch.where(valid, -1, 0), "reward_components": torch.stack([scores, 1 - scores], 1)},
        {"finish_reason": ["stop"] * count},
    )  # fmt: skip


def test_pass_at_k_is_the_share_of_draws_of_k_answers_that_hold_a_correct_one():
    for count, correct in ((1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (7, 3)):
        successes = torch.tensor([1.0] * correct + [0.0] * (count - correct))
        for k in range(1, count + 1):
            draws = [any(draw) for draw in itertools.combinations(successes.tolist(), k)]
            assert pass_at_k(successes, k) == pytest.approx(sum(draws) / len(draws))


def test_each_function_and_the_mean_over_prompts_of_pass_at_k_are_reported():
    found = evaluation_metrics(answers([4, 4, 4, 9, 9, 9], [1.0, 0, 0, 0, 0, 0]), ["right", "wrong"], "eval/sampled")
    assert found == pytest.approx({
        "eval/sampled_reward": 1 / 6, "eval/sampled_accuracy": 1 / 6, "eval/sampled_length": 1.0,
        "eval/sampled_failed_fraction": 0.0, "eval/sampled_reward/right": 1 / 6, "eval/sampled_reward/wrong": 5 / 6,
        "eval/sampled_pass_at_2": 1 / 3, "eval/sampled_pass_at_3": 0.5,
    })  # fmt: skip


def test_failed_and_undecided_answers_are_in_no_pass_at_k():
    batch = answers([4, 4, 4, 9, 9, 9], [1.0, 0, 1.0, NAN, 1.0, 0], [True, True, False, True, True, True])
    found = evaluation_metrics(batch, ["right", "wrong"], "eval/sampled")
    # Two of the four valid answers that are known to be correct or wrong are correct.
    assert found["eval/sampled_accuracy"] == 0.5
    # Two answers to each prompt are counted, and one of these two answers is correct.
    assert found["eval/sampled_pass_at_2"] == 1.0
    assert "eval/sampled_pass_at_3" not in found


def test_without_a_function_that_decides_there_is_neither_accuracy_nor_pass_at_k():
    found = evaluation_metrics(answers([4, 4], [NAN, NAN]), ["right", "wrong"], "eval/a/greedy")
    assert sorted(found) == [
        "eval/a/greedy_failed_fraction", "eval/a/greedy_length", "eval/a/greedy_reward", "eval/a/greedy_reward/right",
        "eval/a/greedy_reward/wrong",
    ]  # fmt: skip


def test_a_run_without_rewards_has_no_reward_metrics():
    found = evaluation_metrics(answers([4, 4], [NAN, NAN]), [], "eval/sampled")
    assert sorted(found) == ["eval/sampled_length"]


def test_the_names_of_the_sets_are_read_from_the_metrics():
    names = ["eval/sampled_length", "eval/sampled_reward/right", "eval/aime-24/sampled_length", "eval/b/greedy_length"]
    assert evaluated_sets(names) == ["", "aime-24"]
