"""Reading of selected rows of a tensor in a safetensors file, without reading the whole tensor.

rltrain does not read slices of tensors with the safetensors library, because the library either returns a slice that is
a view of the file, or reads the whole tensor first. If the safetensors library maps the file into memory, its slices
are views of the file, so a later change of the file would change the weights of a running model. Without memory
mapping, the safetensors library reads the whole tensor before it returns a slice.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LENGTH_BYTES = 8  # A safetensors file begins with the length of its header, as a little-endian integer.


@dataclass(frozen=True)
class StoredRows:
    """A tensor in a safetensors file; indexing the `StoredRows` object reads the requested rows into memory.

    `StoredRows` has the interface that transformers expects of a lazily loaded tensor.

    Attributes:
        file: the safetensors file.
        start: offset in bytes of the tensor in the file.
        dtype: the tensor's dtype.
        shape: the tensor's shape.
    """

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part of the tensor.

        Args:
            index: an ellipsis, a slice, or a tuple of slices. Only the rows that `index` selects in the tensor's first
                dimension are read from the file.

        Raises:
            OSError: the file ends before the end of the requested rows.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if not self.shape or parts[0] is Ellipsis:
            return self._read(0, math.prod(self.shape)).view(self.shape)
        begin, end, step = parts[0].indices(self.shape[0])
        assert step == 1, "a slice of rows must have the step 1"
        width, rows = math.prod(self.shape[1:]), max(end - begin, 0)
        found = self._read(begin * width, rows * width).view(rows, *self.shape[1:])
        return found[(slice(None), *parts[1:])]

    def _read(self, first: int, count: int) -> Tensor:
        """Read `count` elements of the flattened tensor, starting at index `first`."""
        found = torch.empty(count, dtype=self.dtype)
        room = found.view(torch.uint8).numpy().data if count else memoryview(b"")
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.start + first * self.dtype.itemsize)
            done = 0
            while done < len(room):
                got = stream.readinto(room[done:])
                if not got:
                    raise OSError(f"{self.file}: the file ends before the end of a tensor; copy or download it again")
                done += got
        return found


def stored_rows(file: Path) -> dict[str, StoredRows]:
    """Return a dict that maps the name of each tensor in a complete safetensors file to the tensor."""
    from transformers.modeling_utils import str_to_torch_dtype

    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        header = json.loads(stream.read(length))
    begin = _LENGTH_BYTES + length
    return {
        name: StoredRows(
            file, begin + entry["data_offsets"][0], str_to_torch_dtype[entry["dtype"]], tuple(entry["shape"])
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
