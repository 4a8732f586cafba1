"""`DataProto`: the batch that travels through a training step, and the table of its columns.

Shapes, everywhere in this project: P prompts in a step, G samples of one prompt (a group), B = P * G sequences,
T response tokens (padded view), N tokens of a packed batch, V vocabulary.

Variable-length columns are *jagged*: the values of all rows one after the other, (N,), and offsets, (B + 1,), so that
row i is `values[offsets[i]:offsets[i + 1]]`. Columns of one family (all response columns, say) share one offsets tensor.
Nothing is padded at rest or on the wire; `padded(column)` gives the (B, T) view that the algorithms read.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

# column -> (family, meaning). A family is one offsets tensor; "row" is one value per row, dense.
COLUMNS: dict[str, tuple[str, str]] = {
    "prompts": ("prompt", "token ids of the prompt, int64"),
    "responses": ("response", "token ids as the engine returned them, int64"),
    "response_mask": ("response", "bool; True = sampled by the policy and trained on"),
    "rollout_log_probs": ("response", "engine's log-prob of each token when it was sampled, nats"),
    "old_log_probs": ("response", "actor's log-prob before the update, nats"),
    "ref_log_probs": ("response", "reference's log-prob, nats"),
    "policy_version": ("response", "weight version (step) that sampled the token, int64"),
    "token_level_scores": ("response", "raw reward on the last trained token, 0 elsewhere"),
    "token_level_rewards": ("response", "scores after KL-in-reward"),
    "values": ("response", "critic's value of the state in which the token was chosen"),
    "advantages": ("response", "advantage of the token"),
    "returns": ("response", "regression target of the value"),
    "uid": ("row", "prompt group of the row, int64"),
    "valid": ("row", "bool; False = the reward failed, the row is in no statistic and trains nothing"),
    "scores": ("row", "total reward of the row"),
}


def jagged(rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype) -> Tensor:
    """A jagged column (B, j) from B sequences."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
    values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
    return nested_tensor_from_jagged(values, offsets_of(lengths))


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets (B + 1,) of rows with these lengths (B,)."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def is_jagged(column: Tensor) -> bool:
    """Whether a column is stored as values and offsets."""
    return column.is_nested


def positions(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... within each row: (N,) for rows of these lengths (B,)."""
    starts = offsets_of(lengths)[:-1]
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


class DataProto:
    """A batch of B rows: tensors, Python objects and facts about the whole. Methods return new batches.

    Attributes:
        batch: tensors by column name, each (B, ...) dense or (B, j) jagged.
        non_tensor_batch: object arrays (B,) by column name.
        meta_info: facts about the batch as a whole.
    """

    def __init__(self, batch: TensorDict, non_tensor_batch: dict[str, np.ndarray], meta_info: dict[str, Any]) -> None:
        rows = {len(column) for column in non_tensor_batch.values()} | {int(batch.batch_size[0])}
        if len(rows) != 1:
            raise ValueError(f"columns have {sorted(rows)} rows: all columns of a batch must have the same number")
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """A batch from columns. Raises ValueError when they differ in their number of rows."""
        tensors, non_tensors = dict(tensors or {}), dict(non_tensors or {})
        sizes = {name: len(c) if not c.is_nested else c.size(0) for name, c in tensors.items()}
        sizes |= {name: len(c) for name, c in non_tensors.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns differ in rows: {sizes}; all columns of a batch must have the same number")
        rows = next(iter(sizes.values()), 0)
        batch = TensorDict(tensors, batch_size=[rows])
        return cls(batch, {name: _objects(column) for name, column in non_tensors.items()}, dict(meta_info or {}))

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    def __repr__(self) -> str:
        return f"DataProto({len(self)} rows; {', '.join(self.keys())})"

    def __contains__(self, key: str) -> bool:
        return key in self.batch.keys() or key in self.non_tensor_batch  # noqa: SIM118 (a TensorDict is no dict)

    def keys(self) -> list[str]:
        """Names of all columns."""
        return [*self.batch.keys(), *self.non_tensor_batch]

    def offsets(self, column: str) -> Tensor:
        """Offsets (B + 1,) of a jagged column."""
        return self._jagged(column).offsets()

    def values(self, column: str) -> Tensor:
        """All rows of a jagged column one after the other, (N,)."""
        return self._jagged(column).values()

    def lengths(self, column: str) -> Tensor:
        """Row lengths (B,) of a jagged column."""
        return self.offsets(column).diff()

    def with_values(self, like: str, **columns: Tensor) -> Self:
        """This batch with further jagged columns, given as values (N,) in the rows of the column `like`."""
        offsets = self.offsets(like)
        return self._with({name: nested_tensor_from_jagged(values, offsets) for name, values in columns.items()})

    def with_padded(self, like: str, **columns: Tensor) -> Self:
        """This batch with further jagged columns, given as (B, T) in the padded view of the column `like`."""
        mask = self.padding_mask(like)
        return self.with_values(like, **{name: padded[mask] for name, padded in columns.items()})

    def padded(self, column: str, *, padding: float = 0) -> Tensor:
        """The (B, T) view of a jagged column: rows on the left, `padding` behind them."""
        values, mask = self.values(column), self.padding_mask(column)
        return torch.full(mask.shape, padding, dtype=values.dtype, device=values.device).masked_scatter(mask, values)

    def padding_mask(self, column: str) -> Tensor:
        """(B, T) bool: True where `padded(column)` holds a value."""
        lengths = self.lengths(column)
        width = int(lengths.max()) if len(self) else 0
        return torch.arange(width, device=lengths.device) < lengths[:, None]

    def select(self, keys: Iterable[str]) -> Self:
        """Only these columns. Raises KeyError for one that is not there."""
        keys = self._known(keys)
        tensors = self.batch.select(*[key for key in keys if key not in self.non_tensor_batch])
        return type(self)(tensors, {k: c for k, c in self.non_tensor_batch.items() if k in keys}, dict(self.meta_info))

    def pop(self, keys: Iterable[str]) -> tuple[Self, Self]:
        """(taken, rest): the batch with these columns, and the batch without them."""
        keys = self._known(keys)
        return self.select(keys), self.select([key for key in self.keys() if key not in keys])

    def rename(self, names: Mapping[str, str]) -> Self:
        """Columns under new names, `{old: new}`."""
        self._known(names)
        tensors = {names.get(key, key): column for key, column in self.batch.items()}
        others = {names.get(key, key): column for key, column in self.non_tensor_batch.items()}
        if len(tensors) + len(others) != len(set(tensors) | set(others)) or len(tensors) + len(others) != len(self.keys()):
            raise ValueError(f"rename {dict(names)} gives two columns one name; columns are {self.keys()}")
        return type(self)(TensorDict(tensors, batch_size=[len(self)]), others, dict(self.meta_info))

    def union(self, other: "DataProto") -> Self:
        """Both batches' columns. Raises ValueError when rows differ, or a shared column or fact holds different values."""
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} and {len(other)} rows: both must have the same rows")
        for key in set(self.keys()) & set(other.keys()):
            if not _same(self._column(key), other._column(key)):
                raise ValueError(f"union: column '{key}' differs between the two; rename or pop one of them first")
        for key in set(self.meta_info) & set(other.meta_info):
            if self.meta_info[key] != other.meta_info[key]:
                raise ValueError(f"union: meta_info['{key}'] is {self.meta_info[key]} in one and {other.meta_info[key]} in the other")
        merged = self._with(dict(other.batch.items()))
        merged.non_tensor_batch.update(other.non_tensor_batch)
        merged.meta_info.update(other.meta_info)
        return merged

    @classmethod
    def concat(cls, parts: Sequence["DataProto"]) -> Self:
        """The rows of all parts, in order. Raises ValueError when their columns differ or there is no part."""
        if not parts:
            raise ValueError("concat of no batches: give at least one")
        keys = parts[0].keys()
        for part in parts:
            if set(part.keys()) != set(keys):
                raise ValueError(f"concat: columns differ, {sorted(keys)} and {sorted(part.keys())}")
        joined = _join([part.batch for part in parts])
        others = {key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in parts[0].non_tensor_batch}
        return cls(joined, others, {key: value for part in parts for key, value in part.meta_info.items()})

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` batches whose sizes differ by at most one row; raises ValueError when there are fewer rows."""
        if not 1 <= chunks <= max(len(self), 1):
            raise ValueError(f"{len(self)} rows do not make {chunks} chunks; use 1 to {len(self)}")
        return [self[torch.from_numpy(rows)] for rows in np.array_split(np.arange(len(self)), chunks)]

    def split(self, size: int) -> list[Self]:
        """Batches of `size` rows; the last may be smaller."""
        if size < 1:
            raise ValueError(f"split size must be >= 1, got {size}")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def repeat(self, times: int, *, interleave: bool = True) -> Self:
        """Each row `times` times: a a b b with `interleave`, else a b a b."""
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(times) if interleave else rows.repeat(times)]

    def reorder(self, rows: Tensor | Sequence[int]) -> Self:
        """The rows in this order."""
        return self[torch.as_tensor(rows, dtype=torch.int64)]

    def __getitem__(self, rows: slice | int | Tensor | np.ndarray | Sequence[int] | Sequence[bool]) -> Self:
        index = _row_numbers(rows, len(self))
        tensors = _per_family(self.batch, lambda family: _take(family, index))
        numbers = index.numpy()
        others = {key: column[numbers] for key, column in self.non_tensor_batch.items()}
        return type(self)(TensorDict(tensors, batch_size=[len(index)]), others, dict(self.meta_info))

    def to(self, device: str | torch.device) -> Self:
        """This batch with its tensors on `device`."""
        return type(self)(self.batch.to(device), dict(self.non_tensor_batch), dict(self.meta_info))

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """(batch, added): rows repeated from the start until the number of rows is a multiple of `divisor`."""
        added = -len(self) % divisor
        return self[torch.arange(len(self) + added) % max(len(self), 1)], added

    def unpad(self, added: int) -> Self:
        """The batch without the last `added` rows."""
        return self[: len(self) - added]

    def save(self, path: str | Path) -> None:
        """Write tensors, objects (as JSON) and facts (as JSON) to one file that `load` reads without unpickling code."""
        tensors, families = _pack(self.batch)
        others = json.dumps({key: column.tolist() for key, column in self.non_tensor_batch.items()})
        torch.save({"tensors": tensors, "families": families, "rows": len(self), "others": others,
                    "meta": json.dumps(self.meta_info)}, path)  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        stored = torch.load(path, weights_only=True)
        others = {key: _objects(column) for key, column in json.loads(stored["others"]).items()}
        return cls(_unpack(stored["tensors"], stored["families"], stored["rows"]), others, json.loads(stored["meta"]))

    def __reduce__(self) -> tuple[Any, ...]:
        tensors, families = _pack(self.batch)
        arrays = {key: (str(t.dtype), _bytes(t), family) for key, (t, family) in tensors.items()}
        state = (arrays, [offsets.numpy() for offsets in families], len(self), self.non_tensor_batch, self.meta_info)
        return _rebuild, (type(self), *state)

    def _with(self, tensors: Mapping[str, Tensor]) -> Self:
        batch = TensorDict({**dict(self.batch.items()), **tensors}, batch_size=[len(self)])
        return type(self)(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def _known(self, keys: Iterable[str]) -> list[str]:
        keys = list(keys)
        for key in keys:
            if key not in self:
                raise KeyError(f"no column '{key}'; there are {', '.join(self.keys())}")
        return keys

    def _column(self, key: str) -> Any:
        self._known([key])
        return self.non_tensor_batch[key] if key in self.non_tensor_batch else self.batch[key]

    def _jagged(self, key: str) -> Any:
        column = self._column(key)
        if not isinstance(column, Tensor) or not column.is_nested:
            raise ValueError(f"column '{key}' is not jagged")
        return column


def _objects(column: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(column), dtype=object)
    array[:] = list(column)
    return array


def _row_numbers(rows: Any, total: int) -> Tensor:
    if isinstance(rows, slice):
        return torch.arange(*rows.indices(total))
    index = torch.atleast_1d(torch.as_tensor(rows))
    if index.dtype == torch.bool:
        if len(index) != total:
            raise IndexError(f"a mask of {len(index)} values for {total} rows: it must have one value a row")
        return index.nonzero().squeeze(-1)
    index = index.to(torch.int64)
    if len(index) and (int(index.max()) >= total or int(index.min()) < -total):
        raise IndexError(f"row {int(index.abs().max())} of {total}")
    return index % total if total else index


def _take(offsets: Tensor | None, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that takes `rows` out of a column with these offsets; what columns share is computed once."""
    if offsets is None:
        return lambda column: column[rows.to(column.device)]
    lengths = offsets.diff()[rows]
    new_offsets = offsets_of(lengths)
    index = offsets[:-1][rows].repeat_interleave(lengths) + positions(lengths)
    return lambda column: nested_tensor_from_jagged(column.values()[index], new_offsets)


def _per_family(batch: TensorDict, make: Callable[[Tensor | None], Callable[[Tensor], Tensor]]) -> dict[str, Tensor]:
    dense = make(None)
    families: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []
    result = {}
    for key, column in batch.items():
        if not column.is_nested:
            result[key] = dense(column)
            continue
        offsets = column.offsets()
        known = next((f for o, f in families if o is offsets or torch.equal(o, offsets)), None)
        if known is None:
            known = make(offsets)
            families.append((offsets, known))
        result[key] = known(column)
    return result


def _join(batches: Sequence[TensorDict]) -> TensorDict:
    tensors: dict[str, Tensor] = {}
    shared: list[Tensor] = []
    for key in batches[0].keys():  # noqa: SIM118 (a TensorDict is no dict)
        columns = [batch[key] for batch in batches]
        if not columns[0].is_nested:
            tensors[key] = torch.cat(columns)
            continue
        offsets = offsets_of(torch.cat([column.offsets().diff() for column in columns]))
        offsets = next((o for o in shared if torch.equal(o, offsets)), offsets)
        shared.append(offsets)
        tensors[key] = nested_tensor_from_jagged(torch.cat([column.values() for column in columns]), offsets)
    return TensorDict(tensors, batch_size=[sum(int(batch.batch_size[0]) for batch in batches)])


def _pack(batch: TensorDict) -> tuple[dict[str, tuple[Tensor, int]], list[Tensor]]:
    """Columns as (dense tensor or jagged values, number of its offsets or -1), and the offsets, each once."""
    families: list[Tensor] = []
    tensors: dict[str, tuple[Tensor, int]] = {}
    for key, column in batch.items():
        if not column.is_nested:
            tensors[key] = (column, -1)
            continue
        offsets = column.offsets()
        number = next((i for i, o in enumerate(families) if o is offsets or torch.equal(o, offsets)), len(families))
        if number == len(families):
            families.append(offsets)
        tensors[key] = (column.values(), number)
    return tensors, families


def _unpack(tensors: Mapping[str, tuple[Tensor, int]], families: Sequence[Tensor], rows: int) -> TensorDict:
    columns = {
        key: values if family < 0 else nested_tensor_from_jagged(values, families[family])
        for key, (values, family) in tensors.items()
    }
    return TensorDict(columns, batch_size=[rows])


def _bytes(tensor: Tensor) -> tuple[np.ndarray, tuple[int, ...]]:
    """The tensor's memory as a NumPy array, which pickle 5 sends without copying it, and its shape."""
    flat = tensor.detach().cpu().contiguous()
    return flat.view(-1).view(torch.uint8).numpy(), tuple(flat.shape)


def _rebuild(
    kind: type[DataProto],
    arrays: Mapping[str, tuple[str, tuple[np.ndarray, tuple[int, ...]], int]],
    families: Sequence[np.ndarray],
    rows: int,
    others: dict[str, np.ndarray],
    meta: dict[str, Any],
) -> DataProto:
    # The one copy of the transport: what arrives may alias memory that other readers share.
    tensors = {
        key: (torch.from_numpy(data.copy()).view(getattr(torch, dtype.removeprefix("torch."))).view(shape), family)
        for key, (dtype, (data, shape), family) in arrays.items()
    }
    offsets = [torch.from_numpy(family.copy()) for family in families]
    return kind(_unpack(tensors, offsets, rows), others, meta)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.tolist() == right.tolist()
    if left is right:
        return True
    if left.is_nested != right.is_nested:
        return False
    if left.is_nested:
        return torch.equal(left.offsets(), right.offsets()) and torch.equal(left.values(), right.values())
    return torch.equal(left, right)
