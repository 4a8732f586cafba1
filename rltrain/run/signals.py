"""Handling of the signals SIGTERM, SIGINT (Ctrl-C) and SIGHUP (lost terminal).

The first signal that a run receives stops the run at a safe point, where no work is lost. If a second signal arrives,
the run ends immediately.
"""

import asyncio
import signal
import threading
from types import FrameType
from typing import Any, Self

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import Stopped

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Context manager that catches SIGTERM, SIGINT and SIGHUP.

    Only the main thread can install signal handlers, so in any other thread the context manager has no effect.

    A signal that was already ignored when the program started stays ignored. `nohup` ignores SIGHUP, and a shell
    without job control ignores SIGINT for the processes that it starts in the background. A SIGHUP after another signal
    has no effect, because a dropped connection causes two SIGHUPs, one from the terminal and one from the shell.

    Until `stop_with` is called, the first signal interrupts the code of the `with` block at once. After an interruption
    by a signal, the context manager raises the exception Stopped with the exit status of the received signal.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._tasks: BackgroundTasks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            caught = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._catch) for number in caught}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is KeyboardInterrupt:
            raise Stopped(self.status) from None

    def stop_with(self, tasks: BackgroundTasks) -> None:
        """From now on, let the first signal call `tasks.interrupt`, which stops the run at a safe point.

        `stop_with` must be called in the main thread, while the event loop of the main thread is running.
        """
        self._tasks, self._loop = tasks, asyncio.get_running_loop()

    @property
    def status(self) -> int:
        """Return 128 plus the number of the received signal, or plus the number of SIGINT if no signal was received."""
        return 128 + (self.received or signal.SIGINT)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGHUP:
            return
        first, self.received = self.received is None, number
        if not first or self._tasks is None or self._loop is None:
            raise KeyboardInterrupt
        self._tasks.interrupt(Stopped(self.status))
        self._loop.call_soon_threadsafe(lambda: None)  # Wake the asyncio event loop, which may be idle.
