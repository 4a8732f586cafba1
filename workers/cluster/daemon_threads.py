"""Helper that calls functions in daemon threads, so that the process can exit even if a function never returns."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from rltrain.base.errors import described
from rltrain.base.process_limits import start_thread, thread_ends


async def in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, and return the function's result.

    `function` runs in a daemon thread, so the process can exit before `function` returns. If the caller is cancelled,
    `function` keeps running, and its result is dropped. `asyncio.to_thread` is not used, for two reasons: asyncio
    limits the number of its threads, and at exit Python waits until asyncio's threads have ended.

    Raises:
        RuntimeError: `function` raised StopIteration, or an exception such as SystemExit that is no subclass of
            Exception.
        Exception: `function` raised a subclass of Exception other than StopIteration. `in_daemon_thread` raises the
            exception that `function` raised.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except StopIteration as raised:
            error = RuntimeError(described(raised))
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RuntimeError(described(raised))
        thread_ends()
        # If the caller's event loop is already closed, `call_soon_threadsafe` raises RuntimeError, and the result of
        # `function` is dropped.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    start_thread(threading.Thread(target=run, name="daemon thread", daemon=True))
    return await future
