"""Tests that some rows of a tensor are read from a safetensors file, and nothing else."""

import pytest
import torch
from safetensors.torch import save_file

from rltrain.data.safetensors_rows import stored_rows

TENSORS = {
    "matrix": torch.arange(35.0).view(7, 5),
    "half": torch.arange(24).view(2, 3, 4).to(torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "ids": torch.arange(6),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", TENSORS)
def test_an_ellipsis_reads_the_whole_tensor(file, name):
    stored = stored_rows(file)[name]
    assert stored.get_shape() == list(TENSORS[name].shape)
    assert torch.equal(stored[...], TENSORS[name])
    assert stored[...].dtype == TENSORS[name].dtype


@pytest.mark.parametrize(
    "index", [slice(2, 5), slice(0, 0), slice(5, 99), (slice(1, 3), slice(None)), (slice(1, 7), slice(2, 4))]
)
def test_a_slice_reads_the_same_rows_as_of_a_tensor_in_memory(file, index):
    assert torch.equal(stored_rows(file)["matrix"][index], TENSORS["matrix"][index])


def test_only_the_requested_rows_are_read(file):
    rows = stored_rows(file)["matrix"]
    content = bytearray(file.read_bytes())
    before, after = rows.start + 4 * 10, rows.start + 4 * 25
    file.write_bytes(content[:after])  # the file ends after row 4, so that reading any later row fails
    assert torch.equal(rows[2:5], TENSORS["matrix"][2:5])
    with pytest.raises(OSError, match="the file ends before the end of a tensor"):
        rows[2:6]
    assert rows[2:5].untyped_storage().nbytes() == after - before


def test_what_was_read_does_not_change_with_the_file(file):
    rows = stored_rows(file)["matrix"][0:7]
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(rows, TENSORS["matrix"])
