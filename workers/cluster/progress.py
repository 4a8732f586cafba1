"""How far this process has come: a counter that others on its machine can read whatever it does, and its stacks.

Counter and stacks are files without names, in memory: they end with the process, and others open them through `/proc`.
Work that takes long calls `tick` as it goes; where nobody has asked for it, that does nothing.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2  # what makes a process write down its stacks
_WORD = 8  # bytes of each of the two numbers: ticks, and calls under way


@dataclass(frozen=True)
class Process:
    """A process of a run, as it names itself.

    Attributes:
        pid: on its machine.
        began: when it started, in ticks of its machine's clock, so that no later process is taken for it.
        node: Ray's name of the machine.
        progress, stacks: descriptors of its two files.
    """

    pid: int
    began: int
    node: str
    progress: int
    stacks: int


class _Counter:
    """Ticks and calls under way, in memory that others can map."""

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
    """Let others follow this worker process from now on, and say how; None where there is no `/proc`.

    It leads a process group from then on, by which those that it started are found even when it has died.
    """
    global _counter, _announced
    began = began_of(os.getpid())
    if began is None:
        return None
    if _announced is None:
        with contextlib.suppress(OSError):  # it leads a session
            os.setpgid(0, 0)
        _counter, stacks = _Counter(), os.memfd_create("rltrain-stacks")
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        _announced = Process(os.getpid(), began, node, _counter.file, stacks)
    return _announced


def announced() -> Process | None:
    """This process as it announced itself; None where it did not."""
    return _announced


def tick() -> None:
    """This process has got on with its work."""
    if _counter is not None:
        _counter.add(ticks=1)


@contextlib.contextmanager
def call() -> Iterator[None]:
    """This process is at work, for as long as the block runs: one that waits for work does not hang."""
    if _counter is None:
        yield
        return
    _counter.add(calls=1)
    try:
        yield
    finally:
        _counter.add(calls=-1)


def began_of(pid: int) -> int | None:
    """When a process of this machine started; None if there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def state_of(pid: int, began: int) -> str:
    """A process's state as `/proc` has it, such as S or T; "" if it is gone, or no more than a name of one that was."""
    fields = _stat(pid)
    return "" if not fields or int(fields[19]) != began or fields[0] in "ZX" else fields[0]


def counts_of(process: Process) -> tuple[int, int]:
    """Its ticks and the calls that it has under way. Raises OSError when it is gone."""
    with open(f"/proc/{process.pid}/fd/{process.progress}", "rb") as file:
        words = file.read(2 * _WORD)
    return int.from_bytes(words[:_WORD], "little"), int.from_bytes(words[_WORD:], "little", signed=True)


def stacks_of(process: Process) -> str:
    """What it has written down of its stacks. Raises OSError when it is gone."""
    return Path(f"/proc/{process.pid}/fd/{process.stacks}").read_text("utf-8", "replace")


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` after the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []
