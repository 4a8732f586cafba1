"""Conversion of Arrow tables into rows.

Reading a table raises ConfigError if Python cannot represent a value in the table.
"""

from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.data.rows import Rows
from rltrain.settings.typed import require

_BATCH = 1024  # `_check_values` converts at most `_BATCH` rows to Python values at once.


def table_rows(table: Any, where: str) -> Rows:
    """Return the rows of a `pyarrow.Table`.

    Raises:
        ConfigError: two columns have the same name, or Python cannot represent a value in the table.
    """
    names = table.column_names
    twice = [name for name in names if names.count(name) > 1]
    require(not twice, f"{where}: several columns are called '{''.join(twice[:1])}'; rename all but one of them")
    for index, name in enumerate(names):
        column = _in_microseconds(table.column(index), name, where)
        _check_values(column, name, where)
        table = table.set_column(index, name, column)
    return Rows(table, tuple(names), lambda i: f"{where}, row {i + 1}")


def _in_microseconds(column: Any, name: str, where: str) -> Any:
    """Convert the times in an Arrow column from nanoseconds to microseconds.

    Microseconds are the finest time unit of Python's `datetime` types. If pandas is installed, pyarrow returns times in
    nanoseconds as pandas objects instead of `datetime` objects.

    Raises:
        ConfigError: a time in nanoseconds is not a whole number of microseconds.
    """
    kind = _microseconds(column.type)
    if kind == column.type:
        return column
    try:
        return column.cast(kind)
    except Exception:  # pyarrow raises several exception types for values that cannot be converted.
        for row in range(len(column)):
            try:
                # The row is copied with `take`, because casting a slice of a list column would also cast elements
                # outside the slice.
                column.take([row]).cast(kind)
            except Exception:
                raise _unusable(column.type, f"{where}, row {row + 1}, column '{name}'") from None
        raise


def _microseconds(kind: Any) -> Any:
    """Return the Arrow type `kind` with microseconds instead of nanoseconds as time unit, even inside lists and
    structs.
    """
    import pyarrow
    from pyarrow import types

    if types.is_timestamp(kind) and kind.unit == "ns":
        return pyarrow.timestamp("us", kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return pyarrow.duration("us")
    if types.is_time64(kind) and kind.unit == "ns":
        return pyarrow.time64("us")
    if types.is_list(kind) or types.is_large_list(kind):
        make = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        return make(kind.value_field.with_type(_microseconds(kind.value_type)))
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_microseconds(field.type)) for field in kind])
    return kind


def _unusable(kind: Any, place: str) -> ConfigError:
    return ConfigError(
        f"{place}: Python cannot represent this value of type {kind}; write the value as text; a time may "
        "also be written in whole microseconds, in UTC or without a time zone, between the years 1 and 9999"
    )


def _check_values(column: Any, name: str, where: str) -> None:
    """Raise ConfigError if a column of an Arrow table has a value that Python cannot represent.

    The values of a column are checked when the table is loaded, because a value that Python cannot represent would
    otherwise cause an error only in the training step that reads the value.
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
            f"{place}: the text is not valid UTF-8 ({error.reason}); write the text as UTF-8, or as binary data"
        ) from None
    # Python cannot represent, for example, nanoseconds, dates after the year 9999, unknown time zones, or structs with
    # duplicate field names.
    except Exception:
        raise _unusable(cell.type, place) from None


def _is_safe(kind: Any) -> bool:
    """Return whether Python can represent every value of an Arrow type, so that no value needs a check."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_safe(kind.value_type)
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(numeric or types.is_boolean(kind) or types.is_null(kind) or types.is_binary(kind))
