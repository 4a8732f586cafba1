"""Progress counter and stack traces of this process, which other processes on the same machine can read at any time.

A process stores its progress counter and its stack traces in unnamed files in memory. The unnamed files of a process
vanish when the process ends, and other processes open the files through `/proc`. Long-running code calls `tick`
repeatedly to show that this process makes progress. The function `tick` does nothing until `announce` has been called.

The start time of a process is read from `/proc`, because the number in `/proc` never changes and is the same for all
readers. The function `create_time()` of psutil is not suitable, because it returns a time of day, which changes when
the machine's clock is set. An object of psutil's class `Process` is not suitable as the identity of a process, because
the object cannot be pickled.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.cluster import leftovers

STACKS_SIGNAL = signal.SIGUSR2  # Signal that makes a process write its stack traces.
_WORD = 8  # Bytes per number in the progress file, which holds two numbers: ticks and running calls.


@dataclass(frozen=True)
class Process:
    """Identity of a process of a run, as reported by the process itself.

    Attributes:
        pid: Process id on the machine on which the process runs.
        began: Start time in clock ticks since the machine's boot. The start time distinguishes the process from a later
            process with the same pid.
        node: Ray's node id of the machine on which the process runs.
        host: Hostname of the machine on which the process runs, for messages.
        progress, stacks: File descriptors of two unnamed files. The file `progress` holds the progress counter, and the
            file `stacks` holds the stack traces.
    """

    pid: int
    began: int
    node: str
    host: str
    progress: int
    stacks: int


class _Counter:
    """Two counters of this process (calls of `tick`, and running calls), in memory that other processes can read."""

    def __init__(self) -> None:
        self.file = os.memfd_create("rltrain-progress")
        os.ftruncate(self.file, 2 * _WORD)
        self.memory, self.ticks, self.calls, self.lock = mmap.mmap(self.file, 2 * _WORD), 0, 0, threading.Lock()

    def add(self, *, ticks: int = 0, calls: int = 0) -> None:
        with self.lock:
            self.ticks, self.calls = self.ticks + ticks, self.calls + calls
            self.memory[:] = self.ticks.to_bytes(_WORD, "little") + self.calls.to_bytes(_WORD, "little")


_counter: _Counter | None = None
_announced: Process | None = None


def announce(node: str) -> Process | None:
    """Let other processes observe this worker process, and return its identity, or None on a system without `/proc`.

    This process becomes the leader of a process group, and the processes that it starts inherit an environment variable
    with its identity, so that its child processes can be found even after this process has died.
    """
    global _counter, _announced
    began = began_of(os.getpid())
    if began is None:
        return None
    if _announced is None:
        # If this process has called `setsid`, it already leads a process group, and `setpgid` fails.
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        os.environ[leftovers.PARENT] = leftovers.parent_mark(os.getpid(), began)
        _counter, stacks = _Counter(), os.memfd_create("rltrain-stacks")
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        _announced = Process(os.getpid(), began, node, socket.gethostname(), _counter.file, stacks)
    return _announced


def announced() -> Process | None:
    """Return the identity of this process, or None before `announce` has been called."""
    return _announced


def tick() -> None:
    """Record that this process has made progress."""
    if _counter is not None:
        _counter.add(ticks=1)


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Mark this process as busy while the `with` block runs.

    A process that only waits for work does not count as hanging.
    """
    if _counter is None:
        yield
        return
    _counter.add(calls=1)
    try:
        yield
    finally:
        _counter.add(calls=-1)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark this process as not busy while the `with` block runs, in which a call waits for other processes.

    A process that only waits for other processes cannot be the reason why a run makes no progress.
    """
    if _counter is None:
        yield
        return
    _counter.add(calls=-1)
    try:
        yield
    finally:
        _counter.add(calls=1)


def began_of(pid: int) -> int | None:
    """Return a process's start time in clock ticks since the machine's boot, or None if no process has the id `pid`."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def state_of(pid: int, began: int) -> str:
    """Return the kernel's letter for a process's state, such as "T", or "" if the process has ended or is a zombie."""
    fields = _stat(pid)
    return "" if not fields or int(fields[19]) != began or fields[0] in "ZX" else fields[0]


def counts_of(process: Process) -> tuple[int, int]:
    """Return how many times a process has called `tick`, and how many calls are running in the process.

    Raises OSError if the process is gone.
    """
    with open(f"/proc/{process.pid}/fd/{process.progress}", "rb") as file:
        words = file.read(2 * _WORD)
    return int.from_bytes(words[:_WORD], "little"), int.from_bytes(words[_WORD:], "little", signed=True)


def stacks_of(process: Process) -> str:
    """Return the stack traces that a process has written so far. Raises OSError if the process is gone."""
    return Path(f"/proc/{process.pid}/fd/{process.stacks}").read_text("utf-8", "replace")


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the process name, which may itself contain spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []
