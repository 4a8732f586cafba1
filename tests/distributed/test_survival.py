"""Tests that dead, stopped or hung processes of a worker group are detected, named in errors, and replaced."""

import asyncio
import json
import os
import signal
from threading import Event

import psutil
import pytest
import ray
from ranks import on

from rltrain.base.errors import WorkerError, WorkerLost
from workers.cluster.liveness import PROCESSES, STACKS, Liveness
from workers.cluster.processes import RayProcess, Role, results
from workers.cluster.worker_process import Host
from workers.training.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]


@pytest.fixture
async def liveness(tmp_path, tasks):
    """Return a `Liveness` that treats processes as hung after 4 s without progress."""
    here = ray.get_runtime_context().get_node_id()
    return Liveness(hang_timeout_s=4.0, start_timeout_s=100.0, tasks=tasks, here=here, folder=tmp_path)


@pytest.fixture
async def group(liveness):
    """Start two rank processes, where the role of each rank is a `threading.Event` that is never set."""
    made = WorkerGroup([Role(spawn(liveness, f"rank {number}"), "event") for number in range(2)])
    await build(made)
    yield made
    for rank in made.ranks:
        rank.process.kill()


def spawn(liveness, name):
    return RayProcess(ray.remote(num_cpus=0)(Host).remote({}), name, liveness)


async def build(group):
    await results([rank.process.build("event", "threading:Event") for rank in group.ranks], limit_s=100.0)


async def pid_of(group, rank):
    process = group.ranks[rank].process
    await until(lambda: process.identity is not None)
    return process.identity.pid


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def table(folder):
    """Read `processes.json`, the table of named processes."""
    return json.loads((folder / PROCESSES).read_text())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_rank_that_died_is_named_with_its_phase_and_another_takes_its_place(
    group, liveness, number, tmp_path
):
    pid = await pid_of(group, 1)
    pending = [rank.start(Event.wait) for rank in group.ranks]
    os.kill(pid, number)
    with pytest.raises(WorkerLost, match=rf"event.wait: rank 1 \(pid {pid} on .*\) (is gone|has been stopped)") as told:
        await results(pending)
    assert "rank 0" not in str(told.value)
    for rank in group.ranks:
        rank.process.kill()
    group.ranks = [Role(spawn(liveness, f"rank {number}"), "event") for number in range(2)]
    await build(group)
    assert await group.call(Event.is_set) == [False, False]
    assert await pid_of(group, 1) != pid
    assert table(tmp_path)["rank 1"]["pid"] == await pid_of(group, 1)


async def test_a_hang_is_named_with_where_it_hangs_and_the_stacks_are_kept(group, tmp_path):
    pid = await pid_of(group, 0)
    with pytest.raises(WorkerLost, match=rf"no progress for 4 s: event.wait: rank 0 \(pid {pid}.*wait \(threading.py:"):
        await group.call(Event.wait)
    texts = [path.read_text() for path in (tmp_path / STACKS).iterdir()]
    assert len(texts) == 2
    assert all("threading.py" in text for text in texts)
    assert [rank.process.how_lost for rank in group.ranks] == ["made no progress for 4 s"] * 2  # hung ranks are killed


async def test_a_call_that_takes_long_is_no_hang_while_it_gets_on(group):
    """The call reports progress every second for 6 s, so the limit of 4 s without progress is never reached."""

    def ticking(host):  # a nested function is pickled by value; otherwise a worker would import the test file
        from time import sleep

        from workers.cluster.progress import tick

        for _ in range(6):
            sleep(1)
            tick()
        return "done"

    assert await on([rank.process for rank in group.ranks], ticking) == ["done", "done"]


async def test_every_process_is_named_as_soon_as_it_has_introduced_itself(group, liveness, tmp_path):
    """The table must contain a process even before its first call, because tools may look up its pid at any time."""
    await pid_of(group, 0), await pid_of(group, 1)
    assert list(table(tmp_path)) == ["rank 0", "rank 1"]
    other = spawn(liveness, "reference rank 0")
    await until(lambda: "reference rank 0" in table(tmp_path))
    assert table(tmp_path)["reference rank 0"] == {"pid": other.identity.pid, "node": other.identity.node}
    other.kill()


async def test_a_process_that_says_that_it_is_of_no_more_use_is_ended_and_named_with_its_reason(group):
    def give_up(host):  # a nested function is pickled by value
        from rltrain.base.errors import WorkerLost
        from workers.cluster.progress import announced

        error = WorkerLost("lost its engine")
        error.process = announced()
        raise error

    pid = await pid_of(group, 1)
    with pytest.raises(WorkerLost, match=rf"rank 1 \(pid {pid} on .*\) lost its engine"):
        await on([group.ranks[1].process], give_up)
    assert [rank.process.how_lost for rank in group.ranks] == ["", "lost its engine"]
    assert psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)[1] == []


async def test_an_error_that_a_worker_raises_is_no_death(group):
    with pytest.raises(WorkerError, match="AttributeError") as told:
        await results([rank.process.start("event", "no_such_method") for rank in group.ranks])
    assert not isinstance(told.value, WorkerLost)
