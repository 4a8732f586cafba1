"""Start of worker processes that ignore SIGHUP, so that only the driver decides how to react to a lost terminal."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """Make the processes that start in this block ignore SIGHUP.

    When a terminal is lost, all processes of a program get SIGHUP. Only the driver must react to the signal, because
    the driver needs its workers to save a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
