"""Serialization of a batch for the transfer to other processes.

A serialized batch consists of a small header and of separate byte buffers. Each tensor column has one byte buffer with
its values. Each text column has two byte buffers: the text, and the position at which each string ends. Jagged columns
that have the same row lengths share one byte buffer with the offsets of the rows. Pickle protocol 5 transfers the byte
buffers out of band, which means that the buffers are not copied into the pickle. Ray copies the byte buffers of a batch
only once, into one object of Ray's object store. Processes that read the batch map the object into their memory. A
process that reads a batch copies only the rows that it needs.
"""

import itertools
from collections.abc import Mapping
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np
import torch

from rltrain.batch.columns import Column, Columns, Stored, memory_of, share_offsets

Bytes = Any  # Serialized bytes: a PickleBuffer if the pickle protocol is at least 5, else plain bytes.
Objects = Mapping[str, "np.ndarray | Text"]
# The error handler `surrogatepass` accepts unpaired surrogates, which a broken tokenizer may produce.
SURROGATES = "surrogatepass"


class Text(NamedTuple):
    """A string column in shared memory, as concatenated UTF-8. The string of row i is `memory[starts[i]:stops[i]]`."""

    memory: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def take(self, rows: np.ndarray) -> "Text":
        """Return the strings of the selected rows, without copying any text."""
        return Text(self.memory, self.starts[rows], self.stops[rows])

    def strings(self) -> np.ndarray:
        """Return the strings as an object array (B,)."""
        view = memoryview(self.memory.data)
        found = [
            str(view[a:b], "utf-8", SURROGATES) for a, b in zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        ]
        return objects(found)


class Packet(NamedTuple):
    """The pickled form of the columns of a batch.

    Attributes:
        tensors: for each tensor column, a tuple (name, dtype, shape, index, bytes). In the tuple of a jagged column,
            `index` is the position of the column's row offsets in the list `families`. In the tuple of a dense column,
            which has no row offsets, `index` is -1.
        families: arrays of row offsets, each as the bytes of int64 numbers. Jagged columns that have the same row
            lengths share one array of row offsets.
        others: all columns that are not tensors. A column of strings is stored as (name, UTF-8 bytes, bytes of int64
            numbers that give the end of each string). A column of objects that are not all strings is stored as (name,
            None, list of the objects).
    """

    tensors: list[tuple[str, str, tuple[int, ...], int, Bytes]]
    families: list[Bytes]
    others: list[tuple[str, Bytes | None, Any]]


def objects(column: Any) -> np.ndarray:
    """Convert a sequence of B objects of any type to an object array (B,)."""
    # np.array would convert a list of B equally long lists to a two-dimensional array. np.fromiter always returns a
    # one-dimensional array.
    return np.fromiter(column, dtype=object, count=len(column))


def send(columns: Columns, others: Objects, protocol: int) -> tuple[Any, ...]:
    """Convert the columns to a tuple of the fields of a `Packet`.

    If the pickle protocol is at least 5, contiguous tensors on the CPU are not copied.
    """

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
    """Return the tensor columns and the object columns that a packet contains.

    Column values and strings stay in the received memory, and are copied only when they are read.
    """
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
