"""How a sandbox's watcher is started, walled in by bubblewrap or not; see `rltrain.rewards.sandbox`."""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_OWN_USER = 65534


def environment(folder: str) -> dict[str, str]:
    """Return all that the program finds in its environment; `folder` is where it may write."""
    # A fixed hash seed, so that a program that depends on the order of a set gets the same score each time. Each arena
    # of malloc, one per thread, would take 64 MB of the address space.
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    return {**fixed, "MALLOC_ARENA_MAX": "1", "HOME": folder, "TMPDIR": folder}


@functools.cache
def command(*, strong: bool) -> list[str]:
    """Return the words that start the watcher; its numbers follow them."""
    # In a virtual environment this is the interpreter that it was made from.
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # Not -I: it would ignore the hash seed as well; besides that the environment holds nothing for Python.
    options = ["-P", "-s", "-S", "-B"]
    if not strong:
        return [python, *options, str(_INSIDE)]
    bwrap = shutil.which("bwrap") or "bwrap"
    inside = "/sandbox_inside.py"
    # What belongs to root in /proc/sys is the program's to write where this user is root, without any capability.
    bound = ["--ro-bind", str(_INSIDE), inside, "--remount-ro", "/", "--remount-ro", "/proc"]
    return [bwrap, *_walls(bwrap), *_places(python), *bound, "--", python, *options, inside]


def _walls(bwrap: str) -> list[str]:
    """What separates the program from this machine: namespaces, another user's number, no capabilities."""
    spaces = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts")]
    known = subprocess.run(
        [bwrap, "--help"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    newer = [option for option in ("--disable-userns",) if option in known]  # since 0.8
    own = ["--uid", str(_OWN_USER), "--gid", str(_OWN_USER), "--cap-drop", "ALL", "--chdir", "/tmp"]
    return [*spaces, *newer, *own, "--die-with-parent", "--as-pid-1"]


def _places(python: str) -> list[str]:
    """What the program sees: the system's programs, Python without installed packages, some devices, an empty /tmp."""
    places = ["--tmpfs", "/tmp", "--proc", "/proc", "--dir", "/dev", "--symlink", "/tmp", "/dev/shm"]
    for name in ("null", "zero", "full", "random", "urandom"):
        places += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"):
        if os.path.islink(path):
            places += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            places += ["--ro-bind", path, path]
    for path in sorted({sys.base_prefix, sys.base_exec_prefix, os.path.dirname(python)}):
        if not Path(path).is_relative_to("/usr"):
            places += ["--ro-bind", path, path]
    for path in _packages():
        places += ["--tmpfs", path, "--remount-ro", path]
    return places


def _packages() -> list[str]:
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    paths = {sysconfig.get_path(name, "posix_prefix", vars=base) for name in ("purelib", "platlib")}
    for folder in ("/usr/lib", "/usr/local/lib"):
        paths |= {str(path) for path in Path(folder).glob("python3*/*-packages")}
    return sorted(path for path in paths if os.path.isdir(path))


def counts_processes_per_namespace() -> bool:
    """Whether RLIMIT_NPROC counts the sandbox's processes and not all of this user's: since Linux 5.14."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and tuple(map(int, version.groups())) >= (5, 14)
