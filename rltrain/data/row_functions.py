"""Loading of rows from a user's Python function that returns or yields rows."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from rltrain.base.errors import ConfigError, described
from rltrain.data.prompt_encoding import unicode
from rltrain.data.rows import Rows
from rltrain.rewards.loading import import_function
from rltrain.settings.typed import require

MAX_ROWS = 1_000_000
ARGUMENTS = ("split", "seed")
_ROW_HELP = 'return or yield dicts such as {"prompt": "2+2=", "answer": "4"}'
_VALUE_HELP = "use text, numbers, lists and dicts, which are the same in every process and every run"
# Types of the values that rows may contain. `datetime` is allowed too, because it is a subclass of `date`.
_PLAIN = (bool, int, float, str, bytes, date, time, timedelta, Decimal)
# Maximum size of an integer in a row, in bits (about 3,000 digits). The maximum is below 4,300 digits, because
# Python by default refuses to convert integers with more digits to text.
_MAX_BITS = 10_000


def function_rows(source: str, where: str, *, split: str, seed: int) -> Rows:
    """Call the user's function, and return the rows that the function returns or yields.

    Args:
        source: the function to call, as `package.module:function` or `file.py:function`. The user's function returns or
            yields dicts. The arguments `split` ("train" or "val") and `seed` are passed to the user's function if the
            function has parameters with these names.
        where: start of error messages, such as `data.train=FILE.py:FUNCTION`.
        split: "train" or "val", the config key under `data` that names the function.
        seed: random seed of the run, for the function's parameter `seed`.

    Raises:
        ConfigError: the function cannot be imported, raises an exception, returns something other than dicts, or
            returns or yields too many rows.
    """
    function, found = load_row_function(source, where), list[dict[str, Any]]()
    values = {"split": split, "seed": seed}
    given = {name: values[name] for name in _parameters(function, where) if name in values}
    for row in _results(function, given, where):
        place = f"{where}, row {len(found) + 1}"
        require(len(found) < MAX_ROWS, f"{where}: gives more than {MAX_ROWS:,} rows; {_end_help(function)}")
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise ConfigError(f"{place}: found {type(row).__name__} where a dict of columns was expected; {_ROW_HELP}")
        found.append({str(name): _plain_value(value, place, str(name)) for name, value in row.items()})
    return Rows.of_dicts(found, lambda i: f"{where}, row {i + 1}", own_splits="split" in given)


def load_row_function(source: str, where: str) -> Callable[..., Any]:
    """Import a user's function that returns or yields rows, and check the function's parameters.

    Raises:
        ConfigError: the function does not exist, or requires parameters other than `split` and `seed`.
    """
    function = import_function(source, where)
    require(
        not inspect.iscoroutinefunction(function) and not inspect.isasyncgenfunction(function),
        f"{where}: is an async function; write 'def' instead of 'async def'",
    )
    _parameters(function, where)
    return function


def _parameters(function: Callable[..., Any], where: str) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: the parameters of the function cannot be read; write a Python function that calls "
            "this function, and name the new function instead"
        ) from None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in by_name]
    for one in parameters:
        needed = one.default is inspect.Parameter.empty and one.kind not in starred
        require(
            not needed or (one.name in ARGUMENTS and one.kind in by_name),
            f"{where}: the function needs '{one.name}', but rltrain passes only split and seed, by name; give "
            "the parameter a default",
        )
    return names


def _results(function: Callable[..., Any], given: Mapping[str, Any], where: str) -> Iterable[Any]:
    """Yield the rows that the user's function returns or yields.

    Any exception that the user's function raises becomes a ConfigError.
    """
    try:
        result = function(**given)
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise ConfigError(
                f"{where}: the function returned {type(result).__name__} where rows were expected; {_ROW_HELP}"
            )
        yield from result
    except (ConfigError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # A user's function may raise any exception, including SystemExit.
        raise ConfigError(f"{where}: the function raised {described(error)}; fix the function first") from error


def _end_help(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "the function")
    return f"return fewer rows, for example with 'return itertools.islice(..., N)' in {name}"


def _plain_value(value: Any, place: str, name: str) -> Any:
    """Return a value of a row as plain Python data, such as text, numbers, lists and dicts.

    NumPy arrays and scalars are converted to Python values.

    Raises:
        ConfigError: the value is an object of a type that is not plain data, or is text that is not valid Unicode.
    """
    try:
        return _plain(value, f"{place}, column '{name}'")
    except RecursionError:
        raise ConfigError(
            f"{place}, column '{name}': the value has lists or dicts that contain themselves or are nested too deeply; "
            f"{_VALUE_HELP}"
        ) from None


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, str):
        return unicode(str(value), place, "the value")
    if isinstance(value, list | tuple):
        return [_plain(one, place) for one in value]
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(one, place) for key, one in value.items()}
    if isinstance(value, int) and not isinstance(value, bool):
        require(value.bit_length() <= _MAX_BITS, f"{place}: a number with thousands of digits; write it as text")
        return int(value)
    if value is None or isinstance(value, _PLAIN):
        return float(value) if isinstance(value, float) else value
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # `value` is a NumPy array or scalar.
        listed = value.tolist()
        require(not hasattr(listed, "dtype"), _refusal(value, place))
        return _plain(listed, place)
    raise ConfigError(_refusal(value, place))


def _refusal(value: Any, place: str) -> str:
    return f"{place}: an object of type {type(value).__name__}; {_VALUE_HELP}"
