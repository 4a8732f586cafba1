"""Code that makes new worker processes ignore SIGHUP, so that only the driver reacts when the terminal closes."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """Make the processes that are started inside the `with` block ignore SIGHUP.

    When a terminal closes, the processes that were started from the terminal get SIGHUP. The worker processes must
    ignore SIGHUP, because the driver still needs the worker processes to save a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
