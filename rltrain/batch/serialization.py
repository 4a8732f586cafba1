"""How a batch crosses processes: a small header, and one run of bytes a column, a family's offsets and a text column.

Pickle 5 takes the bytes out of band: Ray writes them into one object of its store straight from where they lie, and
readers map that object. Nothing is copied on the way but into the store; a reader copies the rows that it takes.
"""

import itertools
from collections.abc import Mapping
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np
import torch

from rltrain.batch.columns import Column, Columns, Stored, memory_of, share_offsets

Bytes = Any  # what is pickled: a PickleBuffer, or plain bytes below protocol 5
Objects = Mapping[str, "np.ndarray | Text"]
SURROGATES = "surrogatepass"  # text that holds half a surrogate pair, as a broken tokenizer may give it, passes too


class Text(NamedTuple):
    """Strings in shared memory, UTF-8 one after the other; row i is `memory[starts[i]:stops[i]]`."""

    memory: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def take(self, rows: np.ndarray) -> "Text":
        """These rows; their text stays where it is."""
        return Text(self.memory, self.starts[rows], self.stops[rows])

    def strings(self) -> np.ndarray:
        """The strings as an object array (B,)."""
        view = memoryview(self.memory.data)
        found = [
            str(view[a:b], "utf-8", SURROGATES) for a, b in zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        ]
        return objects(found)


class Packet(NamedTuple):
    """Columns as they are pickled.

    Attributes:
        tensors: (name, dtype, shape, family, bytes); the family of a dense column is -1.
        families: the offsets of each family, bytes of int64.
        others: of strings, (name, bytes of UTF-8, bytes of int64: where each string ends); else (name, None, list).
    """

    tensors: list[tuple[str, str, tuple[int, ...], int, Bytes]]
    families: list[Bytes]
    others: list[tuple[str, Bytes | None, Any]]


def objects(column: Any) -> np.ndarray:
    """An object array (B,) of a sequence's elements, whatever they are."""
    return np.fromiter(column, dtype=object, count=len(column))  # np.array would unpack rows that are lists


def send(columns: Columns, others: Objects, protocol: int) -> tuple[Any, ...]:
    """The columns as a `Packet`'s fields; from protocol 5 on without copying any."""

    def wrap(memory: np.ndarray) -> Bytes:
        return PickleBuffer(memory.data) if protocol >= 5 else memory.tobytes()

    families: dict[int, tuple[int, Bytes]] = {}
    tensors = []
    for key, column in share_offsets(columns).items():
        values = column.values if isinstance(column.values, Stored) else column.values.detach().cpu()
        family = -1
        if column.offsets is not None:
            offsets = column.offsets
            family = families.setdefault(id(offsets), (len(families), wrap(memory_of(offsets.cpu()))))[0]
        name = str(values.dtype).removeprefix("torch.")
        tensors.append((key, name, tuple(values.shape), family, wrap(memory_of(values))))
    rest: list[tuple[str, Bytes | None, Any]] = []
    for key, texts in others.items():
        rows = (texts.strings() if isinstance(texts, Text) else texts).tolist()
        is_text = set(map(type, rows)) == {str}
        rest.append((key, *map(wrap, _encoded(rows))) if is_text else (key, None, rows))
    return tuple(Packet(tensors, [memory for _, memory in families.values()], rest))


def receive(packet: Packet) -> tuple[dict[str, Column], dict[str, "np.ndarray | Text"]]:
    """The columns and object columns of a packet; values and strings stay where they arrived until they are read."""
    families = [torch.from_numpy(_read(memory).view(np.int64).copy()) for memory in packet.families]
    columns = {
        key: Column(Stored(getattr(torch, dtype), shape, _read(memory)), families[family] if family >= 0 else None)
        for key, dtype, shape, family, memory in packet.tensors
    }
    return columns, {
        key: objects(ends) if memory is None else _text(memory, ends) for key, memory, ends in packet.others
    }


def _text(memory: Bytes, ends: Bytes) -> Text:
    stops = _read(ends).view(np.int64)
    return Text(_read(memory), np.concatenate([[0], stops[:-1]]), stops)


def _encoded(rows: list[str]) -> tuple[np.ndarray, np.ndarray]:
    joined = "".join(rows)
    sizes = map(len, rows) if joined.isascii() else (len(row.encode("utf-8", SURROGATES)) for row in rows)
    ends = np.fromiter(itertools.accumulate(sizes), dtype=np.int64, count=len(rows))
    return np.frombuffer(joined.encode("utf-8", SURROGATES), dtype=np.uint8), ends.view(np.uint8)


def _read(memory: Bytes) -> np.ndarray:
    array = np.frombuffer(memory, dtype=np.uint8)
    array.flags.writeable = False
    return array
