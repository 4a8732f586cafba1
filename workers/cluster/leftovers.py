"""Finding and removing what killed processes leave behind: their descendants, and files in shared memory.

This module imports no other module of the project, because the guard process of `workers.cluster.ray_guard`, which uses
this module, must start in milliseconds.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

MARK = "RLTRAIN_RUN_MARK"  # environment variable that all processes of a local Ray cluster inherit
SHARED = Path("/dev/shm")
# File name prefixes of Python's SharedMemory (vLLM's message queues) and of the buffers of vLLM's CPU workers.
PREFIXES = ("psm_", "vllm_dist_")
_ROUND_S = 0.3  # seconds between two searches; the second search finds processes that started during the first
_LIMIT_S = 10.0


def marked(mark: str, logs: Path | None = None) -> list[psutil.Process]:
    """Return the live processes that have `mark` in their environment or write to a file in the folder `logs`.

    A process that changes its title, as Ray's processes do, overwrites part of its environment, which may contain the
    mark. The folder `logs`, into which Ray's processes write, identifies such a process nevertheless.
    """
    found, wanted = [], f"{MARK}={mark}".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            process = psutil.Process(pid)
            # The file is read directly, because psutil stops reading at the first gap in the environment.
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if wanted in environment or (logs is not None and _writes_to(process, logs)):
                found.append(process)
    return found


def _writes_to(process: psutil.Process, folder: Path) -> bool:
    return any(file.mode != "r" and file.path.startswith(f"{folder}/") for file in process.open_files())


def group_of(leader: int) -> list[int]:
    """Return the pids of the processes in a process group, whose leader may have ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def shared_files(pids: Collection[int]) -> set[Path]:
    """Return the engines' files in shared memory that the given processes, and no other processes, have mapped."""
    found = _mapped(pids)
    return found - _mapped(set(psutil.pids()) - set(pids)) if found else found


def _mapped(pids: Iterable[int]) -> set[Path]:
    # psutil's `memory_maps` takes 0.5 s for 94 processes, because it counts the pages of each mapping. The loop below
    # takes 0.02 s.
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            names = {line.partition(f" {SHARED}/")[2] for line in lines if f" {SHARED}/" in line}
            found |= {SHARED / name for name in names if name.startswith(PREFIXES) and not name.endswith(" (deleted)")}
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove files. Processes that have mapped a removed file keep its memory."""
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink()


def end_marked(mark: str, logs: Path | None = None, *, spare: int = 0) -> None:
    """Kill all processes that `marked` finds, except this process and `spare`, and remove their shared-memory files."""
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
