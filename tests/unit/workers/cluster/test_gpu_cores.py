"""Tests of the binding of processes to the CPU cores near their GPUs, on a made-up file system."""

import os

import pytest

from workers.cluster import gpu_cores
from workers.cluster.gpu_cores import cores_near, stay_near_gpus

# The paths of the NVIDIA driver have upper-case letters, and those of the PCI bus have lower-case letters.
LISTS = {"0000:1B:00.0": "0-3,16-19", "0000:43:00.0": "0-3,16-19", "0000:89:00.0": "4-7,20", "0000:C3:00.0": "9"}


@pytest.fixture
def root(tmp_path):
    for address, cores in LISTS.items():
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cores}\n")
    return tmp_path


@pytest.fixture
def bound(monkeypatch):
    """Let this process use the cores 0 to 8, and return a list to which each binding adds its set of cores."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: found.append(cores))
    return found


def test_the_cores_near_a_gpu_are_those_that_the_pci_bus_lists(root):
    assert cores_near([0], root) == {0, 1, 2, 3, 16, 17, 18, 19}
    assert cores_near([2], root) == {4, 5, 6, 7, 20}
    assert cores_near([1, 3], root) == {0, 1, 2, 3, 9, 16, 17, 18, 19}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [("2", [{4, 5, 6, 7}]), ("1,2", [{0, 1, 2, 3, 4, 5, 6, 7}]), ("3", []), ("4", []), ("", []), ("GPU-12ab", [])],
)
def test_a_process_is_bound_to_those_near_cores_that_it_may_use(root, bound, monkeypatch, devices, expected):
    monkeypatch.setenv(gpu_cores.DEVICES, devices)
    stay_near_gpus(root)
    assert bound == expected


def test_without_a_driver_or_with_an_odd_list_a_process_stays_unbound(root, bound, monkeypatch, tmp_path):
    monkeypatch.setenv(gpu_cores.DEVICES, "0")
    stay_near_gpus(tmp_path / "empty")
    (root / "sys/bus/pci/devices/0000:1b:00.0/local_cpulist").write_text("\n")
    stay_near_gpus(root)
    assert bound == []
