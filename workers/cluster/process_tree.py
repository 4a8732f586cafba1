"""Processes that reward functions start: finding and ending them. On Linux; elsewhere none is found."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUNDS = 20


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of what is left when a process below this one ends, so that nothing leaves the tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def end_with_parent(parent: int) -> None:
    """Have this process killed when the one that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def shared_memory_mb(pid: int) -> float:
    """Shared anonymous memory that a process has touched, which no limit of its own bounds; 0 if it is gone."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:")) / 1024
    return 0.0


def has_children() -> bool:
    """Whether this process has children, ended ones that nobody waited for included; one system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(pid: int, *, spare: Collection[int] = ()) -> list[int]:
    """The processes below `pid`, parents first, without those in `spare` and what is below them."""
    found = [pid]
    for parent in found:  # which grows
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [child for child in map(int, children.read_text("utf-8").split()) if child not in spare]
    return found[1:]


def end_descendants(pid: int, *, spare: Collection[int] = ()) -> None:
    """Kill what is below `pid` and not below one of `spare`; stopped first, so that nothing is forked meanwhile.

    What was orphaned by it and adopted by this process is waited for, so that no zombie stays.
    """
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        new = [found for found in descendants(pid, spare=spare) if found not in stopped]
        if not new:
            break
        for found in new:
            _signal(found, signal.SIGSTOP)
        stopped.update(new)
    for found in stopped:
        _signal(found, signal.SIGKILL)
    for found in stopped:  # those that are no children of this process are waited for by their parents, or become ours
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found, 0)


def reap(spare: Collection[int]) -> None:
    """Wait for children that have ended, those in `spare` aside."""
    for child in descendants(os.getpid()):
        if child not in spare:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
