"""Wakes the driver as soon as a process of its machine ends."""

import asyncio
import contextlib
import os


class Exits:
    """Waits for the end of any of the added processes. They need not be child processes.

    Without pidfds (Linux before 5.3), `wait` returns only after its timeout or after `notify`.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._pidfds: set[int] = set()

    def add(self, pid: int) -> None:
        """Wait for this process as well. A process that has ended already wakes the next `wait`."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            self.notify()
            return
        self._pidfds.add(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pidfd)

    def notify(self) -> None:
        """Wake `wait` as the end of a process does."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until a process ends, for at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Stop waiting for all processes."""
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _ended(self, pidfd: int) -> None:
        self._forget(pidfd)
        self.notify()

    def _forget(self, pidfd: int) -> None:
        self._pidfds.discard(pidfd)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
