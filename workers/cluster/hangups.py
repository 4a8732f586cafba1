"""Worker processes that ignore SIGHUP, so that the driver alone decides what a lost terminal means."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """Have processes that are started meanwhile ignore SIGHUP, which a lost terminal sends to all of a program.

    The driver alone decides what comes of it, and needs its workers to save a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
