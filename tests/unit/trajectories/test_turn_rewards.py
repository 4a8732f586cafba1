"""Tests that in each conversation, the sum of the token rewards is the score, and each turn gets its own reward."""

import pytest
import torch

from rltrain.batch.data_proto import DataProto
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.settings.compose import compose
from rltrain.trajectories.batch_building import batch_of
from rltrain.trajectories.scoring import place_scores

REWARD = "reward.functions=[environment_reward]"
ENVIRONMENT = "rollout.environment=a.py:A"


def turn(observed, sampled, reward):
    return Turn([7] * observed, list(range(sampled)), [0.0] * sampled, [3] * sampled, "stop", "", reward)


# Tokens after the prompt: row 0 samples 2, observes 2, samples 1; row 1 samples 1, observes 1, samples 3, observes 2.
TRAJECTORIES = [
    Trajectory(0, 0, [turn(4, 2, 0.25), turn(2, 1, 1.0)], "done", reward=0.5),
    Trajectory(0, 1, [turn(4, 1, None), turn(1, 3, -2.0), turn(2, 0, None)], "max_turns"),
]
SCORES = torch.tensor([1.75, -2.0])


def placed(*overrides, scores=SCORES, invalid=()):
    batch = batch_of(TRAJECTORIES)
    kept = torch.tensor([row not in invalid for row in range(2)]).repeat_interleave(batch.lengths("responses"))
    batch = batch.with_values("responses", response_mask=batch.values("response_mask") & kept)
    batch = batch.union(DataProto.from_dict({"valid": torch.tensor([row not in invalid for row in range(2)])}))
    found = place_scores(batch, scores, compose([REWARD, ENVIRONMENT, *overrides])[0])
    return found.split(batch.lengths("responses").tolist())


def test_turns_are_numbered_and_share_a_state_if_their_observations_are_equal():
    batch = batch_of([*TRAJECTORIES, Trajectory(0, 2, [turn(4, 1, None), turn(2, 1, None)], "done")])
    assert batch.values("turn_index").tolist() == [0, 0, -1, -1, 1, 0, -1, 1, 1, 1, -1, -1, 0, -1, -1, 1]
    states = batch.values("turn_states").tolist()
    assert states[0] == states[1] == states[5] == states[12] > 0  # The prompt.
    assert states[4] == states[15] > 0  # An observation of two tokens.
    assert len({states[0], states[4], states[7], states[2]}) == 4
    assert states[2] == states[6] == 0


def test_B8_a_turns_reward_is_on_its_last_token_and_the_remainder_on_the_last_trained_token():
    first, second = placed()
    assert first.tolist() == [0, 0.25, 0, 0, 1.5]
    assert second.tolist() == [0, 0, 0, 0, -2.0, 0, 0]


def test_B8_weights_scale_and_penalties_keep_the_sum():
    weighted = "reward.functions=[{path: environment_reward, weight: 2.0}, x:y]"
    scores = torch.tensor([3.0, -1.0])
    first, second = placed(weighted, "algorithm.reward_shaping.scale=0.5", scores=scores)
    assert first.tolist() == [0, 0.25, 0, 0, 2.75]
    assert second.tolist() == [0, 0, 0, 0, -1.0, 0, 0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.reward_normalization.mean_level=group"],
        ["reward.aggregation=normalize_then_sum"],
        ["reward.functions=[environment_reward, {path: x:y, gate: true}]"],
        ["reward.functions=[x:y]"],
    ],
)
def test_B8_a_score_that_is_no_sum_of_rewards_is_on_the_last_token(overrides):
    first, second = placed(*overrides)
    assert first.tolist() == [0, 0, 0, 0, 1.75]
    assert second.tolist() == [0, 0, 0, 0, -2.0, 0, 0]


def test_a_cut_conversation_that_keeps_no_reward_has_none_in_its_turns():
    first, second = placed("algorithm.suppress_truncated=true", scores=torch.tensor([1.75, -3.0]))
    assert first.tolist() == [0, 0.25, 0, 0, 1.5]
    assert second.tolist() == [0, 0, 0, 0, -3.0, 0, 0]


def test_a_row_without_a_score_has_no_rewards():
    first, second = placed(scores=torch.tensor([0.0, -2.0]), invalid=[0])
    assert first.tolist() == [0] * 5
    assert second.tolist() == [0, 0, 0, 0, -2.0, 0, 0]
