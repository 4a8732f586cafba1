"""Guard process, which outlives the driver of a run in order to report dead Ray daemons and to end leftover processes.

When one of Ray's daemons dies, Ray's C++ code can end the driver with `_Exit`, without an error message. When the
driver is killed, Ray's helper processes can continue to run. The guard waits until the driver ends, for whatever
reason. If the death of a daemon ended the driver, the guard prints an error message that names the daemon. If the
driver had started the Ray cluster itself, the guard kills all processes of the cluster that remain after the driver's
end.
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
_CLOSE_S = 15.0  # Seconds within which the guard process must kill all leftover processes of the run.
_SHOWN_S = 1.0  # Seconds to wait, after Ray has ended the driver, for evidence that a Ray daemon has died.
_LAST_WORDS = 4096  # Number of bytes to read from the end of the driver's Ray log.
# Phrases that Ray's C++ code logs before it ends the current process.
_ENDED_BY_RAY = ("Terminate the process", "The program will terminate")


class RayGuard:
    """The driver's handle to the guard process.

    Args:
        mark: Value of the environment variable `leftovers.MARK`, by which the guard recognizes the processes to kill.
            If `mark` is "", the guard process kills no process.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        code = _CODE.format(path=sys.path, driver=os.getpid(), mark=mark)
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal must not reach the guard process
        )
        assert self.process.stdin is not None, "the guard process must have a pipe as its standard input"
        self._pipe = self.process.stdin

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Mark the processes that start in the `with` block, and all their descendants, so that the guard recognizes
        them.
        """
        if self.mark:
            os.environ[leftovers.MARK] = self.mark
        try:
            yield
        finally:
            os.environ.pop(leftovers.MARK, None)

    def tell(self, session: Path, daemons: Sequence[Daemon]) -> None:
        """Tell the guard that the driver is connected to Ray.

        Args:
            session: Directory where Ray keeps the logs and sockets of the Ray cluster.
            daemons: Ray daemons whose death the guard process reports.
        """
        known = [(one.pid, one.began, str(one)) for one in daemons if isinstance(one, LocalDaemon)]
        self._write({"session": str(session), "daemons": known})

    def close(self) -> None:
        """Make the guard kill the run's leftover processes without printing an error, and wait until the guard ends.

        The driver calls `close` when the driver ends normally or reports its error itself.
        """
        self._write({"goodbye": True})
        with contextlib.suppress(OSError):
            self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)

    def _write(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # writing to the pipe fails if the guard process was killed
            self._pipe.write(json.dumps(message).encode() + b"\n")
            self._pipe.flush()


def serve(driver: int, mark: str) -> None:
    """Run the guard process: wait until the driver ends, report a dead Ray daemon, and kill leftover processes.

    Args:
        driver: Pid of the process that started the guard.
        mark: Value of the environment variable `leftovers.MARK` in the processes to kill; "" kills no process.
    """
    # The guard ignores the signals that a service manager, such as systemd, sends to all processes of a service to stop
    # them.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
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
    """Wait until the driver calls `RayGuard.close` or dies.

    Return all messages from the driver, merged into one dictionary.
    """
    heard: dict[str, Any] = {"goodbye": False, "session": "", "daemons": []}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    # The pidfd shows the end of the driver even if a child of the driver keeps the pipe from the driver to the guard
    # process open.
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(driver), select.POLLIN)
    content = b""
    while not heard["goodbye"]:
        # if the driver is dead, read the bytes that are still in the pipe, without waiting for more bytes
        ready = poll.poll(None if os.getppid() == driver else 0)
        if not any(descriptor == 0 for descriptor, _ in ready):
            break
        if not (piece := os.read(0, 1 << 16)):
            break
        *lines, content = (content + piece).split(b"\n")
        for line in lines:
            heard |= json.loads(line)
    return heard


def _last_words(session: Path, driver: int, daemons: Sequence[tuple[int, int, str]]) -> str:
    """Return an error message that says why Ray ended the driver process, or "" if Ray did not end the driver process.

    Args:
        session: Directory where Ray keeps the logs of the Ray cluster.
        driver: Pid of the driver.
        daemons: Pid and start time of each Ray daemon, and the message to return if the daemon has died.
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
    """Return the session directory of a Ray cluster that the driver began to start, but did not report to the guard.

    Args:
        driver: Pid of the driver.
        since: Time in seconds since the epoch at which the guard started. Session directories that were last modified
            more than one second before `since` are ignored.
    """
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    found = [path for path in base.glob(f"session_*_{driver}") if path.stat().st_mtime >= since - 1.0]
    return max(found, default=None)
