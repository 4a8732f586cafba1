import torch

from rltrain.batch.jagged import jagged, offsets_in, offsets_of, positions, row_numbers, values_in


def test_a_jagged_column_is_values_and_offsets():
    column = jagged([[1, 2], [], torch.tensor([3])], torch.float32)
    assert values_in(column).tolist() == [1, 2, 3]
    assert values_in(column).dtype == torch.float32
    assert offsets_in(column).tolist() == [0, 2, 2, 3]
    assert offsets_in(jagged([], torch.int64)).tolist() == [0]


def test_positions_restart_in_each_row():
    assert positions(torch.tensor([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert offsets_of(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]


def test_row_numbers_are_never_negative():
    assert row_numbers([-1, 0], 3).tolist() == [2, 0]
