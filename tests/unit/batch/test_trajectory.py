import pytest
import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.sampled_tokens import sampled_lengths, sampled_tokens
from rltrain.batch.trajectory import NOT_SAMPLED, Trajectory, Turn


def turn(observation, action, *, version=0, reason="stop", text="") -> Turn:
    return Turn(observation, action, [-0.5 * token for token in action], [version] * len(action), reason, text)


QUESTION = turn([1, 2], [3, 4], version=7, reason="stop", text="call the tool. ")
TOOL = turn([50, 51, 52], [5], version=8, reason="length", text="it says 5")


def test_one_turn_is_a_prompt_and_an_answer_whose_arrays_are_not_copied():
    one = Trajectory(4, 1, (QUESTION,))
    assert one.prompt_ids is QUESTION.observation_ids
    assert one.response_ids() is QUESTION.action_ids
    assert one.log_probs() is QUESTION.log_probs
    assert one.versions() is QUESTION.versions
    assert one.segments() == [(2, True)]
    assert (one.finish_reason, one.text) == ("stop", "call the tool. ")


def test_later_observations_are_part_of_the_response_and_are_not_sampled():
    two = Trajectory(4, 1, (QUESTION, TOOL))
    assert two.prompt_ids == [1, 2]
    assert list(two.response_ids()) == [3, 4, 50, 51, 52, 5]
    assert list(two.log_probs()) == [-1.5, -2.0, 0.0, 0.0, 0.0, -2.5]
    assert list(two.versions()) == [7, 7, NOT_SAMPLED, NOT_SAMPLED, NOT_SAMPLED, 8]
    assert two.segments() == [(2, True), (3, False), (1, True)]
    assert (two.finish_reason, two.text) == ("length", "call the tool. it says 5")


def test_a_trajectory_may_end_with_an_observation():
    ended = Trajectory(4, 1, (QUESTION, turn([50], [])))
    assert list(ended.response_ids()) == [3, 4, 50]
    assert ended.segments() == [(2, True), (1, False), (0, True)]


def test_E3_a_turn_has_one_log_prob_and_one_version_for_each_sampled_token():
    for log_probs, versions in (([-1.0], [0, 0]), ([-1.0, -1.0], [0])):
        with pytest.raises(ValueError, match=r"2 sampled tokens, \d log-probs, \d versions"):
            Turn([1], [2, 3], log_probs, versions, "stop")
    with pytest.raises(ValueError, match=r"sample \(4, 1\) has no turn"):
        Trajectory(4, 1, ())


def test_sampled_tokens_are_known_also_where_the_mask_was_cleared():
    versions = [[3, NOT_SAMPLED, 4], [], [0, 0], [NOT_SAMPLED]]
    batch = DataProto.from_dict({"policy_version": jagged(versions, torch.int64)})
    batch = batch.with_values("policy_version", response_mask=torch.zeros(6, dtype=torch.bool))
    assert sampled_tokens(batch).tolist() == [True, False, True, True, True, False]
    assert sampled_lengths(batch).tolist() == [2, 0, 2, 0]
    assert sampled_lengths(batch).dtype == torch.int64
    assert sampled_lengths(batch[1:2]).tolist() == [0]
