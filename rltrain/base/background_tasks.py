"""Runs named asyncio tasks in the background of training, and raises a task's error in the coroutines that wait for
results.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """An async context manager that starts, supervises and cancels the background tasks of a run.

    Leaving the `async with` block cancels all background tasks that are still running. The main coroutine uses the
    method `until` to wait for results of background tasks. If a background task fails or the run is interrupted, every
    waiting call of `until` raises the first error.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._changes = Changes()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cancel()

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Run a coroutine as a background task with the given name."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def interrupt(self, error: BaseException) -> None:
        """Make all current and future calls of `until` raise the given error, as if a background task had failed."""
        self._failures.append(error)
        self._changes.notify()

    def check(self) -> None:
        """Raise the error of the first failed task, or the error passed to `interrupt`, whichever came first.

        Do nothing if no task has failed and the run was not interrupted.
        """
        if self._failures:
            raise self._failures[0]

    async def until(self, awaitable: Awaitable[T]) -> T:
        """Wait for the result of an awaitable, and return the result.

        If a background task fails or the run is interrupted before the awaitable has a result, raise the error of the
        failed task or the error that was passed to `interrupt`.
        """
        result = asyncio.ensure_future(awaitable)
        failure = asyncio.ensure_future(self._changes.until(lambda: self._failures))
        try:
            await asyncio.wait({result, failure}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                self.check()
            return result.result()
        finally:
            await cancelled(result, failure)

    async def cancel(self) -> None:
        """Cancel all background tasks, and wait until all of the tasks have ended."""
        await cancelled(*self._tasks)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.interrupt(error)


class Changes:
    """Notifies coroutines of state changes, so that a coroutine can wait until a condition holds."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Make all waiting coroutines check their conditions again."""
        waiting, self._next = self._next, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def until(self, condition: Callable[[], T]) -> T:
        """Wait until the condition returns a true value, and return that value."""
        while True:
            # A coroutine gets the future of the next notification before evaluating its condition, so that the
            # coroutine does not miss a notification that arrives during the evaluation (for example, from a signal
            # handler).
            change = self._next
            if change is None:
                change = self._next = asyncio.get_running_loop().create_future()
            if found := condition():
                return found
            await asyncio.shield(change)


@contextlib.contextmanager
def outside_event_loop() -> Iterator[None]:
    """Run the `with` block as if no event loop were running in the thread, so that the block can run a new event loop.

    User code that runs in the driver's process needs `outside_event_loop`, because asyncio refuses nested event loops.
    """
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


async def cancelled(*futures: "asyncio.Future[Any]") -> None:
    """Cancel all unfinished futures, and wait until the futures have ended. The errors of the cancelled futures are
    ignored.
    """
    running = [future for future in futures if not future.done()]
    for future in running:
        future.cancel()
    if running:
        await asyncio.wait(running)
    for future in futures:
        if not future.cancelled():
            future.exception()  # Reading the exception of a future prevents asyncio from logging the exception.
