"""Tests of batches in Ray's object store that several processes read and try to overwrite."""

import pytest
import ray
import torch

from rltrain.batch.columns import Stored
from rltrain.batch.data_proto import DataProto, jagged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]


def make_batch() -> DataProto:
    """Make a batch of about a megabyte, so that Ray puts it into shared memory instead of the message."""
    rows = torch.arange(4000, dtype=torch.float32).view(8, 500).repeat(1, 60).unbind()
    return DataProto.from_dict({"values": jagged(rows, torch.float32), "uid": torch.arange(8)}, {"text": ["ä"] * 8})


@ray.remote(num_cpus=0)
class Reader:
    def take(self, batch: DataProto, rows: list[int]) -> DataProto:
        """Return the given rows with doubled values.

        The function also checks that the batch's arrays lie in Ray's shared memory, which is not writable.
        """
        column = batch._columns["values"].values
        assert isinstance(column, Stored)
        assert not column.memory.flags.writeable
        part = batch[rows]
        assert isinstance(batch._columns["values"].values, Stored)
        assert part.non_tensor_batch["text"].tolist() == ["ä"] * len(rows)
        return part.with_values("values", doubled=2 * part.values("values")).select(["doubled"])

    def overwrite(self, batch: DataProto) -> None:
        """Overwrite every array that the methods of the batch return."""
        batch.values("values").fill_(-1)
        batch.offsets("values").fill_(0)
        batch.batch["uid"].fill_(-1)


def test_actors_take_their_rows_from_one_copy_and_a_write_reaches_no_other_reader():
    batch = make_batch()
    shared, readers = ray.put(batch), [Reader.remote() for _ in range(2)]
    ray.get([reader.overwrite.remote(shared) for reader in readers])
    ray.get(shared).values("values").fill_(-1)  # the driver reads the same shared memory
    plan = [[6, 1, 2, 5], [0, 7, 4, 3]]
    parts = ray.get([reader.take.remote(shared, rows) for reader, rows in zip(readers, plan, strict=True)])
    whole = DataProto.concat(parts, rows=torch.tensor(plan).flatten().argsort())
    assert torch.equal(whole.values("doubled"), 2 * batch.values("values"))
    assert torch.equal(ray.get(shared).batch["uid"], torch.arange(8))
    assert whole.union(batch).offsets("doubled") is whole.union(batch).offsets("values")
    for reader in readers:
        ray.kill(reader)
