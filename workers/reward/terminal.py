"""What replaces the terminal in a child process that runs reward functions.

A child process has no terminal. `stand_in` keeps the first line that each reward function prints, so that the driver
can show it, and makes `breakpoint()` and `input()` raise an error at once, so that no call waits for a terminal that is
not there.
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

# name of the reward function that the current thread or asyncio task runs; "" outside reward functions
CALLING: ContextVar[str] = ContextVar("calling", default="")
_LONGEST = 200  # characters of a printed line that are kept
# Values of PYTHONBREAKPOINT for debuggers that need the driver's terminal, by their first name. Ray chooses its own
# debugger in all of its processes, and that debugger works only in processes that Ray itself has started.
_NEED_TERMINAL = ("", "pdb", "ray", "ipdb", "IPython", "pudb")


class NoTerminal(BaseException):
    """Raised where a reward function asks for the terminal in a process that has none.

    It is not a subclass of `Exception`, so that a function that handles its own errors does not handle it.
    """


class FirstLines:
    """The first line that each reward function has printed in this process."""

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Keep the text if it belongs to a function's first line that is not blank."""
        name = CALLING.get()
        with self._lock:
            begun = self._begun.get(name, "")
            if "\n" not in begun and len(begun) < _LONGEST:
                self._begun[name] = (begun + text[: 2 * _LONGEST]).lstrip()

    def lines(self) -> tuple[tuple[str, str], ...]:
        """Return (name of the reward function, first line) for each function that has printed something.

        The name is "" for output of threads that a reward function has started.
        """
        with self._lock:
            begun = list(self._begun.items())
        return tuple((name, one_line(text.partition("\n")[0], _LONGEST)) for name, text in begun if text)

    def forget(self) -> None:
        """Forget all lines, for example those that the import of the reward functions has printed."""
        with self._lock:
            self._begun.clear()


class _Stream(io.TextIOWrapper):
    """Standard stream of a process whose output is dropped; it keeps the first lines."""

    def __init__(self, descriptor: int, lines: FirstLines) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines.add(text)
        return super().write(text)


def stand_in() -> FirstLines:
    """Replace the standard streams, `breakpoint` and `input` of this process, and return what will be printed first."""
    lines = FirstLines()
    sys.stdout, sys.stderr = _Stream(1, lines), _Stream(2, lines)
    sys.breakpointhook = _breakpoint
    builtins.input = _input
    return lines


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """Replace `sys.breakpointhook`. Debuggers that need no terminal, chosen with PYTHONBREAKPOINT, still work."""
    if os.environ.get("PYTHONBREAKPOINT", "").partition(".")[0] in _NEED_TERMINAL:
        raise _refusal("breakpoint()", sys._getframe(1))
    return sys.__breakpointhook__(*args, **kwargs)


def _input(*_: object) -> NoReturn:
    """Replace `input`, which `pdb.set_trace()` calls too."""
    frame: FrameType | None = sys._getframe(1)
    asker = frame
    while frame is not None and frame.f_globals.get("__name__") in ("pdb", "cmd", "bdb"):
        frame = frame.f_back
    raise _refusal("input()" if frame is asker else "the debugger", frame)


def _refusal(what: str, frame: FrameType | None) -> NoTerminal:
    place = f"{one_line(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "an unknown line"
    return NoTerminal(f"stops at {place}: {what} needs the driver's terminal: run with placement=inprocess")
