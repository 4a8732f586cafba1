"""Processes of a group that die, are stopped or hang: found out, named, and replaced in place."""

import json
import os
import signal
import time

import psutil
import pytest
import ray

from rltrain.base.errors import WorkerError, WorkerLost
from workers.cluster.host_groups import RayHosts
from workers.cluster.liveness import PROCESSES, STACKS, Watch
from workers.cluster.worker_process import Host
from workers.training.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]


@pytest.fixture
def group(tmp_path):
    """Two ranks whose role is an event that nobody sets, and which hang after 4 s without progress."""
    watch = Watch(hang_timeout_s=4.0, start_timeout_s=100.0, folder=tmp_path)
    hosts = RayHosts([spawn(0), spawn(1)], name="rank", spawn=spawn, watch=watch)
    build(hosts)
    yield WorkerGroup(hosts, "event")
    hosts.end()
    for actor in hosts.actors:
        ray.kill(actor)


def spawn(_):
    return ray.remote(num_cpus=0)(Host).remote({})


def build(hosts):
    hosts.wait([actor.build.remote("event", "threading:Event") for actor in hosts.actors], limit_s=100.0)


def pid_of(group, rank):
    deadline = time.monotonic() + 60
    while group.hosts.vigil.processes[rank] is None and time.monotonic() < deadline:
        group.hosts.vigil.look(at_once=True)
    return group.hosts.vigil.processes[rank].pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_rank_that_died_is_named_with_its_phase_and_another_takes_its_place(group, number, tmp_path):
    pid = pid_of(group, 1)
    pending, began = group.start("wait"), time.monotonic()
    os.kill(pid, number)
    with pytest.raises(
        WorkerLost, match=rf"event.wait: rank 1 \(pid {pid} on node .*\) (is gone|has been stopped)"
    ) as told:
        group.wait(pending)
    assert time.monotonic() - began < 30
    assert "rank 0" not in str(told.value)
    group.hosts.renew([0, 1])
    build(group.hosts)
    assert group.wait(group.start("is_set")) == [False, False]
    assert pid_of(group, 1) != pid
    assert json.loads((tmp_path / PROCESSES).read_text())["rank 1"]["pid"] == pid_of(group, 1)


def test_a_hang_is_named_with_where_it_hangs_and_the_stacks_are_kept(group, tmp_path):
    pid = pid_of(group, 0)
    with pytest.raises(WorkerLost, match=rf"no progress for 4 s: event.wait: rank 0 \(pid {pid}.*wait \(threading.py:"):
        group.wait(group.start("wait"))
    texts = [path.read_text() for path in (tmp_path / STACKS).iterdir()]
    assert len(texts) == 2
    assert all("threading.py" in text for text in texts)
    assert sorted(group.hosts.dead()) == [0, 1]  # they were ended


def test_a_call_that_takes_long_is_no_hang_while_it_gets_on(group):
    """It ticks six times in 6 s, each well before the limit of 4 s."""

    def ticking(host):  # in here it crosses as it is: by its name a worker would import this file
        from time import sleep

        from workers.cluster.progress import tick

        for _ in range(6):
            sleep(1)
            tick()
        return "done"

    assert group.wait([actor.__ray_call__.remote(ticking) for actor in group.hosts.actors]) == ["done", "done"]


def test_every_process_is_named_as_soon_as_any_group_of_the_run_is_waited_for(group, tmp_path):
    """A group that nobody has waited for yet is a target for whoever looks at a run, too."""
    assert list(json.loads((tmp_path / PROCESSES).read_text())) == ["rank 0", "rank 1"]
    other = RayHosts([spawn(0)], name="reference rank", watch=group.hosts.vigil.watch)
    ray.get(other.actors[0].introduce.remote())
    group.hosts.vigil.look(at_once=True)
    assert "reference rank 0" in json.loads((tmp_path / PROCESSES).read_text())
    ray.kill(other.actors[0])


def test_a_process_that_says_that_it_is_of_no_more_use_is_ended_and_named_with_its_reason(group):
    def give_up(host):  # in here it crosses as it is
        from rltrain.base.errors import WorkerLost
        from workers.cluster.progress import announced

        error = WorkerLost("lost its engine")
        error.process = announced()
        raise error

    pid = pid_of(group, 1)
    with pytest.raises(WorkerLost, match=rf"rank 1 \(pid {pid} on node .*\) lost its engine"):
        group.hosts.wait([actor.__ray_call__.remote(give_up) for actor in group.hosts.actors[1:]])
    assert group.hosts.dead() == {1: "lost its engine"}
    assert psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)[1] == []


def test_an_error_that_a_worker_raises_is_no_death(group):
    with pytest.raises(WorkerError, match="AttributeError") as told:
        group.wait(group.start("no_such_method"))
    assert not isinstance(told.value, WorkerLost)
