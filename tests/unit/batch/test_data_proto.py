import inspect
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch.data_proto import DataProto, jagged

PROMPTS = [[7], [8, 8], [9], [10, 10]]
RESPONSES = [[1, 2], [], [3], [4, 5, 6]]


def example() -> DataProto:
    batch = DataProto.from_dict(
        {"prompts": jagged(PROMPTS, torch.int64), "responses": jagged(RESPONSES, torch.int64),
         "uid": torch.tensor([5, 5, 6, 6]), "reward_components": torch.arange(8.0).view(4, 2)},
        {"name": ["a", "b", "c", "d"], "tools": [[1], [2], [3], [4]]},
        {"step": 3},
    )  # fmt: skip
    return batch.with_values("responses", response_mask=torch.tensor([True, False, True, True, True, False]))


def plain(batch: DataProto) -> dict:
    """Return all contents of a batch as plain lists and dictionaries, for comparison."""
    columns = {key: batch.batch[key] for key in batch.batch.keys()}  # noqa: SIM118
    found = {key: [r.tolist() for r in c.unbind()] if c.is_nested else c.tolist() for key, c in columns.items()}
    kinds = {key: (c.is_nested, c.dtype) for key, c in columns.items()}
    others = {key: column.tolist() for key, column in batch.non_tensor_batch.items()}
    return {"tensors": found, "kinds": kinds, "others": others, "meta": batch.meta_info, "rows": len(batch)}


def rows_of(batch: DataProto) -> list[tuple]:
    """Return the rows of the batch as comparable tuples, computed without the batch's offsets.

    Tests compare the results of batch methods with these tuples.
    """
    content = plain(batch)
    keys = sorted(content["tensors"]), sorted(content["others"])
    return [
        tuple(repr(content["tensors"][k][i]) for k in keys[0]) + tuple(repr(content["others"][k][i]) for k in keys[1])
        for i in range(content["rows"])
    ]


def shares_one_offsets_object(batch: DataProto) -> bool:
    return batch.offsets("responses") is batch.offsets("response_mask")


def sent(batch: DataProto) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return the pickle stream of a batch, and the out-of-band buffers of the batch."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers


def received(batch: DataProto) -> DataProto:
    """Return the batch as another process receives it from shared memory.

    The values of the columns are in read-only buffers outside the pickle stream (protocol 5).
    """
    stream, buffers = sent(batch)
    return pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])


@st.composite
def batches(draw, *, min_rows: int = 0) -> DataProto:
    lengths = draw(st.lists(st.integers(0, 4), min_size=min_rows, max_size=7))
    count = iter(range(1000))
    responses = [[next(count) for _ in range(length)] for length in lengths]
    batch = DataProto.from_dict(
        {"responses": jagged(responses, torch.int64), "prompts": jagged([[9] * (i % 3) for i in lengths], torch.int64),
         "uid": torch.arange(len(lengths)), "half": torch.randn(len(lengths), 3, dtype=torch.bfloat16)},
        {"name": [f"row {i}" for i in range(len(lengths))]}, {"k": 1},
    )  # fmt: skip
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))), dtype=torch.bool)
    return batch.with_values("responses", response_mask=mask)


# Tests of views of columns


def test_padded_puts_rows_on_the_left_and_the_padding_behind():
    assert example().padded("responses", padding=-1).tolist() == [[1, 2, -1], [-1, -1, -1], [3, -1, -1], [4, 5, 6]]
    assert example().padding_mask("responses").tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]]
    mask = example().padded("response_mask")
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, False, False], [False] * 3, [True, False, False], [True, True, False]]


def test_values_offsets_and_lengths_of_a_column_without_padding():
    batch = example()
    assert batch.values("responses").tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.offsets("responses").tolist() == [0, 2, 2, 3, 6]
    assert batch.lengths("responses").tolist() == [2, 0, 1, 3]
    with pytest.raises(ValueError, match="column 'uid' is not jagged"):
        batch.values("uid")
    with pytest.raises(KeyError, match="no column 'nothing'; the columns are prompts, responses"):
        batch.values("nothing")


def test_with_padded_reads_the_real_slots_only():
    padded = torch.tensor([[1.0, 2, 99], [99, 99, 99], [3, 99, 99], [4, 5, 6]])
    batch = example().with_padded("responses", advantages=padded)
    assert batch.values("advantages").tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.offsets("advantages") is batch.offsets("responses")


def test_with_values_refuses_another_number_of_tokens():
    said = "5 values were given for column 'advantages', but column 'responses' has 6 values: give one value"
    with pytest.raises(ValueError, match=said):
        example().with_values("responses", advantages=torch.zeros(5))


def test_a_batch_without_rows_has_views_too():
    empty = example()[[]]
    assert (len(empty), empty.padded("responses").shape, empty.values("responses").dtype) == (0, (0, 0), torch.int64)


# Tests of methods that select or change columns


def test_columns_of_different_heights_are_refused():
    with pytest.raises(ValueError, match=r"numbers of rows differ: \{'a': 2, 'b': 3\}"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"b": ["x"] * 3})
    with pytest.raises(ValueError, match=r"columns have \[1, 4\] rows"):
        DataProto(example().batch, {"b": np.array(["x"], dtype=object)}, {})
    with pytest.raises(ValueError, match=r"\['a'\] are names of both tensor and object columns"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"a": ["x"] * 2})


def test_objects_that_are_lists_stay_lists():
    batch = DataProto.from_dict({}, {"pairs": [[1, 2], [3, 4]], "one": [[5], [6]]})
    assert batch.non_tensor_batch["pairs"].tolist() == [[1, 2], [3, 4]]
    assert batch.non_tensor_batch["pairs"].shape == batch.non_tensor_batch["one"].shape == (2,)
    assert DataProto.from_dict({}, {"one": [[5]]}).non_tensor_batch["one"].tolist() == [[5]]
    assert batch[1].non_tensor_batch["one"][0] == [6]


def test_pop_returns_the_taken_and_the_rest():
    taken, rest = example().pop(["responses", "name"])
    assert sorted(taken.keys()) == ["name", "responses"]
    assert sorted(rest.keys()) == ["prompts", "response_mask", "reward_components", "tools", "uid"]
    assert taken.meta_info == rest.meta_info == {"step": 3}
    assert plain(rest.union(taken)) == plain(example())
    with pytest.raises(KeyError, match="no column 'nothing'"):
        example().pop(["nothing"])


def test_select_of_no_column_keeps_the_number_of_rows():
    assert (len(example().select([])), example().select([]).keys(), "uid" in example()) == (4, [], True)


def test_rename_moves_values_and_refuses_one_name_for_two():
    batch = example().rename({"responses": "answers", "name": "label"})
    assert batch.values("answers").tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.non_tensor_batch["label"].tolist() == ["a", "b", "c", "d"]
    assert not {"responses", "name"} & {*batch.keys()}
    assert batch.offsets("answers") is batch.offsets("response_mask")
    swapped = example().rename({"prompts": "responses", "responses": "prompts"})
    assert swapped.values("prompts").tolist() == [1, 2, 3, 4, 5, 6]
    for clash in ({"uid": "responses"}, {"uid": "name"}, {"uid": "x", "name": "x"}):
        with pytest.raises(ValueError, match="would give two columns the same name"):
            example().rename(clash)


def test_union_adds_columns_and_shares_the_offsets():
    worker = received(example().select(["responses"]).with_values("responses", old_log_probs=torch.ones(6)))
    batch = example().union(worker.select(["old_log_probs"]))
    assert batch.values("old_log_probs").tolist() == [1] * 6
    assert batch.offsets("old_log_probs") is batch.offsets("responses")
    assert (batch.batch["old_log_probs"] + batch.batch["responses"]).values().tolist() == [2, 3, 4, 5, 6, 7]


def test_union_accepts_equal_columns_and_refuses_different_ones():
    nan = DataProto.from_dict({"reward_components": torch.tensor([[1.0, float("nan")]])})
    assert nan.union(received(nan)).keys() == ["reward_components"]
    one = DataProto.from_dict({"x": torch.tensor([1.0])}, {"n": ["a"]}, {"f": 1})
    tensors = [torch.tensor([2.0]), torch.tensor([1]), jagged([[1.0]], torch.float32)]
    others = [DataProto.from_dict({"x": tensor}) for tensor in tensors]
    others += [DataProto.from_dict({}, objects) for objects in ({"x": [1.0]}, {"n": ["b"]})]
    others += [DataProto.from_dict({"y": torch.zeros(1)}, {}, {"f": 2}), DataProto.from_dict({"y": torch.zeros(2)})]
    for other in others:
        with pytest.raises(ValueError, match="union"):
            one.union(other)
    assert one.union(DataProto.from_dict({"y": torch.zeros(1)}, {}, {"f": 1, "g": 2})).meta_info == {"f": 1, "g": 2}


# Tests of methods that select or reorder rows


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]), (slice(None, None, -1), [3, 2, 1, 0]), (slice(3, 1), []), (slice(9, None), []),
        (-1, [3]),
        ([0, 0, 2], [0, 0, 2]), ([-1, 1], [3, 1]), ([True, False, False, True], [0, 3]), ([], []),
        (torch.tensor([2, 1]), [2, 1]), (torch.tensor([False, True, False, False]), [1]), (np.array([3, 0]), [3, 0]),
        (np.array([True, True, False, False]), [0, 1]),
    ],
)  # fmt: skip
def test_indexing_picks_rows(index, expected):
    assert [rows_of(example())[i] for i in expected] == rows_of(example()[index])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([4], "row 4 of a batch of 4 rows: row numbers go from -4 to 3"), ([0, -5], "row -5 of a batch"),
        ([True, False], "a mask of 2 values for 4 rows"),
    ],
)  # fmt: skip
def test_rows_that_are_not_there_are_refused(index, message):
    with pytest.raises(IndexError, match=message):
        example()[index]


def test_repeat_interleaves_or_not():
    assert example()[:2].repeat(2).non_tensor_batch["name"].tolist() == ["a", "a", "b", "b"]
    assert example()[:2].repeat(2, interleave=False).non_tensor_batch["name"].tolist() == ["a", "b", "a", "b"]
    assert example()[:2].repeat(2).padded("responses").tolist() == [[1, 2], [1, 2], [0, 0], [0, 0]]


def test_chunk_sizes_differ_by_one_row_and_more_chunks_than_rows_are_refused():
    assert [len(part) for part in example().chunk(3)] == [2, 1, 1]
    with pytest.raises(ValueError, match="4 rows cannot be split into 5 chunks; use 1 to 4"):
        example().chunk(5)
    with pytest.raises(ValueError, match="split size must be >= 1, got 0"):
        example().split(0)


def test_padding_to_a_divisor_repeats_rows_from_the_start():
    padded, added = example()[:3].pad_to_divisor(5)
    assert (added, padded.non_tensor_batch["name"].tolist()) == (2, ["a", "b", "c", "a", "b"])
    assert example().pad_to_divisor(2)[1] == 0


def test_concat_refuses_parts_that_differ_in_columns_or_their_kind():
    with pytest.raises(ValueError, match="give at least one"):
        DataProto.concat([])
    dense = DataProto.from_dict({"x": torch.zeros(1)})
    for other in (
        example(),
        DataProto.from_dict({}, {"x": [0]}),
        DataProto.from_dict({"x": jagged([[0]], torch.int64)}),
    ):
        with pytest.raises(ValueError, match="concat: the batches have different columns"):
            DataProto.concat([dense, other])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_splitting_and_joining_gives_the_same_rows(data):
    batch = data.draw(batches(min_rows=1))
    chunks, size = data.draw(st.integers(1, len(batch))), data.draw(st.integers(1, 9))
    for parts in (batch.chunk(chunks), batch.split(size)):
        joined = DataProto.concat([batch[:0], *parts, batch[:0]])
        assert plain(joined) == plain(batch)
        assert shares_one_offsets_object(joined)
    assert len(batch.chunk(chunks)) == chunks
    padded, added = batch.pad_to_divisor(size)
    assert len(padded) % size == 0
    assert added < size
    assert plain(padded.unpad(added)) == plain(batch)
    times = data.draw(st.integers(1, 3))
    assert plain(batch.repeat(times)[::times]) == plain(batch)
    assert rows_of(batch.repeat(times, interleave=False)) == rows_of(batch) * times


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_reordering_moves_whole_rows_and_can_be_undone(data):
    batch = data.draw(batches())
    order = data.draw(st.permutations(range(len(batch))))
    moved = batch.reorder(order)
    assert rows_of(moved) == [rows_of(batch)[i] for i in order]
    assert shares_one_offsets_object(moved)
    assert plain(moved.reorder(torch.tensor(order, dtype=torch.int64).argsort())) == plain(batch)


@given(batches())
@settings(max_examples=40, deadline=None)
def test_saving_and_sending_keep_everything(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("batch") / "batch.pt"
    batch.save(path)
    copies = [DataProto.load(path), received(batch), *(pickle.loads(pickle.dumps(batch, p)) for p in (2, 4, 5))]
    for copy in [*copies, batch.to("cpu")]:
        assert plain(copy) == plain(batch)
        assert shares_one_offsets_object(copy)


# Tests that no method changes its argument


CALLS = {
    "values": lambda b: b.values("responses"),
    "offsets": lambda b: b.offsets("responses"),
    "lengths": lambda b: b.lengths("responses"),
    "with_values": lambda b: b.with_values("responses", response_mask=torch.zeros(6)),
    "with_padded": lambda b: b.with_padded("responses", uid=torch.zeros(4, 3)),
    "padded": lambda b: b.padded("responses").fill_(9),
    "padding_mask": lambda b: b.padding_mask("responses").fill_(9),
    "shares": lambda b: b.shares(b.select(["responses"]), "responses"),
    "select": lambda b: b.select(["uid"]).non_tensor_batch.update(x=1),
    "pop": lambda b: b.pop(["uid", "name"])[1].meta_info.update(step=4),
    "rename": lambda b: b.rename({"uid": "u", "name": "n"}).meta_info.clear(),
    "union": lambda b: b.union(DataProto.from_dict({"x": torch.zeros(4)}, {"y": list("abcd")}, {"z": 1})),
    "concat": lambda b: zero(DataProto.concat([b, b])),
    "chunk": lambda b: [zero(part) for part in b.chunk(2)],
    "ranges": lambda b: [zero(part) for part in b.select(["responses", "uid"]).ranges([1, 3])],
    "split": lambda b: [zero(part) for part in b.split(2)],
    "repeat": lambda b: zero(b.repeat(2)),
    "reorder": lambda b: zero(b.reorder([3, 2, 1, 0])),
    "pad_to_divisor": lambda b: zero(b.pad_to_divisor(3)[0]),
    "unpad": lambda b: zero(b.unpad(1)),
    "to": lambda b: b.to("cpu").batch.update({"x": torch.zeros(4)}),
    "save": lambda b: b.save("/dev/null"),
    "keys": lambda b: b.keys().clear(),
}


def zero(batch: DataProto) -> None:
    """Overwrite all values of the batch in place."""
    for column in batch.batch.values():
        (column.values() if column.is_nested else column).zero_()
    for objects in batch.non_tensor_batch.values():
        objects[:] = None
    batch.meta_info.clear()


@pytest.mark.parametrize("method", CALLS)
def test_a_method_leaves_its_batch_as_it_was(method):
    batch = example()
    CALLS[method](batch)
    assert plain(batch) == plain(example())


def test_no_public_method_is_left_out_of_that():
    public = {name for name, _ in inspect.getmembers(DataProto, callable) if not name.startswith("_")}
    assert public - CALLS.keys() == {"from_dict", "load"}


# Tests of batches that are sent between processes


def test_ranges_are_consecutive_rows_and_can_be_sent():
    batch = example().select(["responses", "uid"])
    for sizes in ([4], [1, 0, 3], [2, 2]):
        parts, first = batch.ranges(sizes), 0
        for part, size in zip(parts, sizes, strict=True):
            expected = plain(batch[first : first + size])
            assert plain(received(part)) == expected
            assert plain(part) == expected
            first += size
    with pytest.raises(AssertionError, match="the sizes add up to 3, and the batch has 4 rows"):
        batch.ranges([1, 2])
    with pytest.raises(AssertionError, match="name"):
        example().ranges([4])


def test_a_received_batch_may_be_written_without_another_reader_seeing_it():
    stream, buffers = sent(example())
    # The memory is writable, so that an accidental write would change the second batch instead of raising an error.
    store = [bytearray(buffer.raw()) for buffer in buffers]
    first, second = (pickle.loads(stream, buffers=store) for _ in range(2))
    zero(first)
    first.offsets("responses").zero_()
    assert plain(second) == plain(example()) == plain(pickle.loads(stream, buffers=store))


def test_a_received_batch_does_not_alias_the_sender():
    batch = example()
    stream, buffers = sent(batch)
    # The receiver gets the sender's own buffers, as if both were threads of one process.
    copy = pickle.loads(stream, buffers=buffers)
    for tensor in (copy.values("responses"), copy.batch["uid"], copy.offsets("prompts")):
        tensor.zero_()
    assert plain(batch) == plain(example())


def test_sending_takes_one_buffer_a_column_and_one_a_family_without_copying():
    batch = example().pop(["name", "tools"])[1]
    stream, buffers = sent(batch)
    addresses = sorted(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0] for buffer in buffers)
    memory = [batch.values(key) for key in ("prompts", "responses", "response_mask")]
    memory += [batch.batch[key] for key in ("uid", "reward_components")]
    memory += [batch.offsets(key) for key in ("prompts", "responses")]
    assert addresses == sorted(tensor.data_ptr() for tensor in memory)
    assert len(stream) < 1000


def test_a_sliced_batch_sends_only_its_own_rows():
    tokens = torch.arange(100_000)
    batch = DataProto.from_dict({"responses": jagged(tokens.view(1000, 100).unbind(), torch.int64),
                                 "uid": torch.arange(1000)}, {"text": ["x" * 100] * 1000})  # fmt: skip
    for part in (batch[10:12], batch[[10, 11]], batch.split(2)[5]):
        assert len(pickle.dumps(part, protocol=5)) < 2 * (100 * 8 + 8 + 100) + 1000
    view = DataProto.from_dict({"uid": torch.arange(1000)[:2]})
    assert len(pickle.dumps(view, protocol=5)) < 1000


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_and_shape_arrives_as_it_was_sent(dtype):
    batch = DataProto.from_dict(
        {"matrix": torch.arange(12).view(2, 3, 2).to(dtype).transpose(1, 2), "nothing": torch.zeros(2, 0, dtype=dtype),
         "rows": jagged([[1, 0], [1]], dtype), "no_tokens": jagged([[], []], dtype)}
    )  # fmt: skip
    assert plain(received(batch)) == plain(batch)
    assert plain(received(batch[:0])) == plain(batch[:0])


def test_moving_to_a_device_moves_a_familys_offsets_once():
    moved = example().to("meta")
    assert moved.batch["uid"].is_meta
    assert moved.values("responses").is_meta
    assert moved.offsets("responses").is_meta
    assert shares_one_offsets_object(moved)
    assert not example().values("responses").is_meta
