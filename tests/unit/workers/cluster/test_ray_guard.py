"""Tests of the guard, a process that outlives the driver.

The guard ends the driver's remaining processes, and reports the deaths of Ray daemons that Ray does not report.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from workers.cluster.progress import began_of, state_of

# Program of a driver that starts a guard, a process with the driver's mark, and a process without the mark.
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from workers.cluster.ray_daemons import RAYLET, LocalDaemon
from workers.cluster.progress import began_of
from workers.cluster.ray_guard import RayGuard
def sleeper():
    return subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
guard = RayGuard("a mark of this test" + sys.argv[1])
with guard.marking():
    marked = sleeper()
other = sleeper()
raylet = sleeper()
guard.tell(Path(sys.argv[1]), [LocalDaemon(RAYLET, "10.0.0.7", raylet.pid, began_of(raylet.pid))])
print(marked.pid, other.pid, raylet.pid, flush=True)
sys.stdin.readline()
guard.close()
"""


class Run:
    """The driver of a run, and the processes that the driver started."""

    def __init__(self, session):
        (session / "sockets").mkdir()
        (session / "sockets" / "raylet").touch()
        (session / "logs").mkdir()
        self.session = session
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(session)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.marked, self.other, self.raylet = map(int, self.driver.stdout.readline().split())

    def log(self, words):
        name = f"python-core-driver-01ff_{self.driver.pid}.log"
        (self.session / "logs" / name).write_text(f"[2026-01-01 00:00:00,000 I 1 1] x.cc:1: started\n{words}\n")

    def said(self):
        """Return the standard error output of the driver and the guard, after both processes have closed the stream."""
        return self.driver.communicate(timeout=60)[1]


@pytest.fixture
def run(tmp_path):
    started = Run(tmp_path)
    yield started
    started.driver.kill()
    started.driver.communicate()
    for pid in (started.marked, started.other, started.raylet):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def alive(pid):
    return bool(state_of(pid, began_of(pid) or 0))


def gone(pid):
    """Return whether a process ends within 20 s.

    The function polls, because a process that has ended may stay visible until init reaps the process.
    """
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def test_what_bears_the_mark_of_a_killed_driver_is_ended_and_nothing_is_said(run):
    run.driver.kill()
    assert run.said() == ""
    assert gone(run.marked)
    assert alive(run.other)
    assert list((run.session / "sockets").iterdir()) == []


def test_a_driver_that_says_goodbye_has_nothing_left_when_the_guard_has_ended(run):
    run.driver.stdin.write("\n")
    assert run.said() == ""
    assert run.driver.returncode == 0
    assert gone(run.marked)


def test_the_daemon_whose_death_made_ray_end_the_driver_is_named(run):
    run.log(
        "[2026-01-01 00:00:00,000 W 1 1] connection.cc:216: The plasma store is gone. Terminate the process. Status: x"
    )
    os.kill(run.raylet, signal.SIGKILL)
    run.driver.kill()
    assert run.said() == (
        f"error: Ray's raylet on node 10.0.0.7 (pid {run.raylet}) is gone (killed, crashed or out of memory): start "
        "the run again with trainer.resume=auto\n"
    )


def test_where_ray_ended_the_driver_for_another_reason_its_own_words_are_passed_on(run):
    run.log("[2026-01-01 00:00:00,000 E 1 1] rpc.h:2: Something is amiss. The program will terminate.")
    run.driver.kill()
    assert run.said() == (
        "error: Ray ended the run: rpc.h:2: Something is amiss. The program will terminate.: start the run again with "
        "trainer.resume=auto\n"
    )
