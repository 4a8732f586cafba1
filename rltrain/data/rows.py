"""Rows of data from any kind of source, such as a file or a Python function."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rows:
    """Rows of one source, as a list of dicts or as an Arrow table that may be memory-mapped from a file.

    Attributes:
        content: the rows, as a list of dicts or a `pyarrow.Table`.
        columns: the names of all columns, in the order in which the names first occur in the rows.
        place: function that returns, for a row index, the location of that row for error messages.
        own_splits: whether the source has different rows for training and for evaluation.
    """

    content: Any
    columns: tuple[str, ...]
    place: Callable[[int], str]
    own_splits: bool = False

    @classmethod
    def of_dicts(cls, rows: list[dict[str, Any]], place: Callable[[int], str], *, own_splits: bool = False) -> "Rows":
        """Return a `Rows` object that holds the given dicts. A row's dict can lack columns that the dicts of other rows
        have.
        """
        return cls(rows, tuple(dict.fromkeys(name for row in rows for name in row)), place, own_splits)

    def __len__(self) -> int:
        return len(self.content)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row of the data with all its columns."""
        row: dict[str, Any]
        row = self.content[index] if isinstance(self.content, list) else self.content.slice(index, 1).to_pylist()[0]
        return row

    def read(self, start: int, stop: int, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows with the indices `start` to `stop - 1`.

        A returned row contains every column in `columns` that the source row has. A returned row can contain columns
        that are not in `columns`.
        """
        if isinstance(self.content, list):
            return self.content[start:stop]
        found: list[dict[str, Any]] = self.content.select(columns).slice(start, stop - start).to_pylist()
        return found

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """Return the rows of several `Rows` objects as one `Rows` object, in the order of `parts`.

        The `Rows` objects in `parts` must either all hold lists of dicts, or all hold Arrow tables.

        Raises:
            pyarrow.ArrowException: the types of a column in two tables cannot be combined.
        """
        if len(parts) == 1:
            return parts[0]
        starts = [0, *itertools.accumulate(len(part) for part in parts)]

        def place(index: int) -> str:
            which = bisect.bisect_right(starts, index) - 1
            return parts[which].place(index - starts[which])

        columns = tuple(dict.fromkeys(name for part in parts for name in part.columns))
        if isinstance(parts[0].content, list):
            return cls([row for part in parts for row in part.content], columns, place)
        import pyarrow

        return cls(pyarrow.concat_tables([part.content for part in parts], promote_options="default"), columns, place)
