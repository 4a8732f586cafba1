"""Tests that `Exits` notices at once that a process on the same machine has ended."""

import asyncio
import os
import subprocess
import time

import pytest

from tests.fake_replicas import settled
from workers.cluster.exits import Exits

FOREVER_S = 1000.0


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
async def exits():
    made = Exits()
    yield made
    made.close()


def ended(pid):
    """Wait until a process has ended, without reaping the process."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_wait_ends_with_the_first_process_that_ends(exits, sleeper):
    exits.add(sleeper.pid)
    exits.add(os.getppid())
    waiting = asyncio.ensure_future(exits.wait(FOREVER_S))
    await settled()
    assert not waiting.done()
    sleeper.kill()
    await asyncio.wait_for(waiting, 30)


async def test_each_end_wakes_once(exits, sleeper):
    exits.add(sleeper.pid)
    sleeper.kill()
    await asyncio.wait_for(exits.wait(FOREVER_S), 30)
    waiting = asyncio.ensure_future(exits.wait(FOREVER_S))
    for _ in range(10):
        await asyncio.sleep(0)  # the event loop polls the operating system in each iteration
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("collected", [False, True])
async def test_one_that_has_ended_before_it_is_added_wakes_the_next_wait(exits, sleeper, collected):
    sleeper.kill()
    sleeper.wait() if collected else ended(sleeper.pid)
    exits.add(sleeper.pid)
    await asyncio.wait_for(exits.wait(FOREVER_S), 30)


async def test_a_wait_ends_when_it_is_told_to_also_before_it_has_begun(exits):
    exits.notify()
    await asyncio.wait_for(exits.wait(FOREVER_S), 30)
    waiting = asyncio.ensure_future(exits.wait(FOREVER_S))
    await settled()
    assert not waiting.done()
    exits.notify()
    await asyncio.wait_for(waiting, 30)


async def test_with_nothing_to_tell_a_wait_ends_after_its_time(exits, sleeper):
    exits.add(sleeper.pid)
    before = time.monotonic()
    await exits.wait(0.05)
    assert time.monotonic() >= before + 0.049


async def test_without_pidfds_a_wait_still_ends_after_its_time(exits, sleeper, monkeypatch):
    def refused(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    exits.add(sleeper.pid)
    await exits.wait(0.01)
    await exits.wait(0.01)


async def test_nothing_stays_open_when_it_is_closed(sleeper):
    before, exits = len(os.listdir("/proc/self/fd")), Exits()
    for _ in range(5):
        exits.add(sleeper.pid)
    assert len(os.listdir("/proc/self/fd")) == before + 5
    exits.close()
    assert len(os.listdir("/proc/self/fd")) == before
