"""SIGTERM, Ctrl-C and a lost terminal: the first signal stops the run where nothing is lost, a second one at once."""

import signal
import threading
from types import FrameType
from typing import Any, Self

from rltrain.base.errors import Stopped

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Catches them while it is entered; other threads than the main one cannot, and then it catches none.

    A signal that the parent process had ignored stays ignored: `nohup` does that with SIGHUP, and a shell without job
    control with the SIGINT of what it starts in the background. A SIGHUP after another signal changes nothing: when a
    connection drops, the shell sends the same news that the terminal has sent already.

    What one of them ends at once is raised as Stopped, with the status of the signal.

    Attributes:
        patient: whether there is a safe place ahead, where `check` is called; else the first signal ends it too.
    """

    def __init__(self) -> None:
        self.patient = False
        self.received: int | None = None
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

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.received is not None:
            raise Stopped(self.status)

    @property
    def status(self) -> int:
        """Exit status of a program that ended on this signal."""
        return 128 + (self.received or signal.SIGINT)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGHUP:
            return
        first, self.received = self.received is None, number
        if not (first and self.patient):
            raise KeyboardInterrupt
