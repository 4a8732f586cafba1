"""`DataProto`, the batch of a training step, and the table of its columns.

The following letters stand for sizes in this project: P prompts in a step, G samples of one prompt (a group), B = P * G
sequences, T response tokens of a row in the padded view, N tokens of a packed batch, V vocabulary entries.

A column of variable length is *jagged*: the column consists of the concatenated values of all rows, (N,), and of the
offsets of the rows, (B + 1,). Row i of a jagged column is `values[offsets[i]:offsets[i + 1]]`. A column family is a set
of jagged columns that have equal row lengths and share one offsets tensor, such as the response columns. Batches are
stored and sent without padding. The method `padded(column)` returns the padded view (B, T) of a column. The functions
in `rltrain.algorithms` read the padded view of a column.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rltrain.batch.columns import Column, column_of, row_ranges, same, share_offsets, take_rows
from rltrain.batch.jagged import jagged, offsets_of, positions, row_numbers
from rltrain.batch.serialization import Packet, Text, objects, receive, send

__all__ = ["DataProto", "jagged", "offsets_of", "positions"]


class DataProto:
    """A batch of B rows: tensor columns, columns of Python objects, and metadata.

    A method that transforms a batch returns a new batch and leaves the original batch unchanged. The values of a batch
    that came from another process stay in shared memory, which other processes may read too. `DataProto` never writes
    to shared memory. Indexing with `[rows]` copies the selected rows of every column. A method that returns a column as
    a tensor, such as `values`, copies only this column from shared memory. The property `batch` copies all tensor
    columns from shared memory.

    Attributes:
        meta_info: metadata of the batch as a whole.
    """

    def __init__(self, batch: TensorDict, non_tensor_batch: dict[str, np.ndarray], meta_info: dict[str, Any]) -> None:
        rows = {len(column) for column in non_tensor_batch.values()} | {int(batch.batch_size[0])}
        if len(rows) != 1:
            raise ValueError(
                f"columns have {sorted(rows)} rows: all columns of a batch must have the same number of rows"
            )
        columns = share_offsets({key: column_of(cast(Tensor, column)) for key, column in batch.items()})
        self._fill(columns, dict(non_tensor_batch), rows.pop(), meta_info)

    def _fill(
        self, columns: dict[str, Column], others: dict[str, np.ndarray | Text], rows: int, meta_info: dict[str, Any]
    ) -> None:
        self._columns, self._others, self._rows, self.meta_info = columns, others, rows, meta_info
        self._table: TensorDict | None = None

    @classmethod
    def _of(
        cls, columns: Mapping[str, Column], others: Mapping[str, Any], rows: int, meta_info: Mapping[str, Any]
    ) -> Self:
        made = cls.__new__(cls)
        made._fill(dict(columns), dict(others), rows, dict(meta_info))
        return made

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Create a batch from tensor columns and columns of Python objects.

        Raises:
            ValueError: the columns differ in their number of rows, or a tensor column and an object column have the
                same name.
        """
        tensors, non_tensors = dict(tensors or {}), dict(non_tensors or {})
        sizes = {name: len(c) if not c.is_nested else c.size(0) for name, c in tensors.items()}
        sizes |= {name: len(c) for name, c in non_tensors.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"numbers of rows differ: {sizes}; all columns of a batch must have the same number of rows"
            )
        if twice := tensors.keys() & non_tensors.keys():
            raise ValueError(
                f"{sorted(twice)} are names of both tensor and object columns; give each column its own name"
            )
        columns = share_offsets({name: column_of(column) for name, column in tensors.items()})
        others = {name: objects(column) for name, column in non_tensors.items()}
        return cls._of(columns, others, next(iter(sizes.values()), 0), meta_info or {})

    @property
    def batch(self) -> TensorDict:
        """A dict that maps the name of each tensor column to a dense tensor (B, ...) or a nested tensor of B rows.

        Changes to the dict `batch` also change this `DataProto`.
        """
        if self._table is None:
            tensors = {key: column.whole() for key, column in self._columns.items()}
            self._table = TensorDict(tensors, batch_size=[self._rows])
        return self._table

    @property
    def non_tensor_batch(self) -> dict[str, Any]:
        """A dict that maps the name of each column of Python objects to an object array (B,).

        Changes to the dict `non_tensor_batch` also change this `DataProto`.
        """
        for key, column in self._others.items():
            if isinstance(column, Text):
                self._others[key] = column.strings()
        return self._others

    @property
    def _tensors(self) -> dict[str, Column]:
        """The tensor columns, including changes that were made through the property `batch`."""
        if self._table is not None:
            known = {id(column.tensor): column for column in self._columns.values()}
            found = {
                key: known.get(id(tensor)) or column_of(cast(Tensor, tensor)) for key, tensor in self._table.items()
            }
            # `!=` compares `Column` objects by identity, because the dataclass `Column` has `eq=False`.
            if found != self._columns:
                self._columns = share_offsets(found)
        return self._columns

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"DataProto({len(self)} rows; {', '.join(self.keys())})"

    def __contains__(self, key: str) -> bool:
        return key in self._tensors or key in self._others

    def keys(self) -> list[str]:
        """Return the names of all columns of the batch."""
        return [*self._tensors, *self._others]

    def offsets(self, column: str) -> Tensor:
        """Return the offsets (B + 1,) of a jagged column."""
        return self._jagged(column)[1]

    def values(self, column: str) -> Tensor:
        """Return the concatenated rows of a jagged column, (N,)."""
        return self._jagged(column)[0].own()

    def lengths(self, column: str) -> Tensor:
        """Return the row lengths (B,) of a jagged column."""
        return self.offsets(column).diff()

    def with_values(self, like: str, **columns: Tensor) -> Self:
        """Return the batch with additional jagged columns.

        Args:
            like: name of an existing jagged column. Every column that `with_values` adds gets the row lengths of the
                column `like`.
            **columns: maps the name of each column to add to the values (N,) of the column.

        Raises:
            ValueError: a column to add has more or fewer values than the column `like`.
        """
        column, offsets = self._jagged(like)
        for name, values in columns.items():
            if len(values) != len(column.values):
                raise ValueError(
                    f"{len(values)} values were given for column '{name}', but column '{like}' has "
                    f"{len(column.values)} values: give one value per token"
                )
        return self._with({name: Column(values, offsets) for name, values in columns.items()})

    def with_padded(self, like: str, **columns: Tensor) -> Self:
        """Return the batch with additional jagged columns.

        Args:
            like: name of an existing jagged column. Every column that `with_padded` adds gets the row lengths of the
                column `like`.
            **columns: maps the name of each column to add to a padded tensor (B, T), with padding at the same places as
                in `padded(like)`.
        """
        mask = self.padding_mask(like)
        return self.with_values(like, **{name: padded[mask] for name, padded in columns.items()})

    def padded(self, column: str, *, padding: float = 0) -> Tensor:
        """Return a jagged column as a tensor (B, T), in which each row is filled up with `padding` on the right."""
        values, mask = self.values(column), self.padding_mask(column)
        return torch.full(mask.shape, padding, dtype=values.dtype, device=values.device).masked_scatter(mask, values)

    def padding_mask(self, column: str) -> Tensor:
        """Return a bool mask (B, T) that is True where `padded(column)` is not padding."""
        lengths = self.lengths(column)
        width = int(lengths.max()) if len(self) else 0
        return torch.arange(width, device=lengths.device) < lengths[:, None]

    def select(self, keys: Iterable[str]) -> Self:
        """Return a batch with only the named columns.

        Raises:
            KeyError: an element of `keys` is not the name of a column of the batch.
        """
        keys, columns = self._known(keys), self._tensors
        others = {key: column for key, column in self._others.items() if key in keys}
        return self._of({key: columns[key] for key in keys if key in columns}, others, len(self), self.meta_info)

    def pop(self, keys: Iterable[str]) -> tuple[Self, Self]:
        """Split the batch into a batch with the named columns and a batch with all other columns.

        The original batch does not change.

        Returns:
            The batch with only the named columns, and the batch without the named columns.
        """
        keys = self._known(keys)
        return self.select(keys), self.select([key for key in self.keys() if key not in keys])

    def rename(self, names: Mapping[str, str]) -> Self:
        """Return the batch with renamed columns.

        Args:
            names: mapping from old to new column names.

        Raises:
            KeyError: a key of `names` is not the name of a column of the batch.
            ValueError: after renaming, two columns of the batch would have the same name.
        """
        self._known(names)
        if len({names.get(key, key) for key in self.keys()}) != len(self.keys()):
            raise ValueError(
                f"rename {dict(names)} would give two columns the same name; the columns are {self.keys()}"
            )
        columns = {names.get(key, key): column for key, column in self._tensors.items()}
        others = {names.get(key, key): column for key, column in self._others.items()}
        return self._of(columns, others, len(self), self.meta_info)

    def union(self, other: "DataProto") -> Self:
        """Return a batch with the columns and metadata of this batch and of the batch `other`.

        Raises:
            ValueError: the numbers of rows differ, or the two batches have different values in a column or metadata
                entry of the same name.
        """
        if len(self) != len(other):
            raise ValueError(
                f"union of {len(self)} and {len(other)} rows: both batches must have the same number of rows"
            )
        for key in set(self.keys()) & set(other.keys()):
            if not self._same(other, key):
                raise ValueError(
                    f"union: column '{key}' differs between the two batches; rename or pop one of them first"
                )
        for key in set(self.meta_info) & set(other.meta_info):
            ours, theirs = self.meta_info[key], other.meta_info[key]
            if ours != theirs:
                raise ValueError(f"union: meta_info['{key}'] is {ours} in one batch and {theirs} in the other batch")
        merged = self._with({key: column for key, column in other._tensors.items() if key not in self})
        merged._others.update(other._others)
        merged.meta_info.update(other.meta_info)
        return merged

    @classmethod
    def concat(cls, parts: Sequence["DataProto"], *, rows: Tensor | None = None) -> Self:
        """Concatenate the rows of several batches (parts) into one batch. The values of each row are copied only once.

        Args:
            parts: the batches to concatenate.
            rows: int64 indices of the rows to take, in the order of the result. The indices count the rows of all
                batches in `parts` one after another: if the first batch has 4 rows, the first row of the second batch
                has index 4. If `rows` is None, all rows of all batches are taken in order.

        Raises:
            ValueError: the parts have different columns, or `parts` is empty.
        """
        if not parts:
            raise ValueError("concat got an empty list: give at least one batch")
        kinds = parts[0]._kinds()
        for part in parts:
            if part._kinds() != kinds:
                raise ValueError(f"concat: the batches have different columns, {kinds} and {part._kinds()}")
        total = sum(map(len, parts))
        index = None if rows is None else row_numbers(rows, total).numpy()
        columns = take_rows([part._tensors for part in parts], index)
        others = {key: np.concatenate([p.non_tensor_batch[key] for p in parts]) for key in parts[0]._others}
        if index is not None:
            others, total = {key: column[index] for key, column in others.items()}, len(index)
        meta_info = {key: value for part in parts for key, value in part.meta_info.items()}
        return cls._of(share_offsets(columns), others, total, meta_info)

    def chunk(self, chunks: int) -> list[Self]:
        """Split the batch into `chunks` batches whose sizes differ by at most one row.

        Raises:
            ValueError: there are fewer rows than chunks, or `chunks` is below 1.
        """
        if not 1 <= chunks <= max(len(self), 1):
            raise ValueError(f"{len(self)} rows cannot be split into {chunks} chunks; use 1 to {len(self)} chunks")
        return [self[torch.from_numpy(rows)] for rows in np.array_split(np.arange(len(self)), chunks)]

    def ranges(self, sizes: Sequence[int]) -> list[Self]:
        """Split the batch into batches of consecutive rows, which share memory with the original batch.

        The batches that `ranges` returns can be sent to other processes. `ranges` does not support batches with columns
        of Python objects.

        Args:
            sizes: number of rows of each batch that `ranges` returns. The elements of `sizes` must add up to the number
                of rows of the original batch.
        """
        assert not self._others, f"`ranges` does not support columns of Python objects, such as {list(self._others)}"
        assert sum(sizes) == len(self), f"the sizes add up to {sum(sizes)}, and the batch has {len(self)} rows"
        return [
            self._of(columns, {}, size, self.meta_info)
            for columns, size in zip(row_ranges(self._tensors, sizes), sizes, strict=True)
        ]

    def split(self, size: int) -> list[Self]:
        """Split the batch into batches of `size` rows. The last batch may have fewer than `size` rows."""
        if size < 1:
            raise ValueError(f"split size must be >= 1, got {size}")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def repeat(self, times: int, *, interleave: bool = True) -> Self:
        """Return a batch in which each row is repeated `times` times.

        For example, two repetitions of the rows a, b give a, a, b, b if `interleave` is true, and a, b, a, b if
        `interleave` is false.
        """
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(times) if interleave else rows.repeat(times)]

    def reorder(self, rows: Tensor | Sequence[int]) -> Self:
        """Return the batch with reordered rows: row i of the new batch is row `rows[i]` of the old batch."""
        return self[torch.as_tensor(rows, dtype=torch.int64)]

    def __getitem__(self, rows: slice | int | Tensor | np.ndarray | Sequence[int] | Sequence[bool]) -> Self:
        index = row_numbers(rows, len(self)).numpy()
        others = {key: c.take(index) if isinstance(c, Text) else c[index] for key, c in self._others.items()}
        return self._of(share_offsets(take_rows([self._tensors], index)), others, len(index), self.meta_info)

    def to(self, device: str | torch.device) -> Self:
        """Return the batch with its tensors moved to `device`."""
        families: dict[int, Tensor] = {}
        moved = {}
        for key, column in self._tensors.items():
            offsets = column.offsets
            if offsets is not None:
                offsets = families.setdefault(id(offsets), offsets.to(device))
            moved[key] = Column(column.own().to(device), offsets)
        return self._of(moved, self._others, len(self), self.meta_info)

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """Append copies of the batch's first rows until the number of rows is a multiple of `divisor`.

        Returns:
            The batch extended by copies of its first rows, and the number of these copies.
        """
        added = -len(self) % divisor
        return self[torch.arange(len(self) + added) % max(len(self), 1)], added

    def unpad(self, added: int) -> Self:
        """Return the batch without its last `added` rows, which `pad_to_divisor` appended."""
        return self[: len(self) - added]

    def save(self, path: str | Path) -> None:
        """Write the batch to one file.

        Object columns and metadata are stored as JSON, so that `load` does not unpickle any code.
        """
        families: dict[int, Tensor] = {}
        tensors = {}
        for key, column in self._tensors.items():
            family = -1
            if column.offsets is not None:
                families[id(column.offsets)] = column.offsets
                family = list(families).index(id(column.offsets))
            tensors[key] = (column.own(), family)
        others = json.dumps({key: column.tolist() for key, column in self.non_tensor_batch.items()})
        torch.save(
            {
                "tensors": tensors,
                "families": list(families.values()),
                "rows": len(self),
                "others": others,
                "meta": json.dumps(self.meta_info),
            },
            path,
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a batch from a file that `save` wrote."""
        stored = torch.load(path, weights_only=True)
        families = stored["families"]
        columns = {
            key: Column(values, families[family] if family >= 0 else None)
            for key, (values, family) in stored["tensors"].items()
        }
        others = {key: objects(column) for key, column in json.loads(stored["others"]).items()}
        return cls._of(columns, others, stored["rows"], json.loads(stored["meta"]))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (type(self), len(self), self.meta_info, *send(self._tensors, self._others, protocol))

    def _with(self, columns: Mapping[str, Column]) -> Self:
        return self._of(share_offsets({**self._tensors, **columns}), self._others, len(self), self.meta_info)

    def _kinds(self) -> dict[str, str]:
        kinds = {key: "dense" if column.offsets is None else "jagged" for key, column in self._tensors.items()}
        return kinds | dict.fromkeys(self._others, "objects")

    def _known(self, keys: Iterable[str]) -> list[str]:
        keys = list(keys)
        for key in keys:
            if key not in self:
                raise KeyError(f"no column '{key}'; the columns are {', '.join(self.keys())}")
        return keys

    def shares(self, other: "DataProto", key: str) -> bool:
        """Return whether the tensor column `key` of this batch and of the batch `other` occupies the same memory.

        `shares` compares only the memory locations of the two columns, not their values.
        """
        return self._tensors[key].values is other._tensors[key].values

    def _same(self, other: "DataProto", key: str) -> bool:
        if key in self._tensors and key in other._tensors:
            return same(self._tensors[key], other._tensors[key])
        if key in self._tensors or key in other._tensors:
            return False
        ours, theirs = self.non_tensor_batch[key], other.non_tensor_batch[key]
        return ours is theirs or ours.tolist() == theirs.tolist()

    def _jagged(self, key: str) -> tuple[Column, Tensor]:
        self._known([key])
        column = self._tensors.get(key)
        if column is None or column.offsets is None:
            raise ValueError(f"column '{key}' is not jagged")
        return column, column.offsets


def _rebuild(kind: type[DataProto], rows: int, meta_info: dict[str, Any], *packet: Any) -> DataProto:
    return kind._of(*receive(Packet(*packet)), rows, meta_info)
