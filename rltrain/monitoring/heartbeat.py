"""Lines in the log of a run that say what the run waits for, printed if a minute has passed without a line."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console

from rltrain.monitoring.printing import can_redraw, print_lines

HEARTBEAT_S = 60.0  # The log of a run gets at least one line in `HEARTBEAT_S` seconds.
_LOOK_EVERY_S = 1.0


class Heartbeat:
    """Context manager that prints a line about the current phase of a run if no line was printed for `HEARTBEAT_S`.

    The lines are printed only if the output is not a terminal, because a terminal shows a live display. A thread prints
    the lines, so the lines also appear while the main thread waits, for example for a download or for a forward pass in
    the driver's process.

    Args:
        console: the `rich.console.Console` object to which the lines are printed.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._phases: list[Callable[[], str]] = []  # The phases that have begun and not ended; the innermost is last.
        self._told_at = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    @property
    def is_live(self) -> bool:
        """Whether the console is a terminal with a live display, so that the heartbeat prints no lines."""
        return can_redraw(self.console)

    def __enter__(self) -> Self:
        if not self.is_live:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def during(self, phase: str | Callable[[], str]) -> Iterator[None]:
        """While the `with` block runs, let the lines name a phase of the run. Phases may be nested.

        Args:
            phase: the phase as a verb form, such as "loading the data", or a function that returns the whole line and
                is called in another thread.
        """
        self._phases.append(still(phase) if isinstance(phase, str) else phase)
        try:
            yield
        finally:
            self._phases.pop()

    def say(self, text: str) -> None:
        """Print a line of progress now, so that the next line of the heartbeat is due after `HEARTBEAT_S` seconds."""
        self._told_at = time.monotonic()
        print_lines(self.console, text)

    def beat(self) -> None:
        """Print a line about the innermost phase if a line is due."""
        if time.monotonic() - self._told_at >= HEARTBEAT_S:
            for phase in self._phases[-1:]:  # The slice is empty if the main thread has just ended the last phase.
                self.say(phase())

    def _watch(self) -> None:
        while not self._ended.wait(min(_LOOK_EVERY_S, HEARTBEAT_S)):
            self.beat()


def still(phase: str) -> Callable[[], str]:
    """Return a function that returns a line such as "still loading the data after 2 min"; the phase begins now."""
    began = time.monotonic()
    return lambda: f"still {phase} after {duration(time.monotonic() - began)}"


def duration(seconds: float) -> str:
    """Format a duration in a readable way, such as "45 s", "12 min" or "3 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
