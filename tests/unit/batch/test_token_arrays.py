import json
import pickle

import pytest
import torch

from rltrain.batch.jagged import jagged, offsets_in, values_in
from rltrain.batch.token_arrays import float_array, int_array
from rltrain.batch.trajectory import Trajectory, Turn

ROWS = [[3, 1, 4], [], [1, 5]]


def test_an_array_is_not_converted_again():
    ids, log_probs = int_array([3, 1, 4]), float_array([-0.5, -0.25])
    assert int_array(ids) is ids
    assert float_array(log_probs) is log_probs
    assert (list(ids), list(log_probs)) == ([3, 1, 4], [-0.5, -0.25])


@pytest.mark.parametrize(
    "rows",
    [
        [int_array(row) for row in ROWS],
        [float_array(row) for row in ROWS],
        [int_array(ROWS[0]), *ROWS[1:]],
        [int_array(ROWS[0]), *map(float_array, ROWS[1:])],
    ],
    ids=["int32", "float32", "with lists", "of several types"],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_jagged_column_of_arrays_is_that_of_lists(rows, dtype):
    expected, found = jagged(ROWS, dtype), jagged(rows, dtype)
    assert values_in(found).dtype == dtype
    assert torch.equal(values_in(found), values_in(expected))
    assert torch.equal(offsets_in(found), offsets_in(expected))


def test_a_jagged_column_of_arrays_does_not_share_their_memory():
    rows = [int_array([1, 2]), int_array([3])]
    column = jagged(rows, torch.int32)
    rows[0][0] = 9
    assert values_in(column).tolist() == [1, 2, 3]


def test_empty_arrays_give_an_empty_column():
    assert values_in(jagged([int_array(()), int_array(())], torch.int64)).tolist() == []


def test_an_answer_is_pickled_with_twelve_bytes_for_each_token():
    def pickled(length: int) -> int:
        log_probs = [-1 / (1 + token) for token in range(length)]
        return len(pickle.dumps(Turn((), range(70_000, 70_000 + length), log_probs, [70_003] * length, "stop"), 5))

    assert pickled(2000) - pickled(1000) == 12_000


def test_a_trajectory_is_the_same_after_its_state_was_stored_as_json():
    thirds = [-1 / 3, -2 / 3]
    turns = Turn([1, 2], [3, 4], thirds, [7, 7], "stop"), Turn(int_array([5]), [6], [-1 / 7], [8], "length", reward=1.0)
    trajectory = Trajectory(4, 1, list(turns), "done", [{"role": "user", "content": "hi"}], 0.5)
    for prompt_ids in ([1, 2], [9]):
        state = json.loads(json.dumps(trajectory.state_dict(prompt_ids)))
        restored = Trajectory.from_state(state, prompt_ids)
        assert list(restored.prompt_ids) == [1, 2]
        assert restored.turns[0].log_probs == trajectory.turns[0].log_probs
        assert restored.turns[1:] == trajectory.turns[1:]
        assert restored.state_dict(prompt_ids) == trajectory.state_dict(prompt_ids)
