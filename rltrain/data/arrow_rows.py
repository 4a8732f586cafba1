"""Arrow tables as rows. Values that Python cannot represent are refused when the table is read."""

from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.data.rows import Rows
from rltrain.settings.typed import require

_BATCH = 1024  # rows that are converted at a time


def table_rows(table: Any, where: str) -> Rows:
    """Return the rows of a `pyarrow.Table`.

    Raises:
        ConfigError: two columns have one name, or Python cannot represent a value.
    """
    names = table.column_names
    twice = [name for name in names if names.count(name) > 1]
    require(not twice, f"{where}: several columns are called '{''.join(twice[:1])}'; rename all but one of them")
    for name in names:
        _check_values(table.column(name), name, where)
    return Rows(table, tuple(names), lambda i: f"{where}, row {i + 1}")


def _check_values(column: Any, name: str, where: str) -> None:
    """Raise ConfigError if a column of an Arrow table has a value that Python cannot represent.

    Without this check, the error would occur only when the value is used.
    """
    if _is_safe(column.type):
        return
    for start in range(0, len(column), _BATCH):
        piece = column.slice(start, _BATCH)
        try:
            piece.to_pylist()
        except Exception:
            for row in range(len(piece)):
                _check_value(piece.slice(row, 1), f"{where}, row {start + row + 1}, column '{name}'")


def _check_value(cell: Any, place: str) -> None:
    try:
        cell.to_pylist()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place}: text that is not valid UTF-8 ({error.reason}); write it as UTF-8, or as binary"
        ) from None
    except Exception:  # e.g. nanoseconds, a date after the year 9999, an unknown time zone, two fields with one name
        raise ConfigError(
            f"{place}: a value of type {cell.type} that Python cannot hold; write it as text, or a time in whole "
            "microseconds between the years 1 and 9999, without a zone or in UTC"
        ) from None


def _is_safe(kind: Any) -> bool:
    """Return whether Python can represent every value of an Arrow type, so that no value needs a check."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_safe(kind.value_type)
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(numeric or types.is_boolean(kind) or types.is_null(kind) or types.is_binary(kind))
