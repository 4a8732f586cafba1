import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch.columns import Stored
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.serialization import Text, send


def example(rows: int = 4, *, tokens: int = 3) -> DataProto:
    batch = DataProto.from_dict(
        {"responses": jagged([[row] * (row % tokens) for row in range(rows)], torch.int64), "uid": torch.arange(rows)},
        {"name": [f"row {row}" for row in range(rows)], "error": [None, "late"] * (rows // 2)},
    )
    return batch.with_values("responses", old_log_probs=torch.randn(len(batch.values("responses"))))


class Store:
    """Fake shared memory that holds one read-only copy of the bytes of a sent batch for all readers."""

    def __init__(self, batch: DataProto) -> None:
        sent: list[pickle.PickleBuffer] = []
        self.stream = pickle.dumps(batch, protocol=5, buffer_callback=sent.append)
        self.buffers = [bytes(buffer.raw()) for buffer in sent]

    def read(self) -> DataProto:
        return pickle.loads(self.stream, buffers=self.buffers)


def unread(batch: DataProto) -> set[str]:
    """Return the names of the columns whose data has not yet been copied out of the received bytes."""
    tensors = {key for key, column in batch._columns.items() if isinstance(column.values, Stored)}
    return tensors | {key for key, column in batch._others.items() if isinstance(column, Text)}


def test_a_received_batch_is_copied_only_where_it_is_read():
    received = Store(example()).read()
    # The column `error` also holds objects that are not strings, so it is unpickled at once.
    every = {"responses", "old_log_probs", "uid", "name"}
    assert unread(received) == every
    assert (len(received), received.lengths("responses").tolist()) == (4, [0, 1, 2, 0])
    part = received.select(["responses", "uid", "name"])[[2, 1]]
    assert part.values("responses").tolist() == [2, 2, 1]
    more = received.with_values("old_log_probs", zeros=torch.zeros(3)).rename({"uid": "group"})
    assert unread(received) == every
    assert "group" in unread(more)
    received.values("old_log_probs")
    assert unread(received) == every - {"old_log_probs"}
    assert received.batch["uid"].tolist() == [0, 1, 2, 3]
    assert unread(received) == {"name"}


def test_rows_of_a_received_batch_cost_memory_for_these_rows_only():
    sent = DataProto.from_dict(
        {"responses": jagged(torch.ones(1000, 100).unbind(), torch.float32)}, {"t": ["x"] * 1000}
    )
    part = Store(sent).read()[[5, 999]]
    assert part.values("responses").untyped_storage().nbytes() == 200 * 4


WRITES = {
    "values": lambda b: b.values("old_log_probs").fill_(9),
    "offsets": lambda b: b.offsets("responses").fill_(9),
    "dense": lambda b: b.batch["uid"].fill_(9),
    "nested": lambda b: b.batch["responses"].values().fill_(9),
    "rows": lambda b: b[[1, 2]].values("responses").fill_(9),
    "table": lambda b: b.batch.update({"uid": torch.zeros(4)}),
    "objects": lambda b: b.non_tensor_batch["name"].fill("x"),
}


@pytest.mark.parametrize("write", WRITES)
def test_no_write_to_a_received_batch_reaches_the_store(write):
    sent = example()
    store = Store(sent)
    before = [bytes(buffer) for buffer in store.buffers]
    # The memory is writable, so that an accidental write would change the bytes instead of raising an error.
    store.buffers = [bytearray(buffer) for buffer in store.buffers]
    WRITES[write](store.read())
    assert [bytes(buffer) for buffer in store.buffers] == before
    assert store.read().union(sent).keys() == sent.keys()  # `union` compares the columns that both batches have.


def test_what_was_written_into_ones_own_copy_stays_there():
    received = Store(example()).read()
    received.values("old_log_probs").fill_(9)
    assert received[[2]].values("old_log_probs").tolist() == [9, 9]
    assert received.batch["old_log_probs"].values().tolist() == [9, 9, 9]
    received.batch["uid"] = torch.tensor([7, 7, 8, 8])
    assert received.select(["uid"]).batch["uid"].tolist() == [7, 7, 8, 8]
    del received.batch["old_log_probs"]
    assert "old_log_probs" not in received


TEXT = st.text(
    st.characters(codec=None), max_size=6
)  # The text consists of arbitrary code points, including unpaired surrogates.


@given(st.lists(TEXT, max_size=6), st.lists(st.integers(0, 5), max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_string_arrives_as_it_was_sent(strings, rows):
    sent = DataProto.from_dict({}, {"text": strings})
    received, rows = Store(sent).read(), [row for row in rows if row < len(strings)]
    assert received[rows].non_tensor_batch["text"].tolist() == [strings[row] for row in rows]
    forwarded = Store(
        received[rows]
    ).read()  # The received batch is sent to another process before its text column is read.
    assert forwarded.non_tensor_batch["text"].tolist() == [strings[row] for row in rows]
    assert received.non_tensor_batch["text"].tolist() == strings


def test_strings_of_a_column_are_one_run_of_bytes_and_other_objects_are_pickled():
    objects = [1, None, "x", [2], {"a": np.float32(1)}]
    batch = DataProto.from_dict({}, {"text": ["ab", "", "ü"] + ["c"] * 2, "any": objects})
    (name, memory, ends), pickled = send(batch._tensors, batch._others, 5)[2]
    assert pickled == ("any", None, objects)
    assert (name, bytes(memory), np.frombuffer(ends, np.int64).tolist()) == ("text", "abücc".encode(), [2, 2, 4, 5, 6])
    assert pickle.loads(pickle.dumps(batch)).non_tensor_batch["any"].tolist() == objects


def test_concat_puts_the_rows_of_received_parts_in_order_with_one_copy():
    sent = example(6)
    parts = [
        Store(sent[rows].select(["responses", "old_log_probs", "uid"])).read() for rows in ([4, 1], [], [0, 5, 3], [2])
    ]
    order = torch.tensor([4, 1, 0, 5, 3, 2]).argsort()
    whole = DataProto.concat(parts, rows=order)
    assert whole.batch["uid"].tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.union(sent).values("old_log_probs").tolist() == sent.values("old_log_probs").tolist()
    assert all(
        "responses" in unread(part) for part in parts
    )  # Sending a received batch to another process does not unpack the columns of the batch.
    text = [Store(sent[rows].select(["name", "error"])).read() for rows in ([2, 3], [0, 1])]
    joined = DataProto.concat(text, rows=torch.tensor([2, 3, 0, 1])).non_tensor_batch
    assert (joined["name"].tolist(), joined["error"].tolist()) == (
        [f"row {row}" for row in range(4)], [None, "late", None, "late"],
    )  # fmt: skip


def test_a_batch_without_rows_or_columns_arrives():
    for batch in (example()[:0], DataProto.from_dict(), DataProto.from_dict({}, {}, {"step": 3}), example().select([])):
        received = Store(batch).read()
        assert (len(received), received.keys(), received.meta_info) == (len(batch), batch.keys(), batch.meta_info)
        assert received[[]].keys() == batch.keys()


def test_numbers_of_rows_do_not_grow_the_header():
    sizes = [len(Store(example(rows).pop(["error"])[1]).stream) for rows in (4, 400)]
    assert sizes[1] - sizes[0] < 20
