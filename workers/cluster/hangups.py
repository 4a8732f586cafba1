"""Makes worker processes ignore SIGHUP, so that the driver alone decides how a run reacts to a lost terminal."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """Make processes that start in this block ignore SIGHUP.

    A lost terminal sends SIGHUP to all processes of a program. The driver alone decides how to react, and it needs its
    workers to save a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
