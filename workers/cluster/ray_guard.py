"""A small process beside the driver of a run, which outlives it.

When Ray loses a daemon it may end the driver's process from inside, without a word (`_Exit` in its C++ part). When the
driver is killed, Ray's own helpers may stay. The guard waits for the end of the driver, however it comes: it names the
daemon whose death took the driver along, and ends all processes of a Ray that the driver had started.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workers.cluster import leftovers
from workers.cluster.progress import state_of
from workers.cluster.ray_daemons import Daemon, LocalDaemon

_CODE = "import sys; sys.path[:] = {path!r}; from workers.cluster.ray_guard import serve; serve({driver}, {mark!r})"
_CLOSE_S = 15.0  # for the guard to end everything
_SHOWN_S = 1.0  # in which the death of a daemon shows that took the driver along
_LAST_WORDS = 4096  # bytes of a log
# In what Ray's C++ part writes to its log before it ends the process that it lives in.
_ENDED_BY_RAY = ("Terminate the process", "The program will terminate")


class Guard:
    """The guard, as the driver sees it.

    Args:
        mark: value of `leftovers.MARK` in the environment of the processes to end; "": the guard ends none.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        code = _CODE.format(path=sys.path, driver=os.getpid(), mark=mark)
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are for the driver alone
        )
        assert self.process.stdin is not None, "asked for above"
        self._pipe = self.process.stdin

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """What is started inside of the block bears the mark, and what that starts in its turn."""
        if self.mark:
            os.environ[leftovers.MARK] = self.mark
        try:
            yield
        finally:
            os.environ.pop(leftovers.MARK, None)

    def tell(self, session: Path, daemons: Sequence[Daemon]) -> None:
        """The driver is connected to Ray: where that keeps its logs, and the daemons whose death is to be named."""
        known = [(one.pid, one.began, str(one)) for one in daemons if isinstance(one, LocalDaemon)]
        self._write({"session": str(session), "daemons": known})

    def close(self) -> None:
        """The driver ends in good order, or says itself what happened: end what is left and wait for that."""
        self._write({"goodbye": True})
        with contextlib.suppress(OSError):
            self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)

    def _write(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the guard was killed
            self._pipe.write(json.dumps(message).encode() + b"\n")
            self._pipe.flush()


def serve(driver: int, mark: str) -> None:
    """What the guard does: wait for the end of its driver, name a daemon, end what is left.

    Args:
        driver: pid of the process that started the guard.
        mark: see `Guard`.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # of a whole service that is being stopped
        signal.signal(number, signal.SIG_IGN)
    began = time.time()
    heard = _wait(driver)
    session = Path(heard["session"]) if heard["session"] else _started(driver, began)
    if session and not heard["goodbye"] and (said := _last_words(session, driver, heard["daemons"])):
        print(f"error: {said}: start the run again with trainer.resume=auto", file=sys.stderr, flush=True)  # noqa: T201
    if mark:
        leftovers.end_marked(mark, session / "logs" if session else None, spare=driver)
        if session:
            leftovers.remove((session / "sockets").glob("*"))


def _wait(driver: int) -> dict[str, Any]:
    """Wait for the driver's goodbye, or its end; returns all that it has said."""
    heard: dict[str, Any] = {"goodbye": False, "session": "", "daemons": []}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # a child of the driver may hold the pipe open
        poll.register(os.pidfd_open(driver), select.POLLIN)
    content = b""
    while not heard["goodbye"]:
        ready = poll.poll(None if os.getppid() == driver else 0)  # what a driver said before its end counts
        if not any(descriptor == 0 for descriptor, _ in ready):
            break
        if not (piece := os.read(0, 1 << 16)):
            break
        *lines, content = (content + piece).split(b"\n")
        for line in lines:
            heard |= json.loads(line)
    return heard


def _last_words(session: Path, driver: int, daemons: Sequence[tuple[int, int, str]]) -> str:
    """What there is to say of a driver that Ray ended; "" if somebody else did.

    `daemons`: for each its pid, when it began, and what to say of its death.
    """
    words = [
        line
        for path in (session / "logs").glob(f"python-core-driver-*_{driver}.log")
        for line in path.read_bytes()[-_LAST_WORDS:].decode(errors="replace").splitlines()
        if any(sign in line for sign in _ENDED_BY_RAY)
    ]
    if not words:
        return ""
    deadline = time.monotonic() + _SHOWN_S
    while time.monotonic() < deadline:
        for pid, began, said in daemons:
            if not state_of(pid, began):
                return said
        time.sleep(_SHOWN_S / 50)
    return f"Ray ended the run: {words[-1].partition('] ')[2]}"


def _started(driver: int, since: float) -> Path | None:
    """The session folder of a Ray that this driver began to start after its guard, but has not named yet."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    found = [path for path in base.glob(f"session_*_{driver}") if path.stat().st_mtime >= since - 1.0]
    return max(found, default=None)
