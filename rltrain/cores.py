"""How many CPU cores this process may use: those of its affinity mask and its control groups, not of the machine."""

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


def _quotas() -> Iterator[float]:
    """The cores' worth of time that the control groups of this process grant, its parents' too, where they limit it."""
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text().splitlines():
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
            quota, period = (int(part) for name in names for part in (folder / name).read_text().split())
            if quota > 0 and period > 0:
                yield quota / period
