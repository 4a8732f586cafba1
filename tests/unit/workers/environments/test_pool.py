"""Tests of environment workers whose processes die, with real processes and scripted turns."""

import asyncio
import math
import multiprocessing
import threading
from types import SimpleNamespace

import pytest

from rltrain.base.background_tasks import Changes
from rltrain.base.errors import WorkerError
from tests.environment_processes import READY, Turns, serve
from tests.fake_replicas import Reply, settled
from tests.scripted_turns import limits
from workers.cluster.liveness import Liveness
from workers.cluster.processes import LocalProcess, RayProcess, Role
from workers.environments.messages import EnvironmentSource, EpisodeRequest
from workers.environments.pool import EnvironmentPool, EnvironmentReplica
from workers.rollout.replica import Building, ReplicaState

LIMIT_S = 120.0  # Maximum seconds of one test.
SILENT_S = 3.0  # A process whose calls give no result for this many seconds counts as hanging.
PROCESSES = multiprocessing.get_context("spawn")
TOOLS = '''
import os, re, time


def crash(uid: int) -> str:
    """End the process at once for one prompt group."""
    return os._exit(3) if uid == 2 else slow(uid)


def spin(uid: int) -> str:
    """Match a regular expression that holds the interpreter's lock for ever for one prompt group."""
    return str(re.match(r"(a+)+$", "a" * 60 + "b")) if uid == 2 else slow(uid)


def slow(uid: int) -> str:
    """Take a moment."""
    time.sleep(0.3)
    return "fine"
'''


class ChildProcess(RayProcess):
    """A child process with an environment worker, in the place of a Ray actor.

    Attributes:
        child: The child process.
        calls: The calls that have no result yet, by number.
    """

    def __init__(self, name, liveness, source, journal):
        self._loop, self._number, self.calls = asyncio.get_running_loop(), READY, {}
        self._connection, theirs = PROCESSES.Pipe()
        self.child = PROCESSES.Process(target=serve, args=(theirs, name, source, limits(), journal), daemon=True)
        self.child.start()
        theirs.close()
        self._built = Reply()
        remote = {
            "introduce": lambda: Reply.of(None),
            "build": lambda *_: self._built,
            "call": lambda role, method, *arguments: self._called(method, arguments),
        }
        actor = SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in remote.items()})
        super().__init__(actor, name, liveness)
        threading.Thread(target=self._read, daemon=True).start()

    def role(self):
        """Return a handle of the environment worker, and the pending construction of the worker."""
        return Role(self, "environment"), self.build("environment", "module:Class")

    def kill(self):
        self.child.kill()
        self.liveness.dismiss(self)

    def _called(self, method, arguments):
        self._number += 1
        reply = self.calls[self._number] = Reply()
        try:
            self._connection.send((self._number, method, arguments))
        except OSError:
            self.lose("is gone")
        return reply

    def _read(self):
        how = "made no progress"
        try:
            while self._connection.poll(SILENT_S) or not self.calls:
                if self._connection.poll():
                    self._loop.call_soon_threadsafe(self._give, *self._connection.recv())
        except (EOFError, OSError):
            how = "is gone"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.lose, how)

    def _give(self, number, result):
        (self._built if number == READY else self.calls.pop(number)).give(result)


class Driver:
    """The owner of a replica, which submits lost prompt groups again.

    Attributes:
        found: The finished trajectories by key.
        requests: The requests of all prompt groups.
        processes: All processes that were started so far.
    """

    def __init__(self, tasks, source, groups, journal):
        self.changes, self.started, self.tasks, self.found = Changes(), True, tasks, {}
        self.requests = [
            EpisodeRequest((uid, sample), [{"role": "user", "content": "go"}], {}, 1.0, 0)
            for uid in range(groups)
            for sample in range(2)
        ]
        self.processes = []
        liveness = Liveness(hang_timeout_s=math.inf, start_timeout_s=math.inf, tasks=tasks, here="here")

        def start(number, starts):
            self.processes.append(ChildProcess(f"worker {number}.{starts}", liveness, source, journal))
            return self.processes[-1].role()

        self.pool = EnvironmentPool(start, 1, tasks)
        engine = LocalProcess(SimpleNamespace(roles={"rollout": Turns()}))
        self.replica = EnvironmentReplica(0, lambda: Building(Role(engine, "rollout")), self.pool)
        tasks.start(self.replica.live(self), "replica")

    async def give_weights(self, replica):
        replica.state = ReplicaState.SERVING
        replica.submit(self.requests)
        self.changes.notify()

    def deliver(self, answers):
        assert not {one.key for one in answers} & self.found.keys()
        self.found |= {one.key: one for one in answers}
        self.changes.notify()

    def lose(self, uids):
        lost = [one for one in self.requests if one.key[0] in uids and one.key not in self.found]
        asyncio.get_running_loop().call_soon(self.replica.submit, lost)

    async def finish(self):
        """Wait until all trajectories are finished, and return the errors by key."""
        async with asyncio.timeout(LIMIT_S):
            await self.tasks.until(self.changes.until(lambda: len(self.found) == len(self.requests)))
        return {key: one.error for key, one in self.found.items() if one.error}

    def close(self):
        for process in self.processes:
            process.child.kill()
            process.child.join()


@pytest.fixture
def drive(tasks, tmp_path):
    """Return a function that starts a driver with one of the tools."""
    (tmp_path / "tools.py").write_text(TOOLS)
    drivers = []

    def start(tool, groups=4):
        source = EnvironmentSource("", {"work": f"{tmp_path}/tools.py:{tool}"})
        drivers.append(Driver(tasks, source, groups, tmp_path / "turns"))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()


@pytest.mark.parametrize(("tool", "how"), [("crash", "is gone"), ("spin", "made no progress")])
async def test_T7_a_trajectory_that_ends_its_process_gets_an_error_and_all_others_finish(drive, tool, how):
    driver = drive(tool)
    error = (
        f"2 processes died while they ran this conversation; the last one {how}; look for a call that crashes, hangs "
        "or needs too much memory"
    )
    assert await driver.finish() == {(2, 0): error, (2, 1): error}
    assert {driver.found[2, sample].stop_reason for sample in range(2)} == {"error"}
    assert {one.stop_reason for key, one in driver.found.items() if key[0] != 2} == {"answer"}
    assert not driver.pool.failed_attempts


async def test_processes_that_are_killed_from_outside_cost_no_trajectory(drive):
    driver = drive("slow", groups=6)
    (worker,) = driver.pool.workers
    for trajectories in (12, 6):  # After a death, half of the groups run at the same time.
        async with asyncio.timeout(LIMIT_S):
            while len(worker.started) < trajectories:
                await asyncio.sleep(0.001)
            old = worker.role
            old.process.child.kill()
            while worker.role is old:
                await asyncio.sleep(0.001)
    assert await driver.finish() == {}
    assert len(driver.processes) == 3


async def test_a_worker_whose_processes_die_before_they_run_a_trajectory_ends_the_run(drive):
    driver = drive("missing")
    with pytest.raises(
        WorkerError, match=r"environment worker 0 .*is gone; 4 workers have died before they ran a traj"
    ):
        await driver.finish()


class SilentProcess(RayProcess):
    """A process that stores the uids of the requests that reach it, and never answers."""

    def __init__(self, liveness):
        self.uids = []
        remote = {"introduce": lambda: Reply.of(None), "build": lambda *_: Reply.of(None), "call": self._called}
        actor = SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in remote.items()})
        super().__init__(actor, "silent", liveness)

    def _called(self, role, method, *arguments):
        if method == "submit":
            self.uids.append([one.key[0] for one in arguments[2]])
        return Reply() if method == "poll" else Reply.of(None)

    def kill(self):
        self.liveness.dismiss(self)


class Taker:
    """A replica that stores the uids of lost prompt groups in the future `lost`."""

    def __init__(self):
        self.lost = asyncio.get_running_loop().create_future()

    def lose(self, uids):
        self.lost.set_result(uids)


async def test_a_group_that_another_engine_takes_over_keeps_no_other_group_waiting(tasks):
    liveness = Liveness(hang_timeout_s=math.inf, start_timeout_s=math.inf, tasks=tasks, here="here")
    processes, roles, taker = [], LocalProcess(SimpleNamespace(roles={"rollout": Turns()})), Taker()

    def start(number, starts):
        processes.append(SilentProcess(liveness))
        return Role(processes[-1], "environment"), processes[-1].build("environment", "module:Class")

    async def submit(*uids, engine=0):
        groups = [[EpisodeRequest((uid, 0), [], {}, 1.0, 0)] for uid in uids]
        pool.submit((engine, 1), Role(roles, "rollout"), taker, groups)
        await settled()

    pool = EnvironmentPool(start, 1, tasks)
    await settled()
    await submit(0, 1, 2)
    processes[0].lose("is gone")
    assert await tasks.until(taker.lost) == {0, 1, 2}
    await settled()
    assert processes[0].uids == [[0], [1], [2]]
    await submit(0, 1, 2)
    assert processes[1].uids == [[0]]  # Half of three groups run at the same time.
    await submit(2, engine=1)  # The engine of a waiting group has died.
    assert processes[1].uids == [[0]]
    await submit(0, engine=1)  # The engine of the running group has died.
    assert processes[1].uids == [[0], [1], [2]]
    await pool.abort()
    await submit(3, 0, 1)
    assert processes[1].uids == [[0], [1], [2], [3], [0], [1]]
