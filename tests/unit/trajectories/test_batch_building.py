import pytest
import torch

from rltrain.batch.data_proto import jagged
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.data.prompts import Prompt
from rltrain.trajectories.batch_building import answers_of, batch_of
from rltrain.trajectories.prompt_groups import Group, trajectory_of
from workers.rollout.messages import Completion

ANSWER = Completion((3, 1), [5, 6, 7], [-0.5, -1.0, -1.5], "length", [2, 2, 3], "567")
ONE = trajectory_of([1, 2], ANSWER)
THREE = Trajectory(
    4, 0,
    (Turn([1], [10, 11], [-1.0, -2.0], [0, 0], "stop", "a"), Turn([90, 91, 92], [12], [-3.0], [1], "stop", "b"),
     Turn([93], [13, 14], [-4.0, -5.0], [1, 2], "length", "c")),
)  # fmt: skip
ENDED = Trajectory(4, 1, (Turn([1], [], [], [], "abort"), Turn([95, 96], [], [], [], "stop")))


def test_an_answer_is_a_trajectory_of_one_turn():
    assert Trajectory(3, 1, (Turn([1, 2], [5, 6, 7], [-0.5, -1.0, -1.5], [2, 2, 3], "length", "567"),)) == ONE


def test_B4_a_row_of_one_turn_holds_what_the_engine_returned_and_every_token_is_trained():
    batch = batch_of([ONE])
    assert batch.padded("prompts").tolist() == [[1, 2]]
    assert batch.padded("responses").tolist() == [[5, 6, 7]]
    assert batch.padded("response_mask").tolist() == [[True] * 3]
    assert batch.padded("rollout_log_probs").tolist() == [[-0.5, -1.0, -1.5]]
    assert batch.padded("policy_version").tolist() == [[2, 2, 3]]
    assert batch.batch["uid"].tolist() == [3]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["length"]
    assert batch.non_tensor_batch["response_text"].tolist() == ["567"]


def test_B9_in_a_row_of_several_turns_the_mask_is_true_exactly_at_sampled_tokens():
    batch = batch_of([ONE, THREE, ENDED])
    row = batch[1]
    assert row.values("prompts").tolist() == [1]
    assert row.values("responses").tolist() == [10, 11, 90, 91, 92, 12, 93, 13, 14]
    assert row.values("response_mask").int().tolist() == [1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert row.values("rollout_log_probs").tolist() == [-1, -2, 0, 0, 0, -3, 0, -4, -5]
    assert row.values("policy_version").tolist() == [0, 0, -1, -1, -1, 1, -1, 1, 2]
    assert row.non_tensor_batch["finish_reason"].tolist() == ["length"]
    assert row.non_tensor_batch["response_text"].tolist() == ["abc"]
    assert batch[0].values("response_mask").tolist() == [True] * 3
    assert (batch[2].values("responses").tolist(), batch[2].values("response_mask").tolist()) == ([95, 96], [False] * 2)


def test_the_response_columns_of_rows_of_several_turns_share_their_offsets():
    batch = batch_of([ONE, THREE, ENDED])
    assert batch.offsets("responses").tolist() == [0, 3, 12, 14]
    for column in ("response_mask", "rollout_log_probs", "policy_version"):
        assert batch.offsets(column) is batch.offsets("responses")


def test_no_trajectories_make_a_batch_without_rows():
    assert len(batch_of([])) == 0


def test_a_version_below_0_is_no_sampled_tokens():
    with pytest.raises(AssertionError, match="version of a sampled token must be 0 or above"):
        batch_of([trajectory_of([1], Completion((0, 0), [5], [-1.0], "stop", [-1]))])


def test_answers_of_groups_are_sorted_and_carry_their_prompts():
    prompts = [Prompt(n, f"prompt {n}", [n + 1], {}) for n in range(2)]
    groups = [
        Group(uid, prompts[uid], 1, 2, trajectories={
            n: trajectory_of([uid + 1], Completion((uid, n), [10 * uid + n], [-1.0], "stop", [0], f"{uid}/{n}"))
            for n in (1, 0)
        })
        for uid in (1, 0)
    ]  # fmt: skip
    batch, greedy = answers_of(groups), answers_of(groups, baseline=True)
    assert batch.values("responses").tolist() == [0, 10]
    assert greedy.values("responses").tolist() == [1, 11]
    assert batch.non_tensor_batch["prompt_text"].tolist() == ["prompt 0", "prompt 1"]
    assert batch.non_tensor_batch["response_text"].tolist() == ["0/0", "1/0"]
    assert torch.equal(batch.values("prompts"), jagged([[1], [2]], torch.int64).values())


def test_B4_experts_are_those_of_the_engine_and_unknown_where_it_chose_none():
    """Three tokens are in the prompt and the answer of the first row, each with two experts."""
    known = trajectory_of([1, 2], Completion((0, 0), [5, 6], [-1.0, -1.0], "stop", [0, 0], "", [1, 2, 3, 4, 5, 6]))
    short = trajectory_of([1], Completion((1, 1), [7], [-1.0], "stop", [0], "", [8, 9]))
    failed = Trajectory(2, 2, (Turn([1, 2, 3], [], [], [], "abort"),))
    batch = batch_of([known, short, failed], experts=True)
    assert batch.values("prompt_experts").tolist() == [[1, 2], [3, 4], [8, 9], [-1, -1], [-1, -1], [-1, -1]]
    assert batch.values("response_experts").tolist() == [[5, 6], [-1, -1], [-1, -1]]
    assert batch[[2, 0]].values("prompt_experts").tolist() == [[-1, -1]] * 3 + [[1, 2], [3, 4]]
    assert "prompt_experts" not in batch_of([known, short, failed])


def test_A2_all_rows_of_a_group_have_the_prompt_experts_of_its_first_row_that_has_some():
    """Packs contain a group's prompt once, so its experts must not depend on which rows are in the pack."""
    completions = [
        Completion((uid, sample), [5], [-1.0], "stop", [0], "", experts)
        for uid, sample, experts in ((0, 0, ()), (0, 1, [1, 2, 3, 4]), (0, 2, [5, 6, 7, 8]), (1, 0, [5, 6, 7, 8]))
    ]
    batch = batch_of([trajectory_of([1, 2], completion) for completion in completions], experts=True)
    first, second, third, other = batch.values("prompt_experts").view(4, 4).tolist()
    assert first == second == third == [1, 2, 3, 4]
    assert other == [5, 6, 7, 8]
