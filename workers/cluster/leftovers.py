"""Functions that find and remove leftovers of killed processes: descendants, and files in shared memory.

This module imports no other module of the project, because the guard process (`workers.cluster.ray_guard`) imports this
module and must start in milliseconds.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

MARK = "RLTRAIN_RUN_MARK"  # name of an environment variable that all processes of a local Ray cluster inherit
# Name of an environment variable that the descendants of a worker process inherit. Its value identifies the process.
PARENT = "RLTRAIN_PARENT"
SHARED = Path("/dev/shm")
# Prefixes of the names of vLLM's shared-memory files. vLLM's message queues are objects of Python's class SharedMemory,
# whose file names begin with "psm_". The file names of the buffers of vLLM's CPU workers begin with "vllm_dist_".
PREFIXES = ("psm_", "vllm_dist_")
WEIGHTS_PREFIX = "rltrain-weights-"  # Prefix of the names of files through which processes exchange weights.
# Seconds that `end_marked` waits, at most, before it searches again for processes to kill. `end_marked` repeats its
# search for processes, because processes can start during or after an earlier search.
_ROUND_S = 0.3
_LIMIT_S = 10.0


def marked(mark: str, logs: Path | None = None) -> list[psutil.Process]:
    """Return the live processes that have the mark `mark`, or that write to a file in the folder `logs`.

    A process has the mark `mark` if its environment variable `RLTRAIN_RUN_MARK` (the constant `MARK`) has the value
    `mark`.

    Ray's processes change their process titles. A process that changes its title overwrites part of its environment in
    memory, possibly including the variable `RLTRAIN_RUN_MARK`. If a Ray process has overwritten `RLTRAIN_RUN_MARK`,
    `marked` recognizes the process by its open log files in the folder `logs`.
    """
    found, wanted = [], f"{MARK}={mark}".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            process = psutil.Process(pid)
            # `/proc/PID/environ` is read directly, because psutil ignores all environment variables after an empty
            # entry.
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if wanted in environment or (logs is not None and _writes_to(process, logs)):
                found.append(process)
    return found


def _writes_to(process: psutil.Process, folder: Path) -> bool:
    return any(file.mode != "r" and file.path.startswith(f"{folder}/") for file in process.open_files())


def parent_mark(pid: int, began: int) -> str:
    """Return the value of the environment variable `PARENT` in the descendants of a process.

    Args:
        pid: Process id of the process.
        began: Start time of the process in clock ticks since the machine's boot.
    """
    return f"{pid}:{began}"


def started_by(mark: str) -> list[int]:
    """Return the pids of the processes that inherited the value `mark` of the environment variable `PARENT`.

    `started_by` also finds processes that have moved to a session of their own and whose parent has ended. It does not
    find processes that were started with another environment.
    """
    wanted, found = f"{PARENT}={mark}".encode(), []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def group_of(leader: int) -> list[int]:
    """Return the pids of the processes in the process group `leader`, even if the leader of the group has ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def shared_files(pids: Collection[int]) -> set[Path]:
    """Return the engines' shared-memory files that the given processes, and no other processes, have mapped."""
    found = _mapped(pids)
    return found - _mapped(set(psutil.pids()) - set(pids)) if found else found


def _mapped(pids: Iterable[int]) -> set[Path]:
    # psutil's `memory_maps` takes 0.5 s for 94 processes, because it counts the pages of each mapping.
    # The loop in `_mapped` takes 0.02 s to find the files that 94 processes have mapped.
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            names = {line.partition(f" {SHARED}/")[2] for line in lines if f" {SHARED}/" in line}
            found |= {SHARED / name for name in names if name.startswith(PREFIXES) and not name.endswith(" (deleted)")}
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove files.

    The memory of a removed file is freed only when no process has the file mapped any more.
    """
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_unlocked(files: Iterable[Path]) -> None:
    """Remove each of the given files that belongs to this user, is not empty, and is not locked by any process.

    An empty file is kept, because the process that has just created the file may not have locked the file yet.
    """
    for path in files:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and os.fstat(descriptor).st_size:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


def end_marked(mark: str, logs: Path | None = None, *, spare: int = 0) -> None:
    """Kill the processes that `marked` finds, and remove their shared-memory files.

    The current process and the process whose pid is `spare` are not killed. `end_marked` also removes every
    shared-memory file of weights that no process has locked, even if another run created the file.
    """
    deadline, files, quiet = time.monotonic() + _LIMIT_S, set[Path](), 0
    while quiet < 2 and time.monotonic() < deadline:
        processes = [process for process in marked(mark, logs) if process.pid not in (spare, os.getpid())]
        quiet = 0 if processes else quiet + 1
        files |= shared_files([process.pid for process in processes])
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=_ROUND_S)
        if not processes:
            time.sleep(_ROUND_S)
    remove(files)
    remove_unlocked(SHARED.glob(f"{WEIGHTS_PREFIX}*"))
