"""Finds and removes what killed processes leave behind: their descendants, and files in shared memory.

Imports nothing of the project, because the guard process of `workers.cluster.ray_guard` has to start in milliseconds.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

MARK = "RLTRAIN_RUN_MARK"  # environment variable that all processes of a local Ray inherit
SHARED = Path("/dev/shm")
# Names of Python's SharedMemory (vLLM's message queues) and of the buffers of vLLM's CPU workers.
PREFIXES = ("psm_", "vllm_dist_")
_ROUND_S = 0.3  # between two searches: a process that was being started shows in the second one
_LIMIT_S = 10.0


def marked(mark: str, logs: Path | None = None) -> list[psutil.Process]:
    """The live processes that were started with this mark in their environment, or write to a file in this folder.

    A process that changes its title, as Ray's do, overwrites a part of its environment, and the mark may be in there.
    """
    found, wanted = [], f"{MARK}={mark}".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            process = psutil.Process(pid)
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # psutil stops at the first gap
            if wanted in environment or (logs is not None and _writes_to(pid, logs)):
                found.append(process)
    return found


def _writes_to(pid: int, folder: Path) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith(f"{folder}/"):
                flags = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def group_of(leader: int) -> list[int]:
    """The pids of a process group; its leader may have ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def shared_files(pids: Collection[int]) -> set[Path]:
    """The files in shared memory, of the kinds that engines make, that these processes have mapped and no other has."""
    found = _mapped(pids)
    return found - _mapped(set(psutil.pids()) - set(pids)) if found else found


def _mapped(pids: Iterable[int]) -> set[Path]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            names = {line.partition(f" {SHARED}/")[2] for line in lines if f" {SHARED}/" in line}
            found |= {SHARED / name for name in names if name.startswith(PREFIXES) and not name.endswith(" (deleted)")}
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove the names of these files; processes that have them mapped keep the memory."""
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink()


def end_marked(mark: str, logs: Path | None = None, *, spare: int = 0) -> None:
    """Kill all processes that `marked` finds but this one and `spare`, and remove their files in shared memory."""
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
