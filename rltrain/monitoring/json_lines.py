"""Files with one JSON object per line, and the conversion of metrics to JSON objects.

JSON cannot represent NaN or infinity, and most JSON parsers other than Python's reject NaN and infinity. In the metrics
files of a run, null stands for NaN and for infinity.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class JsonLinesFile:
    """A JSON Lines file, to which JSON objects are appended, one per line.

    Args:
        path: path of the file, in an existing folder. Existing lines of the file are kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        self.file = self.path.open("a", encoding="utf-8")

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one JSON object as the last line of the file, and flush Python's buffer of the file."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def replace(self, content: bytes) -> None:
        """Replace the file's content atomically, so that a killed process leaves either the old or the new content."""
        self.close()
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_bytes(content)
        os.replace(partial, self.path)
        self._open()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def line_of(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Convert metrics to values that JSON can represent, with None instead of NaN and infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def lines_of(rows: Iterable[Mapping[str, float]]) -> bytes:
    """Convert rows of metrics to the content of a JSON Lines file."""
    return "".join(json.dumps(line_of(row)) + "\n" for row in rows).encode()


def rows_of(lines: bytes) -> list[dict[str, float]]:
    """Parse rows of metrics from the content of a JSON Lines file, with NaN for each null."""
    rows = (json.loads(line) for line in lines.splitlines())
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
