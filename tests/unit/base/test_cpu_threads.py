"""Tests that a process counts the CPU cores that it may use, and not all cores of the machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.base import cpu_threads

ROOT = Path(__file__).parents[3]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulate a machine with 64 cores and no limits.

    A test may write control-group limits into the folder that the fixture returns.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cpu_threads, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cpu_threads, "_MOUNT", tmp_path / "mount")
    return tmp_path


def write(machine, groups, **files):
    (machine / "groups").write_text(groups)
    for path, text in files.items():
        file = machine / "mount" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_without_limits_they_are_all(machine):
    assert cpu_threads.cpu_cores() == 64  # The simulated system has no control groups.
    write(machine, "0::/\n", **{"cpu.max": "max 100000\n"})
    assert cpu_threads.cpu_cores() == 64
    write(machine, "4:cpu,cpuacct:/\n", **{"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"})
    assert cpu_threads.cpu_cores() == 64


def test_a_cpuset_is_what_the_affinity_mask_says(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 17, 18, 40} if pid == 0 else set())
    assert cpu_threads.cpu_cores() == 4
    write(machine, "0::/\n", **{"cpu.max": "800000 100000\n"})
    assert cpu_threads.cpu_cores() == 4


@pytest.mark.parametrize(("quota", "expected"), [(400_000, 4), (150_000, 2), (1_000, 1), (90_000_000, 64)])
def test_a_quota_is_rounded_up(machine, quota, expected):
    write(machine, "0::/\n", **{"cpu.max": f"{quota} 100000\n"})
    assert cpu_threads.cpu_cores() == expected
    (machine / "mount" / "cpu.max").unlink()
    v1 = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    write(machine, "9:name=systemd:/\n4:cpu,cpuacct:/\n0::/\n", **v1)
    assert cpu_threads.cpu_cores() == expected


def test_the_smallest_quota_of_a_group_and_its_parents_counts(machine):
    write(machine, "0::/slurm/job_7/step_0\n", **{
        "slurm/cpu.max": "1600000 100000", "slurm/job_7/cpu.max": "300000 100000",
        "slurm/job_7/step_0/cpu.max": "max 100000", "slurm/job_8/cpu.max": "100000 100000",
    })  # fmt: skip
    assert cpu_threads.cpu_cores() == 3


def test_in_a_container_the_mount_is_its_own_group(machine):
    write(machine, "4:cpu,cpuacct:/docker/0af3\n3:cpuset:/docker/0af3\n", **{
        "cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert cpu_threads.cpu_cores() == 2


def test_a_quota_of_another_controller_is_none_of_the_cores(machine):
    write(machine, "3:cpuset:/a\n", **{"a/cpu.max": "100000 100000", "cpu/a/cpu.cfs_quota_us": "100000"})
    assert cpu_threads.cpu_cores() == 64


def test_openmp_has_the_threads_asked_for_then_those_of_the_environment_and_then_the_cores(machine, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu_threads.openmp_settings()["OMP_NUM_THREADS"] == "64"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert cpu_threads.openmp_settings()["OMP_NUM_THREADS"] == "5"
    assert cpu_threads.openmp_settings(7)["OMP_NUM_THREADS"] == "7"


def test_idle_threads_sleep_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert cpu_threads.openmp_settings()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert cpu_threads.openmp_settings()["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        (["placement=inprocess", "rollout=hf", "placement.threads_per_worker=3"], "'3'"),
        # The driver keeps its own thread count of 5, because the setting applies only to the workers.
        (["placement.threads_per_worker=3"], "'5'"),
    ],
)
def test_the_program_s_openmp_runtime_has_read_them_when_torch_is_loaded(overrides, threads):
    environment = os.environ | {"OMP_NUM_THREADS": "5", "OMP_DISPLAY_ENV": "true", "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_WAIT_POLICY", None)
    command = [
        sys.executable,
        "-m",
        "rltrain.main",
        *overrides,
        "--cfg",
    ]  # Importing `rltrain.main` also imports torch.
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    read = dict(re.findall(r"(OMP_NUM_THREADS|OMP_WAIT_POLICY) = (\S+)", done.stderr))
    assert read == {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "'PASSIVE'"}
