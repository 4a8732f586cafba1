"""Tests that an error names a Ray daemon that has died, and that a run can first save a checkpoint if possible."""

import contextlib
import logging
import os
import resource
import socket
import subprocess
import time

import pytest

from rltrain.base.errors import ClusterLost
from workers.cluster import ray_daemons
from workers.cluster.progress import began_of
from workers.cluster.ray_daemons import GCS, GRACE_S, RAYLET, Daemons, LocalDaemon, RemoteDaemon


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(ray_daemons.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def running():
    """Start two processes that stand in for gcs_server and raylet."""
    processes = {name: subprocess.Popen(["sleep", "1000"]) for name in (GCS, RAYLET)}
    yield processes
    for process in processes.values():
        with process:
            process.kill()


@pytest.fixture
def watched(running):
    return Daemons([
        LocalDaemon(name, "10.0.0.7", process.pid, began_of(process.pid)) for name, process in running.items()
    ])  # fmt: skip


def end(process):
    process.kill()
    process.wait()


def test_nothing_is_said_while_all_live(watched):
    watched.check()
    watched.check(at_rest=True)
    assert watched.lost() is None


def test_a_dead_raylet_is_named_at_once_with_its_node_and_the_way_out_wherever_the_run_is(watched, running):
    watched.patient = True
    end(running[RAYLET])
    with pytest.raises(ClusterLost) as told:
        watched.check()
    assert str(told.value) == (
        f"Ray's raylet on node 10.0.0.7 (pid {running[RAYLET].pid}) is gone (killed, crashed or out of memory): start "
        "the run again with trainer.resume=auto"
    )
    assert not told.value.can_save


def test_without_gcs_server_a_step_may_end_and_then_a_checkpoint_can_be_saved(watched, running, clock, caplog):
    watched.patient = True
    end(running[GCS])
    with caplog.at_level(logging.WARNING):
        watched.check()
        watched.check()
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "Ray's gcs_server on node 10.0.0.7"
    ]
    with pytest.raises(ClusterLost, match="gcs_server") as told:
        watched.check(at_rest=True)
    assert told.value.can_save
    clock[0] += GRACE_S
    # the error is raised before Ray itself would end the driver
    with pytest.raises(ClusterLost, match="gcs_server") as told:
        watched.check()
    assert not told.value.can_save


def test_without_gcs_server_a_run_that_has_nothing_to_save_ends_at_once(watched, running):
    end(running[GCS])
    with pytest.raises(ClusterLost, match="gcs_server"):
        watched.check()


def test_of_two_dead_daemons_the_raylet_decides_as_nothing_works_without_it(watched, running):
    watched.patient = True
    for process in running.values():
        end(process)
    with pytest.raises(ClusterLost, match="raylet"):
        watched.check()


def test_a_gcs_server_elsewhere_counts_as_dead_when_nobody_answers_there_for_a_while(clock):
    with socket.create_server(("127.0.0.1", 0)) as server:
        daemon = RemoteDaemon(GCS, "127.0.0.1", server.getsockname()[1])
        for _ in range(5):
            clock[0] += 10
            assert not daemon.ended()
    clock[0] += 60
    # a single failed check may be a short network failure, so the daemon does not count as ended
    assert not daemon.ended()
    clock[0] += 5
    assert not daemon.ended()
    clock[0] += 5
    assert daemon.ended()
    assert "gcs_server on node 127.0.0.1 no longer answers" in str(daemon)


def test_a_host_that_does_not_answer_is_not_waited_for_and_counts_as_silent_after_a_second(clock):
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        for _ in range(3):  # once the queue of the server is full, a new connection stays half open
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        daemon = RemoteDaemon(GCS, *address)
        for seconds, silent in ((6, False), (0.5, False), (1, True)):
            clock[0] += seconds
            assert not daemon.ended()
            assert (daemon.silent_since is not None) == silent
        clock[0] += 10
        assert daemon.ended()
        opened.enter_context(daemon.connection)  # the connection attempt that has not finished yet


def test_a_process_with_more_than_1024_open_files_can_watch_a_remote_daemon(clock):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most[1], 4096), most[1]))
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        held = opened.enter_context(open(os.devnull))
        while held.fileno() < 1024:
            held = opened.enter_context(open(os.devnull))
        daemon = RemoteDaemon(GCS, *server.getsockname())
        clock[0] += 6
        assert not daemon.ended()
        assert daemon.silent_since is None


def test_a_host_without_a_server_counts_as_silent(clock):
    with socket.create_server(("127.0.0.1", 0)) as server:
        daemon = RemoteDaemon(GCS, "::1", server.getsockname()[1])
        for _ in range(4):
            clock[0] += 5
            ended = daemon.ended()
        assert ended


def test_only_the_gcs_server_of_the_runs_own_ray_session_counts():
    def gcs_server(session):
        arguments = ["/ray/gcs_server", "-c", "read", "shell", f"--session-name={session}"]
        return subprocess.Popen(arguments, executable="/bin/bash", stdin=subprocess.PIPE)

    running = [gcs_server("session_1"), gcs_server("session_12"), subprocess.Popen(["sleep", "1000"])]
    try:
        deadline = time.monotonic() + 10
        while running[1].pid not in found_of("session_12", running) and time.monotonic() < deadline:
            time.sleep(0.01)  # wait until the started process has its own command line
        assert found_of("session_1", running) == [running[0].pid]
        assert found_of("session_12", running) == [running[1].pid]
        running[0].kill()
        # wait until the process has ended, without reaping it
        os.waitid(os.P_PID, running[0].pid, os.WEXITED | os.WNOWAIT)
        assert found_of("session_1", running) == []
    finally:
        for process in running:
            process.kill()
            process.communicate()


def found_of(session, processes):
    return [process.pid for process in processes if ray_daemons._is_gcs_of(session, process.pid)]
