"""Code that lets the driver notice at once that a process on the driver's machine has ended."""

import asyncio
import contextlib
import os


class Exits:
    """Object that waits until any process passed to `add` ends, even a process that is not a child of the driver.

    On a system without pidfds (Linux before 5.3), `Exits.wait` cannot notice the end of a process, and returns only
    when its timeout expires or `notify` is called.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._pidfds: set[int] = set()

    def add(self, pid: int) -> None:
        """Make `wait` return when the process with the id `pid` ends.

        If the process has ended before the call of `add`, the next `wait` returns at once.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            self.notify()
            return
        self._pidfds.add(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pidfd)

    def notify(self) -> None:
        """Make the current or next call of `wait` return at once, as if a process had ended."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until one of the processes passed to `add` ends, for at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Stop observing the processes that were passed to `add`, and close their pidfds."""
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _ended(self, pidfd: int) -> None:
        self._forget(pidfd)
        self.notify()

    def _forget(self, pidfd: int) -> None:
        self._pidfds.discard(pidfd)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
