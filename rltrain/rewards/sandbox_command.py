"""Build the command line of the watcher, the process that supervises a sandbox; see `rltrain.rewards.sandbox`.

If the sandbox is isolated, the watcher runs inside bubblewrap; otherwise, the watcher runs without bubblewrap.
"""

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
    """Return all environment variables of the sandboxed program, whose home and temporary directory is `folder`."""
    # The hash seed is fixed so that a program that depends on the order of a set gets the same score each time. The C
    # function malloc is limited to one arena, because otherwise each thread would have its own arena of 64 MB of
    # address space.
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    return {**fixed, "MALLOC_ARENA_MAX": "1", "HOME": folder, "TMPDIR": folder}


@functools.cache
def command(*, strong: bool) -> list[str]:
    """Return the command line that starts the watcher; the caller appends the watcher's numeric settings."""
    # In a virtual environment, `_base_executable` is the interpreter that created the environment.
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # Python's option `-I` is not used, because Python would then ignore PYTHONHASHSEED. Python's option `-I` is not
    # needed, because the function `environment` sets only two environment variables of Python, PYTHONHASHSEED and
    # PYTHONUTF8.
    options = ["-P", "-s", "-S", "-B"]
    if not strong:
        return [python, *options, str(_INSIDE)]
    bwrap = shutil.which("bwrap") or "bwrap"
    inside = "/sandbox_inside.py"
    # If the current user is root, the sandboxed program could write to root's files in /proc/sys even without
    # capabilities. To prevent writes to /proc/sys, /proc is remounted read-only.
    bound = ["--ro-bind", str(_INSIDE), inside, "--remount-ro", "/", "--remount-ro", "/proc"]
    return [bwrap, *_walls(bwrap), *_places(python), *bound, "--", python, *options, inside]


def _walls(bwrap: str) -> list[str]:
    """Return the bwrap options that isolate the program: namespaces, a different user id and no capabilities."""
    spaces = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts")]
    known = subprocess.run(
        [bwrap, "--help"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    # bubblewrap has had the option --disable-userns since version 0.8.
    newer = [option for option in ("--disable-userns",) if option in known]
    own = ["--uid", str(_OWN_USER), "--gid", str(_OWN_USER), "--cap-drop", "ALL", "--chdir", "/tmp"]
    return [*spaces, *newer, *own, "--die-with-parent", "--as-pid-1"]


def _places(python: str) -> list[str]:
    """Return the bwrap options for the program's file system.

    The sandboxed program sees the executables of the system, Python without installed packages, a few devices and an
    empty /tmp.
    """
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
    """Return whether RLIMIT_NPROC counts only the processes in the sandbox, which requires Linux 5.14 or later.

    Before Linux 5.14, RLIMIT_NPROC counts all processes of the user, even outside the sandbox.
    """
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and tuple(map(int, version.groups())) >= (5, 14)
