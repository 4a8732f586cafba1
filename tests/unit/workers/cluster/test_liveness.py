"""Tests of `Liveness`: which observed processes count as lost, and which waits fail because a process is lost."""

import asyncio
import json
import math
import socket
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from rltrain.base.background_tasks import cancelled
from rltrain.base.errors import ClusterLost, WorkerLost
from tests.fake_replicas import Reply, settled
from workers.cluster import liveness as module
from workers.cluster.liveness import LOOK_EVERY_S, PROCESSES, STACKS, STOPPED_S, Liveness, ProgressScope, WatchedProcess
from workers.cluster.observer import Sight
from workers.cluster.progress import Process
from workers.cluster.ray_daemons import Daemons


class Eyes:
    """A fake observer that reports the process states that a test sets."""

    def __init__(self):
        self.sights, self.killed, self.looks = {}, [], 0

    def look(self, processes):
        self.looks += 1
        return [self.sights[process.pid] for process in processes]

    def kill(self, processes):
        self.killed += [process.pid for process in processes]

    def stacks(self, processes):
        return [f'Thread 1:\n  File "/a/workers/b.py", line {process.pid} in wait' for process in processes]


class Daemon:
    """A fake Ray daemon that a test can end."""

    name, gone = "gcs_server", False

    def ended(self):
        return self.gone


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
async def watch(tasks, clock, tmp_path):
    """Return a Liveness object that uses the fake observer `Eyes` and makes one process for each given state."""

    class Watch(Liveness):
        def __init__(self):
            daemons = Daemons([Daemon()])
            daemons.patient = True
            super().__init__(
                hang_timeout_s=10.0, start_timeout_s=60.0, tasks=tasks, here="here", folder=tmp_path, daemons=daemons
            )
            self.own = self.eyes = Eyes()

        def see(self, *sights, node="here"):
            made = []
            for pid, sight in enumerate(sights):
                process = WatchedProcess(f"rank {pid}", self)
                process.identity, process.phase = Process(pid, 0, node, "one", 0, 0), "actor.update"
                self.eyes.sights[pid] = sight
                self.processes.append(process)
                made.append(process)
            return made

    return Watch()


# Tests of processes that count as lost


async def test_a_process_that_is_gone_is_known_at_the_next_look(watch):
    _, process = watch.see(Sight("S"), Sight("R"))
    watch.look()
    watch.eyes.sights[1] = Sight("")
    assert process.how_lost == ""
    watch.look()
    assert [one.how_lost for one in watch.processes] == ["", "is gone (killed, crashed or out of memory)"]
    assert watch.eyes.killed == [1]  # killing the lost process also ends the processes that it started


async def test_looks_are_rare_unless_a_process_ends(watch, monkeypatch):
    waits = []

    async def wait(timeout_s):
        waits.append(timeout_s)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(watch._exits, "wait", wait)
    await settled()
    assert (watch.eyes.looks, waits) == (1, [])
    watch._exits.notify()
    await settled()
    assert (watch.eyes.looks, waits) == (2, [LOOK_EVERY_S])


async def test_each_exit_is_followed_by_a_look(watch):
    watch.see(Sight("S"))
    await settled()
    for looks in (1, 2, 3):
        assert watch.eyes.looks == looks
        watch._exits.notify()
        await settled()


async def test_a_process_that_is_lost_is_not_looked_at_again_and_keeps_its_first_reason(watch):
    (process,) = watch.see(Sight("S"))
    process.lose("has weights that nobody can use")
    watch.eyes.sights.clear()
    watch.look()
    process.lose("is gone")
    assert process.how_lost == "has weights that nobody can use"
    assert watch.eyes.killed == [0]


async def test_the_successor_of_a_process_is_looked_at_in_its_place(watch):
    (before,) = watch.see(Sight("S"))
    watch.dismiss(before)
    (after,) = watch.see(Sight("S"))
    watch.look()
    assert (watch.processes, before.how_lost, after.how_lost) == ([after], "is being replaced", "")
    assert watch.eyes.killed == [0]


async def test_a_stopped_process_counts_as_dead_after_a_while_only_and_is_ended(watch, clock):
    (process,) = watch.see(Sight("T"))
    watch.look()
    watch.eyes.sights[0] = Sight("S")
    clock[0] += STOPPED_S
    watch.look()  # the fake observer reports that the stopped process has resumed
    watch.eyes.sights[0] = Sight("T")
    watch.look()
    clock[0] += STOPPED_S - 0.1
    watch.look()
    assert (process.how_lost, watch.eyes.killed) == ("", [])
    clock[0] += 0.1
    watch.look()
    assert (process.how_lost, watch.eyes.killed) == ("has been stopped (SIGSTOP) for 3 s", [0])


async def test_at_the_end_of_a_run_a_process_that_was_just_stopped_is_ended(watch):
    stopped, other = watch.see(Sight("T"), Sight("S"))
    watch.kill_stopped()
    assert (stopped.how_lost, other.how_lost, watch.eyes.killed) == ("was stopped", "", [0])


async def test_a_process_that_was_not_seen_is_not_gone(watch):
    (process,) = watch.see(None, node="another")
    watch.look()
    assert (process.sight, process.how_lost, process.busy) == (None, "", False)


# Tests of new processes that report their identity


async def test_a_process_is_named_in_the_folder_when_it_has_introduced_itself(watch, tmp_path):
    process, introduction = WatchedProcess("training rank 0", watch), Reply()
    watch.eyes.sights[7] = Sight("S")
    watch.admit(process, introduction)
    await settled()
    assert str(process) == "training rank 0 (starting)"
    introduction.give(Process(7, 0, "here", "one", 0, 0))
    await settled()
    assert str(process) == "training rank 0 (pid 7 on one)"
    assert json.loads((tmp_path / PROCESSES).read_text()) == {"training rank 0": {"pid": 7, "node": "here"}}


async def test_a_process_that_dies_before_it_has_introduced_itself_is_lost(watch):
    process, introduction = WatchedProcess("training rank 0", watch), Reply()
    watch.admit(process, introduction)
    introduction.fail(RayActorError())
    await settled()
    assert process.how_lost == "died while it started"


async def test_a_process_that_does_not_start_in_time_is_lost(watch):
    watch.start_timeout_s = -1.0
    process = WatchedProcess("training rank 0", watch)
    watch.admit(process, Reply())
    await settled()
    assert process.how_lost == "did not start within placement.start_timeout_s=-1 s; are enough resources free?"


async def test_a_process_that_is_dismissed_before_it_has_introduced_itself_is_killed_then(watch):
    process, introduction = WatchedProcess("training rank 0", watch), Reply()
    watch.admit(process, introduction)
    await settled()
    watch.dismiss(process)
    assert watch.eyes.killed == []
    introduction.give(Process(7, 0, "here", "one", 0, 0))
    await settled()
    assert watch.eyes.killed == [7]


# Tests of waits that depend on processes


async def test_ranks_stand_still_when_none_of_them_ticks(watch, clock):
    first, second = watch.see(Sight("S", 1, 1), Sight("S", 1, 0))
    with ProgressScope([first]) as alone, ProgressScope([first, second]) as both:
        clock[0] += 5
        watch.eyes.sights[1] = Sight("S", 2, 0)
        watch.look()
        clock[0] += 5
        await both.check_progress()
        assert (first.how_lost, second.how_lost) == ("", "")
        assert (first.busy, second.busy) == (True, False)
        await alone.check_progress()
        assert first.how_lost == "made no progress for 10 s"


async def test_of_ranks_that_stand_still_those_are_to_blame_that_are_inside_a_call(watch, clock, tmp_path):
    first, second = watch.see(Sight("S", 1, 1), Sight("S", 1, 0))
    with ProgressScope([first, second]) as scope:
        waiting = asyncio.ensure_future(scope.until(asyncio.get_running_loop().create_future()))
        await settled()
        clock[0] += 10
        await scope.check_progress()
        with pytest.raises(WorkerLost) as told:
            await waiting
    assert str(told.value) == ("no progress for 10 s: actor.update: rank 0 (pid 0 on one) hangs in wait (b.py:0)")
    assert (first.how_lost, second.how_lost) == ("made no progress for 10 s", "")
    assert [path.name for path in (tmp_path / STACKS).iterdir()] == ["actor.update_rank_0_0.txt"]


async def test_ranks_that_all_wait_for_work_that_never_comes_are_all_to_blame(watch, clock):
    with ProgressScope(watch.see(Sight("S", 1, 0), Sight("S", 1, 0))) as scope:
        clock[0] += 10
        await scope.check_progress()
        with pytest.raises(WorkerLost, match=r"rank 0 .* hangs in wait .*; actor\.update: rank 1 .* hangs in wait"):
            await scope.until(asyncio.get_running_loop().create_future())


async def test_a_wait_has_its_own_limit_where_it_needs_one(watch, clock):
    (process,) = watch.see(Sight("S", 1, 1))
    with ProgressScope([process], limit_s=math.inf) as patient, ProgressScope([process], limit_s=20.0) as scope:
        clock[0] += 19.9
        await patient.check_progress()
        await scope.check_progress()
        assert process.how_lost == ""
        clock[0] += 0.1
        await patient.check_progress()
        assert process.how_lost == ""
        await scope.check_progress()
        assert process.how_lost == "made no progress for 20 s"


async def test_time_before_a_wait_is_no_part_of_it(watch, clock):
    (process,) = watch.see(Sight("S", 1, 1))
    watch.look()
    clock[0] += 1000
    with ProgressScope([process]) as scope:
        clock[0] += 9.9
        await scope.check_progress()
    assert process.how_lost == ""


async def test_the_death_of_a_process_ends_the_waits_that_depend_on_it_at_once_and_no_others(watch):
    first, second = watch.see(Sight("S"), Sight("S"))
    with ProgressScope([first]) as dependent, ProgressScope([second]) as other:
        never = asyncio.get_running_loop().create_future
        waits = [asyncio.ensure_future(scope.until(never())) for scope in (dependent, other)]
        await settled()
        watch.eyes.sights[0] = Sight("")
        watch._exits.notify()
        await settled()
        assert [wait.done() for wait in waits] == [True, False]
        with pytest.raises(WorkerLost, match=r"^actor\.update: rank 0 \(pid 0 on one\) is gone"):
            waits[0].result()
        waits[1].cancel()


async def test_a_process_that_is_given_up_ends_the_waits_that_depend_on_it_at_once(watch):
    (process,) = watch.see(Sight("S"))
    with ProgressScope([process]) as scope:
        waiting = asyncio.ensure_future(scope.until(asyncio.get_running_loop().create_future()))
        await settled()
        process.lose("has weights that nobody can use")
        await settled()
        with pytest.raises(WorkerLost, match=r"has weights that nobody can use$"):
            waiting.result()


async def test_a_wait_for_a_process_that_is_lost_already_ends_at_once(watch):
    (process,) = watch.see(Sight(""))
    with ProgressScope([process]) as scope, pytest.raises(WorkerLost, match="is gone"):
        await scope.until(asyncio.get_running_loop().create_future())


async def test_a_wait_that_is_over_is_checked_no_more(watch, clock):
    (process,) = watch.see(Sight("S", 1, 1))
    with ProgressScope([process]):
        assert len(watch.scopes) == 1
    assert watch.scopes == set()
    clock[0] += 1000
    watch._exits.notify()
    await settled()
    assert process.how_lost == ""


async def test_a_wait_that_ends_while_its_stacks_are_written_costs_no_process_its_life(watch, clock, monkeypatch):
    (process,) = watch.see(Sight("S", 1, 1))
    writing, written = asyncio.Event(), asyncio.Event()

    async def stacks(processes):
        writing.set()
        await written.wait()
        return dict.fromkeys(processes, "")

    monkeypatch.setattr(watch, "stacks", stacks)
    with ProgressScope([process]) as scope:
        clock[0] += 10
        checking = asyncio.ensure_future(scope.check_progress())
        await writing.wait()
    written.set()
    await checking
    assert (process.how_lost, watch.eyes.killed) == ("", [])


async def test_what_does_not_depend_on_progress_ends_only_with_the_process(watch, clock):
    (process,) = watch.see(Sight("S", 1, 1))
    idle = asyncio.ensure_future(process.unless_lost(asyncio.get_running_loop().create_future()))
    clock[0] += 1000
    watch._exits.notify()
    await settled()
    assert not idle.done()
    process.lose("is gone")
    with pytest.raises(WorkerLost, match=r"^rank 0 \(pid 0 on one\) is gone$"):
        await idle
    result = asyncio.get_running_loop().create_future()
    result.set_result(7)
    assert await WatchedProcess("rank 1", watch).unless_lost(result) == 7


async def test_an_error_that_a_death_can_cause_waits_for_its_proof(watch):
    (process,) = watch.see(Sight("S"))
    with ProgressScope([process]) as scope:
        proving = asyncio.ensure_future(scope.proof())
        await settled()
        assert not proving.done()
        watch.eyes.sights[0] = Sight("")
        watch._exits.notify()
        with pytest.raises(WorkerLost, match="is gone"):
            await proving


async def test_an_error_waits_for_an_observation_of_the_processes_of_remote_machines(watch, clock, monkeypatch):
    monkeypatch.setattr(module, "_PROOF_S", 0.0)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    (process,) = watch.see(Sight("S"), node="there")
    clock[0] += 1
    with ProgressScope([process]) as scope:
        proving = asyncio.ensure_future(scope.proof())
        await asyncio.sleep(0.05)
        assert not proving.done()  # nobody has observed the process since the error
        process.take(Sight("S"), clock[0])
        await proving
        process.seen_at -= 1
        proving = asyncio.ensure_future(scope.proof())
        await asyncio.sleep(0.05)
        process.lose("is gone with its node")
        with pytest.raises(WorkerLost, match="is gone with its node"):
            await proving
        process.how_lost, scope.failure = "", asyncio.get_running_loop().create_future()
        proving = asyncio.ensure_future(scope.proof())
        await asyncio.sleep(0.05)
        clock[0] += watch.hang_timeout_s
        await proving  # the error is raised after `trainer.hang_timeout_s`, even if the machine does not answer


# Tests of the loss of a machine


class Elsewhere:
    """A fake observer actor on a remote machine, whose calls fail."""

    def __init__(self):
        self.replies = []
        self.look = SimpleNamespace(remote=self._look)

    def _look(self, _):
        self.replies.append(Reply())
        return self.replies[-1]


@pytest.mark.parametrize(("listed", "listens", "lost"), [(True, False, True), (False, True, True), (True, True, False)])
async def test_a_machine_is_lost_if_ray_says_so_or_its_raylet_has_ended(watch, monkeypatch, listed, listens, lost):
    observer = watch._others["there"] = Elsewhere()
    monkeypatch.setattr(watch, "_observer", lambda node: watch._others.setdefault(node, observer))
    (process,) = watch.see(Sight("S"), node="there")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        node = {"NodeID": "there", "Alive": listed, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        monkeypatch.setattr("ray.nodes", lambda: [node])
        observing = asyncio.ensure_future(watch._observe_remote("there"))
        await settled()
        observer.replies[0].fail(RayActorError())
        await asyncio.wait({observing}, timeout=0.5)
    assert bool(process.how_lost) == observing.done() == lost
    assert ("is gone with its node" in process.how_lost) == lost
    await cancelled(observing)


async def test_ranks_are_not_started_before_ray_knows_that_a_raylet_has_ended(watch, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    node = {"NodeID": "there", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    asked = []
    monkeypatch.setattr("ray.nodes", lambda: asked.append(1) or [node])
    settling = asyncio.ensure_future(watch.nodes_settled())
    await asyncio.sleep(0.05)
    assert asked
    assert not settling.done()
    node["Alive"] = False
    await settling


# Tests of the death of Ray daemons


async def test_the_death_of_a_daemon_ends_the_run_between_steps_and_waits_only_when_it_must(watch, tasks, clock):
    (process,) = watch.see(Sight("S"))
    with ProgressScope([process]) as scope:
        waiting = asyncio.ensure_future(scope.until(asyncio.get_running_loop().create_future()))
        await settled()
        tasks.check()
        watch.daemons.daemons[0].gone = True
        watch._exits.notify()
        await settled()
        assert not waiting.done()
        with pytest.raises(ClusterLost) as told:
            tasks.check()
        assert told.value.can_save
        watch.daemons.patient = False
        watch._exits.notify()
        await settled()
        with pytest.raises(ClusterLost) as told:
            waiting.result()
        assert not told.value.can_save


async def test_the_driver_waits_for_the_busy_processes_of_its_open_scopes(watch):
    assert watch.waited_for() == ""
    made = watch.see(Sight("S", 0, 1), Sight("S", 0, 0), *[Sight("S", 0, 1)] * 4)
    watch.look()
    with ProgressScope(made[:3]):
        assert watch.waited_for() == "rank 0 (pid 0 on one), rank 2 (pid 2 on one)"
    with ProgressScope(made):
        assert watch.waited_for() == (
            "rank 0 (pid 0 on one), rank 2 (pid 2 on one), rank 3 (pid 3 on one), 2 more processes"
        )
    assert watch.waited_for() == ""
