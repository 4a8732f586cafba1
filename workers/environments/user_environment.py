"""Wrapper that calls tools and methods of the user's environment class, with a time limit for each call."""

import asyncio
import inspect
import math
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rltrain.base.errors import described, one_line
from rltrain.environments.contract import (
    CLOSE,
    RESET,
    REWARDS,
    STEP,
    EnvironmentFailure,
    as_reward,
    as_step,
    as_text,
    reset_arguments,
    tool_names,
)
from rltrain.environments.tool_calls import ToolCall
from workers.cluster.daemon_threads import in_daemon_thread

# Folders whose files are not the user's code: rltrain, installed packages and Python's standard library.
_OURS = tuple(f"{Path(__file__).parents[2] / name}/" for name in ("rltrain", "workers"))
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
_STANDARD = f"{sysconfig.get_path('stdlib')}/"


class UserEnvironment:
    """Environment of one trajectory: the tools, and an object of the environment class if the user has written one.

    Args:
        make: The user's environment class, or None if the run has only tools.
        tools: Mapping from the name of each tool to the function that implements the tool.
        timeout_s: Maximum duration of one call of a tool or of a method of the user's environment class, in seconds.
    """

    def __init__(self, make: type | None, tools: Mapping[str, Callable[..., Any]], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._object: Any = None
        self._make, self._tools = make, dict(tools)

    async def reset(self, columns: Mapping[str, Any], seed: int) -> str:
        """Create and reset an object of the user's environment class, and return the text to append to the prompt.

        Raises:
            EnvironmentFailure: the user's code raised an exception or took too long.
        """
        if self._make is None:
            return ""
        self._object = await self._required("__init__", self._make)
        self._tools |= {name: getattr(self._object, name) for name in tool_names(self._make)}
        reset = getattr(self._object, RESET, None)
        if reset is None:
            return ""
        return as_text(await self._required(RESET, reset, **reset_arguments(reset, columns, seed)))

    @property
    def plays(self) -> bool:
        """Whether the environment has a method `step`, which answers the text of an action without tool calls."""
        return hasattr(self._object, STEP)

    async def call(self, call: ToolCall, time_left_s: float = math.inf) -> str:
        """Call a tool, and return the text that shows the result to the policy.

        If the tool does not exist, does not accept the arguments, raises an exception or takes too long, `call` returns
        a text that describes the error.

        Args:
            call: The call of the tool.
            time_left_s: Maximum duration of the call in seconds, in addition to the time limit of each call.

        Raises:
            EnvironmentFailure: the MCP server of the tool cannot be reached.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r:.80}; the tools are {', '.join(self._tools) or 'none'}"
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:
            return f"error: {call.name}: {error}"
        limit_s = min(self._timeout_s, time_left_s)
        try:
            return as_text(await self._within(limit_s, tool, **call.arguments))
        except EnvironmentFailure:  # Failures of an MCP server are raised, because the policy cannot correct them.
            raise
        except TimeoutError:
            return f"error: {call.name} took more than {limit_s:g} s"
        except Exception as error:
            return f"error: {call.name}: {described(error)}"

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        """Pass the text of an action to the environment's `step`.

        Returns:
            Three values: the observation, the reward of the turn, and whether the trajectory is over.

        Raises:
            EnvironmentFailure: the user's code raised an exception, took too long or returned an invalid value.
        """
        value = await self._required(STEP, getattr(self._object, STEP), text)
        return as_step(value, f"{type(self._object).__name__}.{STEP}")

    async def reward(self) -> float | None:
        """Return the reward of the whole trajectory, or None if the environment gives no reward of the whole
        trajectory.

        The reward is the result of the environment's method `reward` or `get_reward`. If the environment has neither
        one of these methods nor a method `step`, the reward is the value of the environment's attribute `reward`. The
        attribute of an environment with a method `step` is not read, because such an attribute often holds the reward
        that `step` has already returned.

        Raises:
            EnvironmentFailure: the user's code raised an exception or took too long, or the reward is not a number.
        """
        if self._object is None:
            return None
        # The attribute `reward` may be a property, whose code may block or raise an exception.
        found = [await self._required(name, getattr, self._object, name, None) for name in REWARDS]
        for name, method in zip(REWARDS, found, strict=True):
            if callable(method):
                return as_reward(await self._required(name, method))
        return None if self.plays else as_reward(found[0])

    async def close(self) -> None:
        """Close the object of the user's environment class, and ignore errors, because the trajectory is over."""
        if method := getattr(self._object, CLOSE, None):
            try:
                await self._within(self._timeout_s, method)
            except Exception:
                return

    async def _required(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._within(self._timeout_s, function, *args, **kwargs)
        except TimeoutError:
            raise EnvironmentFailure(f"the environment's {name} took more than {self._timeout_s:g} s") from None
        except Exception as error:
            raise EnvironmentFailure(f"the environment's {name} raised {described(error)}{raised_at(error)}") from error

    async def _within(self, limit_s: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async with asyncio.timeout(limit_s):
            if inspect.iscoroutinefunction(function):
                return await without_exit(function(*args, **kwargs))
            return await in_daemon_thread(lambda: function(*args, **kwargs))


def raised_at(error: BaseException) -> str:
    """Return the file and the line of the user's code that raised an exception, in the form " (file.py:12)".

    The line of the user's code is the last line of the traceback that lies outside rltrain, installed packages and
    Python's standard library. If the traceback has no line of the user's code, `raised_at` returns the last line in an
    installed package, or "" if no line is in an installed package.
    """
    # The traceback is read with `walk_tb`, which opens no source files, because the user's source files may be
    # unreadable.
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    installed = [(file, line) for file, line in lines if file.startswith(_INSTALLED)]
    others = [(file, line) for file, line in lines if not file.startswith((*_OURS, *_INSTALLED, _STANDARD))]
    if not (found := others or [one for one in installed if not one[0].startswith(_OURS)]):
        return ""
    file, line = found[-1]
    return f" ({one_line(file)}:{line})"


async def without_exit(call: Awaitable[Any]) -> Any:
    """Await a call of the user's code, and raise RuntimeError if the code tries to end the process or its own task.

    An uncaught SystemExit or KeyboardInterrupt of the user's code would end the environment worker's process. An
    uncaught CancelledError of the user's code would end the trajectory without a result. If the trajectory itself was
    cancelled, `without_exit` raises the CancelledError unchanged.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the user's code raised CancelledError, but the trajectory was not cancelled") from error
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(described(error)) from error
