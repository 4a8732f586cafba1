"""Replacement of terminal input and output in the child process that runs reward functions.

The child process that runs reward functions has no terminal.
"""

import builtins
import io
import os
import sys
import threading
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

from rltrain.base.errors import one_line

# Name of the reward function that the current thread or asyncio task is running, or "" outside reward functions.
CALLING: ContextVar[str] = ContextVar("calling", default="")
_LONGEST = 200  # Maximum number of characters of a printed line that are recorded.
# If the environment variable PYTHONBREAKPOINT begins with a module name in `_NEED_TERMINAL`, `breakpoint()` starts a
# debugger that needs a terminal. Ray sets PYTHONBREAKPOINT to its own debugger, which works only in processes that Ray
# itself has started.
_NEED_TERMINAL = ("", "pdb", "ray", "ipdb", "IPython", "pudb")


class NoTerminal(BaseException):
    """Exception raised when a reward function tries to use the terminal in a process without a terminal.

    `NoTerminal` is not derived from `Exception`, so that `except Exception` in a reward function does not catch it.
    """


class FirstLines:
    """Record of the first line that each reward function prints in this process."""

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Record printed text if it is part of the first non-blank line that the running reward function prints."""
        name = CALLING.get()
        with self._lock:
            begun = self._begun.get(name, "")
            if "\n" not in begun and len(begun) < _LONGEST:
                self._begun[name] = (begun + text[: 2 * _LONGEST]).lstrip()

    def lines(self) -> tuple[tuple[str, str], ...]:
        """Return (name of the reward function, first printed line) for each reward function that has printed something.

        The name of the reward function is "" if the line was printed by a thread that a reward function has started.
        """
        with self._lock:
            begun = list(self._begun.items())
        return tuple((name, one_line(text.partition("\n")[0], _LONGEST)) for name, text in begun if text)

    def forget(self) -> None:
        """Delete all recorded lines, for example the lines that were printed while reward functions were imported."""
        with self._lock:
            self._begun.clear()


class _Stream(io.TextIOWrapper):
    """Standard output or error stream that records the first line that each reward function prints."""

    def __init__(self, descriptor: int, lines: FirstLines) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines.add(text)
        return super().write(text)


def stand_in() -> FirstLines:
    """Replace stdout, stderr, `breakpoint` and `input` of this process, and return a new `FirstLines` object.

    The `FirstLines` object records the first line that each reward function prints, so that the driver can show the
    line. The functions `breakpoint` and `input` raise an error at once, instead of waiting for a terminal that does not
    exist.
    """
    lines = FirstLines()
    sys.stdout, sys.stderr = _Stream(1, lines), _Stream(2, lines)
    sys.breakpointhook = _breakpoint
    builtins.input = _input
    return lines


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """Start a debugger for `breakpoint()`, or raise NoTerminal if the debugger needs a terminal.

    The environment variable PYTHONBREAKPOINT selects the debugger.
    """
    if os.environ.get("PYTHONBREAKPOINT", "").partition(".")[0] in _NEED_TERMINAL:
        raise _refusal("breakpoint()", sys._getframe(1))
    return sys.__breakpointhook__(*args, **kwargs)


def _input(*_: object) -> NoReturn:
    """Raise NoTerminal when a reward function calls `input`, or when `pdb.set_trace()` calls `input`."""
    frame: FrameType | None = sys._getframe(1)
    asker = frame
    while frame is not None and frame.f_globals.get("__name__") in ("pdb", "cmd", "bdb"):
        frame = frame.f_back
    raise _refusal("input()" if frame is asker else "the debugger", frame)


def _refusal(what: str, frame: FrameType | None) -> NoTerminal:
    place = f"{one_line(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "an unknown line"
    return NoTerminal(f"stops at {place}: {what} needs the driver's terminal: run with placement=inprocess")
