"""Separate processes that download models and data sets from the hub: how they are run, ended and cleaned up.

The driver calls `run_download`. The download process calls `remove_unfinished_files_at_sigterm` before the first
download.

The hub's library writes a file under a temporary name that ends in `.incomplete`, and renames the file when it is
complete. A later download cannot continue a file with a temporary name, so a download process that is stopped deletes
the files that it has not finished. Complete files stay in the cache.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rltrain.base.errors import one_line

UNFINISHED = ".incomplete"  # The end of the names of files and folders that a download has not finished.
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_NO_ROOM = "Not enough disk space"  # `datasets` raises an OSError without an errno whose message begins so.
_GRACE_S = 5.0  # Time between SIGTERM and SIGKILL, in seconds.


def run_download(
    code: str, environment: Mapping[str, str], read: Callable[[IO[str]], dict[str, Any]], *, show_progress: bool = False
) -> dict[str, Any]:
    """Run Python code in a separate process, and return the result that the process writes to its standard output.

    The process has ended when `run_download` returns or raises an exception, such as KeyboardInterrupt.

    Args:
        code: Python code, as for `python -c`.
        environment: environment variables of the process.
        read: function that reads the process's standard output, and returns the result, or {} if there is none.
        show_progress: whether the process shares the standard error of this process.

    Returns:
        The result. If the process ended without a result, a dict whose key `error` says so and names a remedy.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if show_progress else complaints,
            text=True,
            env=dict(environment),
        ) as process:
            assert process.stdout is not None
            try:
                result = read(process.stdout)
            finally:
                _end(process)
        complaints.seek(0)
        last = (complaints.read().strip().splitlines() or ["no message"])[-1]
    return result or {"error": f"the download ended with status {process.returncode} ({one_line(last)}); try again"}


def _end(process: subprocess.Popen[str]) -> None:
    """End a process: with SIGTERM, and with SIGKILL if the process still runs after `_GRACE_S` seconds."""
    try:
        process.terminate()
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # A second Ctrl-C can interrupt `wait`.
        process.kill()


def remove_unfinished_files_at_sigterm() -> None:
    """Let SIGTERM delete the unfinished files and end this process, and ignore SIGINT.

    On Ctrl-C, the terminal sends SIGINT to the driver and to this process, and the driver then sends SIGTERM to this
    process. A thread waits for SIGTERM, because the main thread runs no signal handlers while it is in native code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Threads that start later inherit the mask.
    threading.Thread(target=_wait_for_sigterm, daemon=True).start()


def _wait_for_sigterm() -> None:
    signal.sigwait({signal.SIGTERM})
    try:
        for path in _unfinished():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    finally:
        os._exit(128 + signal.SIGTERM)


def _unfinished() -> Iterator[Path]:
    """Yield the unfinished files that this process has open, and the unfinished folders in which it has open files.

    Other unfinished files in the cache may belong to the downloads of other processes.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # A descriptor may be closed at any time.
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.name.endswith(UNFINISHED):
                yield path
            elif path.parent.name.endswith(UNFINISHED):
                yield path.parent


def is_of_disk(error: BaseException) -> bool:
    """Return whether an error, or one of the errors that led to it, says that files cannot be stored."""
    return any(
        getattr(one, "errno", None) in _OF_DISK or (isinstance(one, OSError) and str(one).startswith(_NO_ROOM))
        for one in causes(error)
    )


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that led to it, the first cause last."""
    found = [error]
    while (before := found[-1].__cause__ or found[-1].__context__) is not None and before not in found:
        found.append(before)
    return found
