"""Rows of JSONL, JSON, parquet and CSV files, and of folders of such files."""

import csv
import difflib
import json
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.base.storage import local_path
from rltrain.data.arrow_rows import table_rows
from rltrain.data.prompt_encoding import ROW_HELP, unicode
from rltrain.data.rows import Rows
from rltrain.settings.typed import require

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # Matches the JSON escape of a UTF-16 surrogate, paired or unpaired.
_CSV_BLOCK = 1 << 26  # Size in bytes of the blocks in which a CSV file is parsed; a row cannot be longer than a block.
SOURCE_HELP = (
    "a data set of the Hugging Face hub is written as ORG/NAME, and a function is written as package.module:function "
    "or file.py:function"
)


def path_rows(source: str, where: str) -> Rows:
    """Read the rows of a file, or of all data files in a folder in the order of the file names.

    Args:
        source: path of the file or folder to read.
        where: the config key and the path, for the start of the error message.

    Raises:
        ConfigError: the file or folder does not exist, a file is damaged, or the folder holds either no data files or
            data files of several kinds.
    """
    path = find_path(source, where)
    return _folder_rows(path, where) if path.is_dir() else _file_rows(path, where)


def find_path(source: str, where: str) -> Path:
    """Return the path of the file or folder that a source names.

    If the file or folder does not exist, raise a ConfigError, which suggests a path with a similar name if there is
    one.
    """
    path = local_path(source, where)
    require(path.exists(), _missing(path, where))
    return path


def _folder_rows(folder: Path, where: str) -> Rows:
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{where}: the path cannot be read ({error.strerror}); check the permissions") from None
    files = [path for path in inside if path.suffix in ENDINGS and path.is_file()]
    folders = [path.name for path in inside if path.is_dir()]
    instead = f"name one of its folders: {', '.join(folders[:5])}" if folders else "name another folder, or a file"
    require(bool(files), f"{where}: a folder without data files (their names end in {', '.join(ENDINGS)}); {instead}")
    first = next((path for path in files if path.suffix != files[0].suffix), None)
    require(
        first is None,
        f"{where}: a folder with several kinds of data files, such as {files[0].name} and {first and first.name}; name "
        "one file, or a folder with one kind",
    )
    parts = [_file_rows(path, f"{where.rstrip('/')}/{path.name}") for path in files]
    try:
        return Rows.joined(parts)
    except Exception as error:  # Pyarrow raises several exception types for tables whose columns do not match.
        raise ConfigError(
            f"{where}: the files have columns of different types ({_reason(error)}); write all files with one schema"
        ) from None


def _file_rows(path: Path, where: str) -> Rows:
    require(path.suffix in ENDINGS, f"{where}: unknown kind of file; it must end in {', '.join(ENDINGS)}")
    require(path.is_file(), f"{where}: is not a regular file; name a file that ends in {', '.join(ENDINGS)}")
    return _READERS[path.suffix](path, where)


def _missing(path: Path, where: str) -> str:
    others = "" if path.suffix in ENDINGS else f"; a file must end in {', '.join(ENDINGS)}, {SOURCE_HELP}"
    if not path.parent.is_dir():
        return (
            f"{where}: no such file, and no such folder {path.parent}; check the path (relative paths start at "
            f"{Path.cwd()}){others}"
        )
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    hint = (
        f"did you mean {path.parent / near[0]}?" if near else f"check the path (relative paths start at {Path.cwd()})"
    )
    return f"{where}: no such file; {hint}{others}"


def _json_rows(path: Path, where: str) -> Rows:
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # The UTF-8 byte-order mark is removed.
    except OSError as error:
        raise ConfigError(f"{where}: the path cannot be read ({error.strerror}); check the permissions") from None
    is_array = path.suffix == ".json" and content.lstrip().startswith(b"[")
    return _array_rows(content, where) if is_array else _line_rows(content, where)


def _line_rows(content: bytes, where: str) -> Rows:
    rows, lines = [], array("q")
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            rows.append(_object(line, f"{where}:{number}"))
            lines.append(number)
    return Rows.of_dicts(rows, lambda i: f"{where}:{lines[i]}")


def _object(line: bytes, place: str) -> dict[str, Any]:
    value = _json(line, place)
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: found {type(value).__name__} where a JSON object was expected; {ROW_HELP}")
    if _SURROGATE.search(line):
        unicode(json.dumps(value, ensure_ascii=False), place, "the row")
    return value


def _json(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: the text is not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None
    # `json.loads` raises ValueError for invalid JSON, and for a number with thousands of digits.
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(
            f"{place}: the text is not valid JSON ({reason}); put one JSON object on each line of a .jsonl file"
        ) from None


def _array_rows(content: bytes, where: str) -> Rows:
    def place(index: int) -> str:
        return f"{where}, row {index + 1}"

    suspect = _SURROGATE.search(content)
    for index, row in enumerate(rows := _json(content, where)):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{place(index)}: found {type(row).__name__} where a JSON object was expected; {ROW_HELP}"
            )
        if suspect:
            unicode(json.dumps(row, ensure_ascii=False), place(index), "the row")
    return Rows.of_dicts(rows, place)


def _parquet_rows(path: Path, where: str) -> Rows:
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
            table.column_names  # noqa: B018 (the access raises an exception for names that are not UTF-8)
    except Exception as error:  # Pyarrow raises many exception types for a damaged file.
        raise ConfigError(f"{where}: not a readable parquet file ({_reason(error)}); write the file again") from None
    return table_rows(table, where)


def _csv_rows(path: Path, where: str) -> Rows:
    """Read a CSV file whose first line names the columns.

    All values of a CSV file are kept as text: `007` stays `007`.
    """
    import pyarrow
    from pyarrow import csv as arrow_csv

    try:
        names = _header(path)
        table = arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(block_size=_CSV_BLOCK),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string())),
        )
    except Exception as error:  # Pyarrow raises many exception types for a damaged file.
        raise ConfigError(
            f"{where}: not a readable CSV file ({_reason(error)}); write the column names into the first line, and "
            "the same number of values into each line after it"
        ) from None
    return table_rows(table, where)


def _header(path: Path) -> Sequence[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file), [])


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


_READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}
ENDINGS = tuple(_READERS)
