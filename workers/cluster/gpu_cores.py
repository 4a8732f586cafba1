"""Binding of a process to the CPU cores in the NUMA node of its GPUs, so that copies to a GPU stay in this node."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

DEVICES = "CUDA_VISIBLE_DEVICES"  # Ray sets this variable to the indices of the GPUs that a process may use.


def stay_near_gpus(root: Path = Path("/")) -> None:
    """Bind this process to the CPU cores near the GPUs that `CUDA_VISIBLE_DEVICES` lists.

    The process stays unbound if it has no GPUs, if the system does not say which cores are near, or if the process may
    use none of the near cores.

    Args:
        root: Root of the file systems proc and sys.
    """
    listed = os.environ.get(DEVICES, "").split(",")
    if not all(one.isdecimal() for one in listed):
        return  # There are no GPUs, or they are listed by identifiers, which the paths of the driver do not contain.
    # The binding only saves time, so errors are ignored.
    with contextlib.suppress(OSError, ValueError):
        near = cores_near(map(int, listed), root) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)


def cores_near(gpus: Iterable[int], root: Path) -> set[int]:
    """Return the CPU cores near some GPUs, which are numbered in the order of their addresses on the PCI bus.

    Raises OSError or ValueError if the system does not say which cores are near a GPU.
    """
    addresses = sorted(one.name.lower() for one in (root / "proc/driver/nvidia/gpus").iterdir())
    found: set[int] = set()
    for gpu in gpus:
        if gpu >= len(addresses):
            raise ValueError(f"the NVIDIA driver lists no GPU with the index {gpu}")
        listed = (root / "sys/bus/pci/devices" / addresses[gpu] / "local_cpulist").read_text("utf-8").strip()
        for part in listed.split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
