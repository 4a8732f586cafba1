"""The processes of a run, found from outside."""

import json
import os
from pathlib import Path

GUARD = "ray::GuardedWorker"


def victim(role: str, output_dir: Path) -> int:
    """The pid of a role's process (of its first, where there are several); 0 where there is none."""
    if role == "driver":
        return os.getpid()
    if role == "reward":
        return next((pid for pid in below(ray_session_of(output_dir)) if command(pid).startswith(GUARD)), 0)
    table = json.loads((output_dir / "processes.json").read_text())
    names = [f"{role} replica 0", f"{role} rank 0", "training rank 0"]
    return next(table[name]["pid"] for name in names if name in table)


def ray_session_of(output_dir: Path) -> int:
    """The raylet above a run's processes: the parent of any of them."""
    table = json.loads((output_dir / "processes.json").read_text())
    return parent(next(iter(table.values()))["pid"])


def below(root: int) -> list[int]:
    """All processes below one, oldest first."""
    parents = {int(entry.name): parent(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    members = {root}
    while grown := {pid for pid, above in parents.items() if above in members} - members:
        members |= grown
    return sorted(members - {root})


def parent(pid: int) -> int:
    """Its parent; 0 where it has ended."""
    words = _stat(pid)
    return int(words[1]) if words else 0


def state(pid: int) -> str:
    """Its state, "" where it has ended or is a zombie."""
    words = _stat(pid)
    return words[0] if words and words[0] != "Z" else ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def command(pid: int) -> str:
    """Its command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
