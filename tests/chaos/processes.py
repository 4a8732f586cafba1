"""Find the processes of a run from outside the run, and what the run leaves behind when it has ended."""

import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.strikes import DAEMONS

GUARD = "ray::Guard"
SHARED, SESSIONS = Path("/dev/shm"), Path("/tmp/ray")


def victim(role: str, output_dir: Path) -> int:
    """Return the pid of the first process of a role, or 0 if the role has no process.

    The function `victim` must be called in the driver's process.
    """
    if role == "driver":
        return os.getpid()
    if role in DAEMONS:
        return next((pid for pid in below(os.getpid()) if Path(command(pid).split(" ")[0]).name == role), 0)
    table = named_processes(output_dir)
    if role == "reward":
        raylets = {parent(process["pid"]) for process in table.values()}
        guards = [pid for raylet in raylets for pid in below(raylet) if command(pid).startswith(GUARD)]
        return min(guards, default=0)
    # The name of a teacher's process contains the teacher's name, between the role and the number of the rank.
    ends = ("replica 0", "worker 0", "rank 0")
    names = [name for name in table if name.startswith(f"{role} ") and name.endswith(ends)]
    return next((table[name]["pid"] for name in (*names, "training rank 0") if name in table), 0)


def named_processes(output_dir: Path) -> dict[str, dict[str, Any]]:
    """Read a run's table of named processes, or return {} if no process has been named yet."""
    path = output_dir / "processes.json"
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return table


def left_behind(driver: int, before: Collection[int], files: Collection[Path], *, within_s: float) -> list[str]:
    """Return what remains of a run after its driver has ended: processes, files in shared memory, and Ray's sockets.

    Args:
        driver: Pid of the run's driver.
        before: Child processes that existed before the run. Orphans of the run become children of the calling process.
        files: Files that were in shared memory before the run.
        within_s: Seconds to wait for processes and files to disappear.
    """
    deadline = time.monotonic() + within_s
    while True:
        processes = [pid for pid in below(os.getpid()) if pid not in before and state(pid)]
        shared = set(SHARED.iterdir()) - set(files)
        found = [f"process {pid} ({command(pid)[:60]})" for pid in processes]
        found += [str(path) for path in sorted(shared) if path not in mapped()]
        found += [str(path) for path in SESSIONS.glob(f"session_*_{driver}/sockets/*")]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def mapped() -> set[Path]:
    """Return the shared-memory files that any process on the machine has mapped, including processes of other runs."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = path.read_text().splitlines()
        except OSError:  # The process has ended.
            continue
        found |= {SHARED / line.partition(f"{SHARED}/")[2] for line in lines if f"{SHARED}/" in line}
    return found


def below(root: int) -> list[int]:
    """Return the pids of all descendants of a process, oldest first."""
    try:
        return sorted(process.pid for process in psutil.Process(root).children(recursive=True))
    except psutil.Error:
        return []


def parent(pid: int) -> int:
    """Return the pid of a process's parent, or 0 if the process has ended."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.Error:
        return 0


def state(pid: int) -> str:
    """Return the state of a process, such as "sleeping", or "" if the process has ended or is a zombie."""
    try:
        found = str(psutil.Process(pid).status())
    except psutil.Error:
        return ""
    return "" if found == psutil.STATUS_ZOMBIE else found


def command(pid: int) -> str:
    """Return the command line of a process."""
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return ""
