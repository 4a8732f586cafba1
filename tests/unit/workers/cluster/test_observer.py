"""Tests of observing the state of real processes from another process."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from workers.cluster import progress
from workers.cluster.observer import Observer, Sight, innermost
from workers.cluster.progress import Process

CHILD = """
import subprocess, sys, time
from workers.cluster import progress
announced = progress.announce("here")
def work():
    print(*vars(announced).values(), flush=True)
    while True:
        line = sys.stdin.readline()
        if line.startswith("start"):
            subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session="session" in line)
        if line:
            progress.tick()
with progress.call():
    work()
"""


@pytest.fixture
def child():
    """Start a process that increments its progress counter for each line that it reads from standard input."""
    running = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    pid, began, node, host, counter, stacks = running.stdout.readline().split()
    running.announced = Process(int(pid), int(began), node, host, int(counter), int(stacks))
    with running:
        yield running
        running.kill()


def seen_as(process: Process, wanted: Sight) -> bool:
    deadline = time.monotonic() + 20
    while (found := Observer().look([process])[0]) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found == wanted


def test_ticks_calls_and_states_of_a_process_are_seen_from_outside(child):
    assert seen_as(child.announced, Sight("S", ticks=0, calls=1))
    child.stdin.write("\n")
    assert seen_as(child.announced, Sight("S", ticks=1, calls=1))
    os.kill(child.pid, signal.SIGSTOP)
    assert seen_as(child.announced, Sight("T", ticks=1, calls=1))
    Observer().kill([child.announced])  # the observer can kill a process that is stopped by SIGSTOP
    assert seen_as(child.announced, Sight(""))


def test_a_later_process_with_the_same_number_is_not_taken_for_it(child):
    other = Process(child.pid, child.announced.began - 1, "here", "one", 0, 0)
    assert Observer().look([other]) == [Sight("")]
    Observer().kill([other])
    assert seen_as(child.announced, Sight("S", ticks=0, calls=1))


@pytest.mark.parametrize("line", ["start", "start in a session of its own"])
def test_what_a_process_started_ends_with_it_also_where_it_is_gone_already(child, line):
    child.stdin.write(f"{line}\n")
    assert seen_as(child.announced, Sight("S", ticks=1, calls=1))
    (started,) = psutil.Process(child.pid).children()
    child.kill()
    child.wait()
    assert seen_as(child.announced, Sight(""))
    assert started.is_running()
    Observer().kill([child.announced])
    assert psutil.wait_procs([started], timeout=10) == ([started], [])


def test_a_process_writes_its_stacks_down_when_it_is_asked(child):
    (text,) = Observer().stacks([child.announced])
    assert "in work" in text
    assert innermost(text).startswith("work (<string>:")
    os.kill(child.pid, signal.SIGSTOP)
    # a stopped process cannot write stack traces, so the observer returns the stack traces that were written before
    assert Observer().stacks([child.announced]) == [text]


def test_without_an_announcement_ticks_cost_nothing_and_mean_nothing():
    assert progress._announced is None
    progress.tick()
    with progress.call():
        pass


STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/a/workers/rollout/worker.py", line 90 in poll

Current thread 0x00007e (most recent call first):
  File "/a/torch/_ops.py", line 1 in all_reduce
  File "/a/workers/training/actor.py", line 80 in update
  File "/a/workers/cluster/worker_process.py", line 44 in call
  File "/a/ray/worker.py", line 9 in main
"""


def test_the_frames_shown_are_those_of_the_thread_that_works():
    assert innermost(STACKS) == "all_reduce (_ops.py:1) < update (actor.py:80) < call (worker_process.py:44)"
    assert innermost("") == ""
