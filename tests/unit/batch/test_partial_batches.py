"""Tests of joining rows from several partial batches, each of which has some of the columns and some of the rows."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.partial_batches import joined_rows

COLUMNS = ("prompts", "responses", "response_mask", "teacher")


def batch_of(rows: int) -> DataProto:
    made = DataProto.from_dict(
        {"prompts": jagged([[row] * (row % 3) for row in range(rows)], torch.int64),
         "responses": jagged([[row] * (row % 4) for row in range(rows)], torch.int64),
         "teacher": torch.arange(rows) * 10}
    )  # fmt: skip
    tokens = len(made.values("responses"))
    return made.with_values("responses", response_mask=torch.arange(tokens) % 2 == 0)


@given(count=st.integers(1, 9), data=st.data())
@settings(deadline=None, max_examples=150)
def test_the_joined_rows_are_those_of_the_whole_batch_however_the_parts_were_cut(count, data):
    """Each column is split into parts independently of other columns. A part can have rows that are not requested."""
    whole = batch_of(count)
    rows = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    parts, rows_of_parts = [], []
    for name in COLUMNS:
        owners = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        for owner in sorted(set(owners)):
            there = [row for row in range(count) if owners[row] == owner]
            parts.append(pickle.loads(pickle.dumps(whole.select([name])[there], protocol=5)))
            rows_of_parts.append(np.array(there))
    found = joined_rows(parts, rows_of_parts, np.array(rows, dtype=np.int64), COLUMNS)
    expected = whole[rows]
    assert found.keys() == list(COLUMNS)
    assert len(found) == len(rows)
    assert torch.equal(found.batch["teacher"], expected.batch["teacher"])
    for name in COLUMNS[:3]:
        assert torch.equal(found.values(name), expected.values(name))
        assert torch.equal(found.offsets(name), expected.offsets(name))
    assert found.offsets("responses") is found.offsets("response_mask"), "columns of one family share their offsets"


def test_a_part_with_exactly_the_rows_is_not_copied():
    part = batch_of(4)[[1, 3]]
    found = joined_rows([part], [np.array([1, 3])], np.array([1, 3]), ["responses", "teacher"])
    assert found.shares(part, "responses")
    assert found.shares(part, "teacher")


def test_a_row_that_no_part_has_is_an_error():
    with pytest.raises(AssertionError, match="some rows of the columns"):
        joined_rows([batch_of(2)], [np.array([0, 1])], np.array([1, 2]), ["responses"])
