import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch.columns import Column, Stored, column_of, memory_of, same, share_offsets, take_rows
from rltrain.batch.jagged import jagged


def stored(column: Column) -> Column:
    """Return the column as another process receives it, that is, with read-only bytes as its values."""
    values = column.own()
    memory = memory_of(values).copy()
    memory.flags.writeable = False
    return Column(Stored(values.dtype, tuple(values.shape), memory), column.offsets)


def rows_of(column: Column) -> list:
    return [row.tolist() for row in column.whole().unbind()]


@st.composite
def parts(draw) -> list[dict[str, Column]]:
    """Draw batches (parts) that each have two jagged columns with shared offsets, and one dense column.

    Some parts hold their columns as received bytes instead of tensors.
    """
    made, count = [], iter(range(10_000))
    for lengths in draw(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=4)):
        rows = [[next(count) for _ in range(length)] for length in lengths]
        first = column_of(jagged(rows, torch.int64))
        wide = torch.arange(2 * len(first.own())).view(-1, 2).to(torch.bfloat16)
        columns = {"a": first, "b": Column(wide, first.offsets),
                   "dense": column_of(torch.tensor([next(count) for _ in rows], dtype=torch.int32))}  # fmt: skip
        made.append({key: stored(c) for key, c in columns.items()} if draw(st.booleans()) else columns)
    return made


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_gathering_takes_any_rows_of_all_parts_in_any_order(data):
    given_parts = data.draw(parts())
    expected = {key: [row for part in given_parts for row in rows_of(part[key])] for key in ("a", "b", "dense")}
    total = len(expected["a"])
    order = data.draw(st.none() | (st.lists(st.integers(0, total - 1), max_size=8) if total else st.just([])))
    found = take_rows(given_parts, None if order is None else np.array(order, dtype=np.int64))
    for key, rows in expected.items():
        assert rows_of(found[key]) == [rows[i] for i in (range(total) if order is None else order)]
    assert found["a"].offsets is found["b"].offsets
    assert found["b"].own().dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [None, [2, 0], [0, 1, 2]])
def test_what_is_gathered_is_a_copy(rows):
    column = column_of(torch.arange(3))
    take_rows([{"x": column}], None if rows is None else np.array(rows))["x"].own().fill_(9)
    assert column.own().tolist() == [0, 1, 2]


def test_gathering_keeps_gradients_and_reconciles_types_as_pytorch_does():
    leaf = torch.ones(3, requires_grad=True)
    take_rows([{"x": column_of(leaf)}], np.array([0, 0, 2]))["x"].own().sum().backward()
    assert leaf.grad.tolist() == [2, 0, 1]
    mixed = take_rows([{"x": column_of(torch.tensor([1]))}, {"x": column_of(torch.tensor([0.5]))}], np.array([1, 0]))
    assert mixed["x"].own().tolist() == [0.5, 1.0]


def test_rows_behind_each_other_are_one_piece_of_memory(monkeypatch):
    taken = []
    concatenate = np.concatenate

    def counting(pieces, **options):
        if "out" in options:
            taken.append(len(pieces))
        return concatenate(pieces, **options)

    monkeypatch.setattr(np, "concatenate", counting)
    column = column_of(jagged([[1], [2, 2], [], [3], [4]], torch.int64))
    found = take_rows([{"x": column}], np.array([1, 2, 3, 0, 1]))["x"]
    assert (rows_of(found), taken) == ([[2, 2], [], [3], [1], [2, 2]], [2])


def test_stored_values_cannot_be_written_and_are_copied_once():
    column = stored(column_of(torch.arange(3)))
    with pytest.raises(ValueError, match="read-only"):
        column.values.memory[0] = 1
    memory = column.values.memory
    first = column.own()
    first.fill_(7)
    assert column.own() is first  # The second call of `own` returns the same tensor object.
    assert memory.view(np.int64).tolist() == [0, 1, 2]


def test_columns_with_equal_offsets_become_one_family():
    rows = [[1, 2], [3]]
    columns = {
        "a": column_of(jagged(rows, torch.int64)),
        "dense": column_of(torch.zeros(2)),
        "b": column_of(jagged(rows, torch.int64)),
        "c": column_of(jagged([[1], [2, 3]], torch.int64)),
    }
    shared = share_offsets(columns)
    assert shared["a"].offsets is shared["b"].offsets
    assert shared["c"].offsets is columns["c"].offsets
    assert shared["dense"] is columns["dense"]
    assert (shared["a"].whole() + shared["b"].whole()).values().tolist() == [2, 4, 6]


def test_columns_are_the_same_where_rows_and_values_are():
    nan = torch.tensor([1.0, float("nan")])
    assert same(column_of(nan), stored(column_of(nan.clone())))
    one = column_of(jagged([[1], [2, 3]], torch.int64))
    others = [
        jagged([[1, 2], [3]], torch.int64),
        jagged([[1], [2, 4]], torch.int64),
        jagged([[1], [2, 3]], torch.int32),
    ]
    for other in [*others, torch.tensor([1, 2, 3])]:
        assert not same(one, column_of(other))
