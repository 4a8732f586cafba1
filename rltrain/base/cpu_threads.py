"""How many CPU cores this process may use, and the OpenMP settings of processes that share them."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of version 2 and 1: quota and period


def cpu_cores() -> int:
    """The CPU cores that this process may use, at least 1.

    Fewer than the machine has under a cpuset (Slurm, `docker --cpuset-cpus`) or a quota (`docker --cpus`, a limit of
    Kubernetes), which is rounded up.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas())]))


def openmp_settings(threads: int | None = None) -> dict[str, str]:
    """Environment variables that a process must have before it imports torch: OpenMP reads them when it is loaded.

    By default an idle OpenMP thread spins for milliseconds before it sleeps. Where processes share cores, it then keeps
    another process's thread from the very core that its own process is waiting for, and both slow down by an order of
    magnitude. `PASSIVE` makes idle threads sleep at once. GNU's, LLVM's and Intel's runtimes all read these variables.

    Args:
        threads: of this process; None: a number in the environment, or else the cores that it may use.
    """
    return {
        "OMP_NUM_THREADS": str(threads or os.environ.get("OMP_NUM_THREADS") or cpu_cores()),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def _quotas() -> Iterator[float]:
    """The cores' worth of time that the control groups of this process grant, its parents' too, where they limit it."""
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text("utf-8", "replace").splitlines():
            _, controllers, path = line.split(":", 2)  # version 2 names no controllers
            mount = _MOUNT / "cpu" if controllers else _MOUNT
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = mount / path.lstrip("/")  # not there where a container's own group is the mount
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    for names in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or its quota is "max"
            quota, period = (int(part) for name in names for part in (folder / name).read_text("utf-8").split())
            if quota > 0 and period > 0:
                yield quota / period
