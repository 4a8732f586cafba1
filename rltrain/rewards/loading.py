"""Load, check and call the reward functions that users name by import path or file path, without importing torch.

A reward function is `def reward(prompt, response, **columns) -> float | None | RewardResult`, sync or async. A score of
None means that the reward function does not apply to the sample. A batched reward function has the parameters
`prompts` and `responses`, receives lists of prompts, responses and column values, and returns a list of scores. If a
reward function has the signature of TRL, verl or OpenRLHF, `load_function` returns a wrapper with rltrain's own
signature.
"""

import asyncio
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from rltrain.base.errors import ConfigError, described, one_line
from rltrain.base.module_search import search_working_directory
from rltrain.base.storage import local_path
from rltrain.rewards.result import RewardResult, ScoreError, Verdict
from rltrain.rewards.signatures import (
    BATCHED,
    ENVIRONMENTS,
    ON_REQUEST,
    SINGLE,
    adapted,
    is_batched,
    offered,
    one_of,
    parameters,
)

BUILTIN = {  # Maps the short name of each built-in reward function to its module in `rltrain.rewards`.
    "final_answer": "final_answer",
    "exact_answer": "final_answer",
    "exact_match": "exact_match",
    "numeric_match": "numeric_match",
    "math_answer": "math_answer",
    "multiple_choice": "multiple_choice",
    "regex_format": "regex_format",
    "json_schema": "json_schema",
    "code_tests": "code_tests",
    "length_penalty": "length",
    "overlong_penalty": "length",
    "repetition_penalty": "repetition",
    "judge": "judge",
    "environment_reward": "environment_reward",
}
# Built-in reward functions that score the form of a response, not the correctness of its answer.
PENALTIES = ("length_penalty", "overlong_penalty", "repetition_penalty")
# Built-in reward functions whose score is 1 for a correct answer, and less than 1 for a wrong answer.
CORRECTNESS = (
    "final_answer",
    "exact_answer",
    "exact_match",
    "numeric_match",
    "math_answer",
    "multiple_choice",
    "code_tests",
)
STANDARD_COLUMNS = ("finish_reason",)  # Columns that every sample has, regardless of the data set.
AGGREGATIONS = ("sum", "normalize_then_sum")
# Names of the keyword arguments with which a user's aggregation function is called.
AGGREGATED = ("components", "uid", "valid", "weights")
_TOO_LARGE = ": a score outside float32's range (3.4e38); scale the score down"
# `isinstance` finds the built-in types first, because checks of abstract classes such as `numbers.Real` are slow.
_NUMBERS = (float, int, numbers.Real, Decimal)
_LARGEST = (2 - 2**-23) * 2.0**127  # Largest finite float32 number; scores are sent as float32.
_SHOWN = 80  # Largest number of characters of a value that an error message shows.
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LISTED = 10  # Largest number of classes that an error message lists.
Kind = Literal["function", "class"]  # Kind of object that a path in the config names.
_PLURAL: Mapping[Kind, str] = {"function": "functions", "class": "classes"}
# Error messages tell users to write a path in the config as file.py:function or file.py:Class. `_NAME` maps the kind of
# object ("function" or "class") to the word after the colon in file.py:function or file.py:Class.
_NAME: Mapping[Kind, str] = {"function": "function", "class": "Class"}
Bound = Callable[[Any, Any, Mapping[str, Any]], Any]


def builtin_path(path: str) -> str:
    """Return the import path of the built-in reward function called `path`, or `path` if no built-in has that name."""
    return f"rltrain.rewards.{BUILTIN[path]}:{path}" if path in BUILTIN else path


def is_penalty(path: str) -> bool:
    """Return whether `path` names one of the built-in penalties."""
    return _is_one_of(path, PENALTIES)


def success_score(path: str) -> float | None:
    """Return the score of a correct answer if `path` names a built-in function that checks answers, otherwise None."""
    return 1.0 if _is_one_of(path, CORRECTNESS) else None


def is_environment_reward(path: str) -> bool:
    """Return whether `path` names the built-in function `environment_reward`."""
    return _is_one_of(path, ["environment_reward"])


def _is_one_of(path: str, builtins: Sequence[str]) -> bool:
    return builtin_path(path).replace(":", ".") in [builtin_path(name).replace(":", ".") for name in builtins]


def load_function(path: str) -> Callable[..., Any]:
    """Import the reward function that `path` names.

    Args:
        path: `package.module:function`, `package.module.function`, `file.py:function`, or the short name of a built-in
            function. A module in the working directory is found even if the directory is not in `sys.path`. A file path
            may be relative to the working directory, and the Python file can import modules from its own folder.

    Returns:
        The reward function, or a wrapper with rltrain's own parameters if the reward function has the signature of
        another trainer.

    Raises:
        ConfigError: the module or file does not exist, cannot be imported or lacks the function, or `path` names an
            object that is not a function. The message of the ConfigError gives the reason of a failed import, or
            suggests the existing function whose name is most similar to the name in `path`.
    """
    where = f"reward function '{path}'"
    path = builtin_path(path)
    target, _, name = path.rpartition(":")
    if not target:
        target, _, name = path.rpartition(".")
    if not target or not name or path.endswith(".py"):
        if path and local_path(path, where).is_dir():
            raise ConfigError(f"{where} is a directory; to use a reward model, set reward.models=[{path}]")
        near = difflib.get_close_matches(name or path, BUILTIN, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"{where}: neither a built-in function nor a function of a file or module{meant}; use "
            f"package.module:function, file.py:function, or one of {', '.join(BUILTIN)}"
        )
    function = _function_of(target, name, where)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where}: '{name}' has a yield, so a call returns no score; return the score instead")
    return adapted(function)


def import_function(path: str, where: str, kind: Kind = "function") -> Callable[..., Any]:
    """Import a function or class that need not be a reward function, such as a function that returns rows of data.

    Args:
        path: `package.module:name` or `file.py:name`. The module or file is searched for as in `load_function`.
        where: start of the error message, such as "reward function 'file.py:score'".
        kind: the kind of object that `path` should name, "function" or "class"; used only in error messages. Even if
            `kind` is "class", `import_function` does not check that `path` names a class.

    Raises:
        ConfigError: `path` has no colon, or the function or class cannot be imported, for one of the reasons listed in
            `load_function`.
    """
    target, _, name = path.rpartition(":")
    if not target or not name:
        raise ConfigError(
            f"{where}: no {kind} name is given after a colon; use file.py:{_NAME[kind]} or package.module:{_NAME[kind]}"
        )
    return _function_of(target, name, where, kind)


def _function_of(target: str, name: str, where: str, kind: Kind = "function") -> Callable[..., Any]:
    is_file = _is_file(target)
    module = _file_module(local_path(target, where), where, kind) if is_file else _module(target, where, kind)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None and not hasattr(module, name):
        raise ConfigError(f"{where}: {target} has no {kind} '{name}'{_nearest(name, module, kind)}")
    if not callable(function):
        raise ConfigError(f"{where}: '{name}' is of type {type(function).__name__}, not a {kind}; name a {kind}")
    return function


def absolute(path: str) -> str:
    """Return `path` in a form that names the same function in any working directory, for example in a Ray worker."""
    target, _, name = path.rpartition(":")
    return f"{Path(target).expanduser().resolve()}:{name}" if target and _is_file(target) else path


def check_columns(
    function: Callable[..., Any],
    name: str,
    columns: Collection[str],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    nulls: Collection[str] = (),
    where: str = "the data",
) -> None:
    """Check that data and options provide all arguments of a reward function, and that the function takes all options.

    Args:
        function: a reward function, as `load_function` returns it.
        name: the function's name in the config, which the error message shows.
        columns: names of the data's columns, apart from `prompt`.
        kwargs: the options that the config sets for the function, by name.
        nulls: names of the data's columns that are null in every row.
        where: name of the data in error messages, such as "data.val=FILE".

    Raises:
        ConfigError: a column is missing or null in every row, an option is unknown, the function takes its arguments
            only through *args, or the function has TRL's parameter `environments`, for which neither the data nor the
            options have a value. If a data column is missing, the error message names the function's parameter, the
            column with the most similar name and all existing columns.
    """
    there = [*offered(function), *STANDARD_COLUMNS, *columns]
    given = {*there, *(BATCHED if is_batched(function) else SINGLE), *ON_REQUEST, *kwargs}
    own = parameters(function)
    names = [p.name for p in own if p.kind in _BY_NAME]
    sink = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own)
    starred = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in own)
    if starred and not sink and not given.intersection(names):
        raise ConfigError(
            f"reward function '{name}' takes *args, but arguments are passed by name; name each parameter, as in def "
            "score(prompt, response)"
        )
    for option in kwargs:
        if option not in names and not sink:
            raise ConfigError(
                f"reward function '{name}': kwargs.{option}: the function has no such parameter{_meant(option, names)}"
                f"; it takes {', '.join(names)}"
            )
    if ENVIRONMENTS in names and ENVIRONMENTS not in given:
        raise ConfigError(
            f"reward function '{name}' has TRL's parameter '{ENVIRONMENTS}', but the environment objects live in other "
            "processes; use the parameter environment_reward (the sum of the environment's rewards) or "
            "environment_messages (the conversation) instead, or let the environment give the reward and set "
            "reward.functions=[environment_reward]"
        )
    for parameter in own:
        required = parameter.kind in (*_BY_NAME, inspect.Parameter.POSITIONAL_ONLY)
        missing = required and parameter.default is inspect.Parameter.empty
        if missing and parameter.name not in given:
            raise ConfigError(
                f"reward function '{name}' needs a column '{parameter.name}' that {where} does not have; the "
                f"columns are {', '.join(there)}{_meant(parameter.name, there)}; rename the parameter, give "
                "it a default, add the column to the data, or set it in kwargs"
            )
        if missing and parameter.name in nulls and parameter.name not in kwargs:
            raise ConfigError(
                f"reward function '{name}' needs the column '{parameter.name}', which is null in every row of "
                f"{where}; fill the column, or give the parameter a default"
            )
    choices = one_of(function)
    if choices and not ({*columns, *kwargs} - {*nulls}).intersection(choices):
        raise ConfigError(
            f"reward function '{name}' needs one of the columns {', '.join(choices)}, and the data has none of them"
            f"{' with a value' if set(nulls).intersection(choices) else ''}; "
            f"the available names are {', '.join(there)}; rename a column, or set {choices[0]} in kwargs"
        )


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def check_aggregation(path: str) -> None:
    """Check that `path` names an aggregation function that can be called with the keyword arguments in `AGGREGATED`.

    Raises:
        ConfigError: the aggregation function does not exist, or does not take the keyword arguments `components`,
            `uid`, `valid` and `weights`.
    """
    if ":" not in path and "." not in path:
        raise ConfigError(
            f"reward.aggregation={path}: not one of {', '.join(AGGREGATIONS)}{_meant(path, AGGREGATIONS)}; use one of "
            "these, or the path of a function of your own, file.py:function"
        )
    try:
        function = load_function(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace("reward function '", "reward.aggregation '", 1)) from error
    try:
        inspect.signature(function).bind(**dict.fromkeys(AGGREGATED))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward.aggregation={path}: the function is called with {', '.join(AGGREGATED)} by name ({error}); accept "
            "all these arguments, or **others; the built-in choices are sum and normalize_then_sum"
        ) from None


def bind(function: Callable[..., Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Bound:
    """Inspect a reward function's signature once, and return a wrapper that calls the function with little overhead.

    Args:
        function: a reward function, as `load_function` returns it.
        kwargs: the options of the reward function, by name. An option from the config overrides a data column of the
            same name.

    Returns:
        A function that calls the reward function and has the arguments `(prompt, response, columns)`. The arguments
        `prompt`, `response` and `columns` hold the values of one sample, or lists of values if the reward function is
        batched. The prompt and the response are texts without special tokens.
        The reward function gets only the data columns that its signature accepts. The wrapper of a reward function
        returns the reward function's result, or a coroutine if the reward function is async. `as_score` converts the
        result of a reward function to a score. The wrapper of a reward function raises ScoreError if a data column that
        the reward function requires is missing. The wrapper does not catch exceptions of the reward function that it
        calls.
    """
    own = parameters(function)
    first = BATCHED if is_batched(function) else SINGLE
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own)
    by_position = [p for p in own if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    by_name = {p.name: p for p in own if p.kind in _BY_NAME}
    required = [p.name for p in (*by_position, *by_name.values()) if p.default is inspect.Parameter.empty]
    hidden = {*ON_REQUEST}.difference(p.name for p in own)

    def bound(prompt: Any, response: Any, columns: Mapping[str, Any]) -> Any:
        values = {column: value for column, value in columns.items() if column not in hidden}
        values |= {first[0]: prompt, first[1]: response, **kwargs}
        for name in required:
            if name not in values:
                raise ScoreError(f"needs the column '{name}', but this sample has only {', '.join(values)}")
        args = [values.pop(p.name) if p.name in values else p.default for p in by_position]
        named = values if takes_all else {name: values[name] for name in by_name if name in values}
        return function(*args, **named)

    return bound


def call(function: Callable[..., Any], prompt: str, response: str, columns: Mapping[str, Any]) -> float | None:
    """Call a reward function on one sample, and run the call to completion if the function is async.

    To call a reward function many times, use `bind` instead of `call`.

    Returns:
        The score, or None if the reward function does not apply to the sample.

    Raises:
        ScoreError: the result is not a score, or a column is missing.
        Exception: any exception that the reward function raises.
    """
    result = bind(function)(prompt, response, columns)
    return as_score(finish(result) if inspect.iscoroutine(result) else result)


def as_verdict(result: Any) -> Verdict:
    """Convert the result of a reward function to a `Verdict`, which holds a score and a decision on correctness.

    Raises:
        ScoreError: the result is not a score, the function reports a failure, or `success` is not a bool or None.
    """
    score = as_score(result)
    success: Any = result.success if isinstance(result, RewardResult) else None
    success = success.item() if _is_scalar_array(success) else success
    if success is not None and not isinstance(success, bool):
        shown = one_line(repr(success), _SHOWN)
        raise ScoreError(
            f"returned success={shown} of type {type(success).__name__}: success must be True, False or None"
        )
    return Verdict(score, success)


def as_score(result: Any) -> float | None:
    """Convert the result of a reward function to a score.

    Raises:
        ScoreError: the result is not a score, or the function reports a failure.
    """
    if isinstance(result, RewardResult):
        if result.failed:
            raise ScoreError(f"reported a failure: {result.message or 'no reason given'}")
        return as_score(result.score)
    if result is None:
        return None
    if isinstance(result, _NUMBERS):
        try:
            score = float(result)
        except OverflowError:
            raise ScoreError(f"returned a number of type {type(result).__name__}{_TOO_LARGE}") from None
        if not math.isfinite(score):
            raise ScoreError(f"returned {score}: a score must be finite; return None where the function does not apply")
        if abs(score) > _LARGEST:
            raise ScoreError(f"returned {score}{_TOO_LARGE}")
        return score
    if _is_scalar_array(result):
        return as_score(result.item())
    if inspect.iscoroutine(result):
        result.close()  # Closing a coroutine avoids Python's warning about a coroutine that was never awaited.
    shown = one_line(repr(result), _SHOWN)
    raise ScoreError(f"returned {shown} of type {type(result).__name__}: a score must be a number, a bool or None")


def as_scores(results: Any, count: int) -> list[Any]:
    """Return the results of a batched reward function as a list with one result per sample.

    Raises:
        ScoreError: the function did not return a list, or returned the wrong number of results.
    """
    if not isinstance(results, Sequence) and not hasattr(results, "tolist"):
        raise ScoreError(
            f"returned {type(results).__name__}: a batched function must return a list, one score per sample"
        )
    found = list(results)
    if len(found) != count:
        raise ScoreError(
            f"returned {len(found)} scores for {count} samples; return one score per sample, in the same order"
        )
    return found


def _is_scalar_array(result: Any) -> bool:
    """Return whether `result` is a scalar array of numpy or torch, without importing either library."""
    return isinstance(getattr(result, "shape", None), tuple) and not result.shape and hasattr(result, "item")


def _is_file(target: str) -> bool:
    return target.endswith(".py") or "/" in target


def _module(target: str, where: str, kind: Kind) -> ModuleType:
    search_working_directory()
    try:
        return importlib.import_module(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A user's module may raise any exception while it is imported.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (target == missing or target.startswith(f"{missing}.")):
            raise ConfigError(
                f"{where}: there is no module '{missing}'; check the name, or give the file: "
                f"path/to/file.py:{_NAME[kind]}"
            ) from None
        raise ConfigError(f"{where}: {target} does not import ({described(error)}); fix that error first") from error


def _file_module(file: Path, where: str, kind: Kind) -> ModuleType:
    file = file.resolve()
    if file.exists() and not file.is_file():
        raise ConfigError(f"{where}: {file} is not a regular file; name a Python file, path/to/file.py:{_NAME[kind]}")
    if not file.is_file():
        folder = file.parent
        beside = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        near = difflib.get_close_matches(file.name, beside, n=1)
        hint = f"did you mean {folder / near[0]}?" if near else "check the path"
        raise ConfigError(f"{where}: there is no file {file}; {hint}")
    changed = file.stat()
    digest = hashlib.blake2b(f"{file}/{changed.st_mtime_ns}/{changed.st_size}".encode(), digest_size=8).hexdigest()
    name = f"rltrain_user_{file.stem}_{digest}"
    return sys.modules.get(name) or _execute(file, name, where)


def _execute(file: Path, name: str, where: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {file} is not a Python file; its name must end in .py")
    if str(file.parent) not in sys.path:
        # The folder of the user's file is appended to `sys.path`, so that a module in the folder cannot hide an
        # installed package.
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    # A module is added to `sys.modules` before it runs, because dataclasses and pickle look up modules there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{where}: {file} does not import ({described(error)}); fix that error first") from error
    return module


def source_name(key: str, path: str) -> str:
    """Return the key of a user's function in the dict of file fingerprints that a checkpoint stores.

    A run can be resumed only if the file that defines the user's function has not changed.
    """
    return f"{key}: {path}"


def _nearest(name: str, module: ModuleType, kind: Kind) -> str:
    """Return the end of an error message that suggests the function or class in `module` most similar to `name`.

    If `kind` is "class", the error message lists the module's classes after the suggested class.
    """
    is_kind = inspect.isclass if kind == "class" else inspect.isfunction
    found = {key: value for key, value in vars(module).items() if is_kind(value)}
    own = [key for key, value in found.items() if value.__module__ == module.__name__]
    names = (own or list(found)) if kind == "class" else list(found)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    if not near:
        return f"; the module contains no {_PLURAL[kind]}"
    shown = f"{', '.join(names[:_LISTED])}{' and others' if len(names) > _LISTED else ''}"
    return f"; the nearest is '{near[0]}'{f'; its classes are {shown}' if kind == 'class' else ''}"


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to completion on the event loop of `_event_loop`, and return the coroutine's result.

    Raises:
        ScoreError: the coroutine raised an exception that is not a subclass of `Exception` (SystemExit, CancelledError,
            KeyboardInterrupt, ...). The user's Ctrl-C does not cause a ScoreError, because Ctrl-C raises
            KeyboardInterrupt only in the main thread, and the coroutine runs in the thread of the event loop.
        Exception: any exception of the coroutine that is not converted to a ScoreError is raised unchanged.
    """
    return asyncio.run_coroutine_threadsafe(_only_exceptions(coroutine), _event_loop()).result()


async def _only_exceptions(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except Exception:
        raise
    except SystemExit as error:  # If not caught, SystemExit would end the event loop of all async reward functions.
        raise ScoreError(f"called sys.exit({error.code})") from None
    except BaseException as error:
        raise ScoreError(f"raised {described(error)}") from None


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Start, in a separate thread, the single event loop on which the process runs async reward functions.

    Because the event loop is never closed, async functions can keep connections between calls. An event loop in a
    separate thread works even if the caller already runs another event loop, as in a notebook.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), name="async-rewards", daemon=True).start()
    return loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # The event loop is restarted after a user's task raised SystemExit or stopped the loop.
        with contextlib.suppress(BaseException):
            loop.run_forever()
