"""Waiting for the end of processes, with which the driver notices at once that a process of its machine has ended."""

import asyncio
import contextlib
import os


class Exits:
    """Waits for the end of any of the added processes, which need not be child processes.

    If the system has no pidfds (Linux before 5.3), `wait` does not notice the end of a process: it returns only after
    its timeout or after `notify`.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._pidfds: set[int] = set()

    def add(self, pid: int) -> None:
        """Add a process to those that `wait` waits for. If the process has ended, the next `wait` returns at once."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            self.notify()
            return
        self._pidfds.add(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pidfd)

    def notify(self) -> None:
        """Make the current or next `wait` return at once, as if a process had ended."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until one of the added processes ends, for at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Stop waiting for all added processes, and close their pidfds."""
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _ended(self, pidfd: int) -> None:
        self._forget(pidfd)
        self.notify()

    def _forget(self, pidfd: int) -> None:
        self._pidfds.discard(pidfd)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
