"""Tests that a NaN or infinite reward is not mistaken for a reward without a training signal."""

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, columns_of, required_columns

# Estimators that read `successes` do not read rewards.
NAMES = [n for n in ADVANTAGE_ESTIMATORS.names() if "successes" not in columns_of(ADVANTAGE_ESTIMATORS.get(n))]
ROW, PEERS = 2, [0, 2, 4]  # PEERS are the valid rows in the group of ROW


def broken(make_batch, scores, name):
    """Return a batch whose scores are on the first token, with a NaN or infinite score in row ROW.

    The first token is trained in all rows but row 3.
    """
    batch, scores = make_batch(), torch.tensor(scores, dtype=torch.float64)
    rewards = torch.zeros_like(batch["token_level_rewards"])
    if "reward_components" in columns_of(ADVANTAGE_ESTIMATORS.get(name)):
        # the score is infinite, because a NaN component would mean that the reward function does not apply
        scores[ROW] = torch.inf
    else:
        scores[ROW] = torch.nan
    rewards[:, 0] = scores
    return {**batch, "token_level_rewards": rewards, "reward_components": scores[:, None].repeat(1, 2)}


@pytest.mark.parametrize("scores", [[1.0] * 8, [0.0] * 8, [0.0, 1, 2, 3, 4, 5, 6, 7]], ids=["ones", "zeros", "varied"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_no_number_never_becomes_an_advantage_of_zero(name, scores, make_batch, call):
    batch = broken(make_batch, scores, name)
    advantages, returns = call(ADVANTAGE_ESTIMATORS.get(name), batch)
    assert not advantages[ROW, 0].isfinite()
    assert not returns[ROW, 0].isfinite()
    if "uid" in required_columns(name, "vanilla"):
        assert not advantages[PEERS, 0].isfinite().any()
    assert (advantages[~batch["response_mask"]] == 0).all()


def test_neither_does_that_of_a_greedy_answer(make_batch, call):
    batch = make_batch()
    batch["baseline_rewards"][ROW] = torch.inf
    advantages, _ = call(ADVANTAGE_ESTIMATORS.get("remax"), batch)
    assert not advantages[ROW][batch["response_mask"][ROW]].isfinite().any()
