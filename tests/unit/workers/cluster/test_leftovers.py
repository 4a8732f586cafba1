"""Tests that processes and files that a killed run leaves behind are removed, but not those of other programs."""

import os
import secrets
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import psutil
import pytest

from workers.cluster import leftovers
from workers.cluster.leftovers import MARK
from workers.cluster.progress import began_of, state_of

# Program that starts a child process, and then sets a process title that overwrites its own environment.
FAMILY = """
import subprocess, sys, time
from setproctitle import setproctitle
log = open(sys.argv[1], "w")
child = subprocess.Popen(["sleep", "1000"])
setproctitle("another title " * 1000)
print(child.pid, flush=True)
time.sleep(1000)
"""
HOLDER = """
import mmap, os, sys, time
for path in sys.argv[1:]:
    mapped = mmap.mmap(os.open(path, os.O_RDWR), 0)
    globals()[path] = mapped
print("mapped", flush=True)
time.sleep(1000)
"""
LOCKER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def started():
    """Return a function that starts a program and waits for its first line of output.

    All started programs are ended after the test.
    """
    processes = []

    def start(code, *arguments, **environment):
        command = [sys.executable, "-c", code, *arguments]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        with process:
            below = psutil.Process(process.pid).children() if process.poll() is None else []
            for one in (process, *below):
                one.kill()


@pytest.fixture
def shared():
    """Return a function that creates files in shared memory."""
    made = []

    def make(name):
        path = leftovers.SHARED / f"{name}{secrets.token_hex(4)}"
        path.write_bytes(bytes(4096))
        made.append(path)
        return path

    yield make
    leftovers.remove(made)


def test_all_processes_of_a_run_are_ended_and_no_others(started, tmp_path):
    mark, logs = secrets.token_hex(8), tmp_path / "logs"
    logs.mkdir()
    first, child = started(FAMILY, str(logs / "log.txt"), **{MARK: mark})
    other, _ = started(FAMILY, str(tmp_path / "log.txt"), **{MARK: "of another run"})
    with (logs / "log.txt").open():  # the test keeps the log open, like a user who reads the log
        assert {process.pid for process in leftovers.marked(mark, logs)} == {first.pid, int(child)}
    leftovers.end_marked(mark, logs)
    assert first.poll() is not None
    assert state_of(int(child), began_of(int(child)) or 0) == ""
    assert other.poll() is None


def test_files_in_shared_memory_go_with_the_processes_that_made_them(started, shared):
    mark = secrets.token_hex(8)
    own, buffer, used, data = shared("psm_"), shared("vllm_dist_a-tp:0-[0-1]-cpushm_"), shared("psm_"), shared("data-")
    started(HOLDER, *map(str, (own, buffer, used, data)), **{MARK: mark})
    started(HOLDER, str(used))  # the started process belongs to another run
    leftovers.end_marked(mark)
    assert [path.exists() for path in (own, buffer, used, data)] == [False, False, True, True]


def test_pythons_shared_memory_has_the_name_that_is_looked_for():
    memory = SharedMemory(create=True, size=100)
    try:
        assert leftovers.SHARED / memory.name in leftovers.shared_files([os.getpid()])
    finally:
        memory.close()
        memory.unlink()
    assert leftovers.shared_files([os.getpid()]) == set()


def test_weight_files_of_killed_processes_are_removed_and_those_in_use_are_kept(started, shared):
    abandoned, used, empty = shared("rltrain-weights-"), shared("rltrain-weights-"), shared("rltrain-weights-")
    empty.write_bytes(b"")  # the file is empty, as if its creator had not locked it yet
    started(LOCKER, str(used))
    leftovers.end_marked(secrets.token_hex(8))
    assert [path.exists() for path in (abandoned, used, empty)] == [False, True, True]
