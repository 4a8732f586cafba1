"""The number of CPU cores that this process may use, and OpenMP settings for processes that share cores.

`cpu_cores` takes into account the CPU quotas of control groups (cgroups), which `psutil.cpu_count` and
`os.process_cpu_count` ignore.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Names of the files that hold the CPU quota and the quota's period, first for cgroup v2 and then for cgroup v1.
_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    Under a cpuset (Slurm, `docker --cpuset-cpus`) or a CPU quota (`docker --cpus`, a Kubernetes limit), a process may
    use fewer cores than the machine has. A CPU quota that is not a whole number of cores is rounded up.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas())]))


def openmp_settings(threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that set the number of OpenMP threads and the way in which idle OpenMP threads
    wait.

    The OpenMP variables must be set before the process imports torch. OpenMP reads its environment variables when the
    OpenMP library is loaded. By default, an idle OpenMP thread spins for milliseconds before it sleeps. If processes
    share cores, a spinning thread occupies the core that another process is waiting for, and both processes slow down
    by an order of magnitude. The wait policy `PASSIVE` makes idle OpenMP threads sleep at once. The OpenMP runtimes of
    GNU, LLVM and Intel all read OMP_NUM_THREADS and OMP_WAIT_POLICY.

    Args:
        threads: number of OpenMP threads of the process. If `threads` is None, the process gets OMP_NUM_THREADS threads
            or, if OMP_NUM_THREADS is not set, one thread for each core that the process may use.
    """
    return {
        "OMP_NUM_THREADS": str(threads or os.environ.get("OMP_NUM_THREADS") or cpu_cores()),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def _quotas() -> Iterator[float]:
    """Yield every CPU quota, in cores, that is set for one of this process's control groups or for a parent group."""
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text("utf-8", "replace").splitlines():
            # In /proc/self/cgroup, the line of cgroup v2 has an empty list of controllers.
            _, controllers, path = line.split(":", 2)
            mount = _MOUNT / "cpu" if controllers else _MOUNT
            if controllers and "cpu" not in controllers.split(","):
                continue
            # If a container mounts its own control group as the root of /sys/fs/cgroup, the folder `group` does not
            # exist, and the CPU quota is in a parent folder of `group`.
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    for names in _QUOTAS:
        # A missing file (OSError) or the value "max" (ValueError) means that there is no CPU quota in `folder`.
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int(part) for name in names for part in (folder / name).read_text("utf-8").split())
            if quota > 0 and period > 0:
                yield quota / period
