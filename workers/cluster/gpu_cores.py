"""Binding of a process to the CPU cores near its GPUs, so that copies to a GPU stay in one part of the machine."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

DEVICES = "CUDA_VISIBLE_DEVICES"  # Ray sets this variable to the indices of the GPUs that a process may use.


def stay_near_gpus(root: Path = Path("/")) -> None:
    """Bind this process to the CPU cores near the GPUs that `CUDA_VISIBLE_DEVICES` lists.

    Nothing happens without GPUs, if the system does not say which cores are near, or if this process may use none of
    them.

    Args:
        root: Root of the file systems proc and sys.
    """
    listed = os.environ.get(DEVICES, "").split(",")
    if not all(one.isdecimal() for one in listed):
        return  # A GPU can also be listed by its identifier, which the file system proc does not have in its paths.
    # Near cores are only faster, so that an unreadable file is no reason to stop.
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
