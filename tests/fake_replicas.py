"""Fake rollout replicas, and a pool of replicas.

A test decides when a replica's process dies, becomes ready or answers.
"""

import asyncio
import concurrent.futures
import math
from types import SimpleNamespace

from ray.exceptions import RayTaskError

from rltrain.base.background_tasks import cancelled
from rltrain.base.errors import SyncError, WorkerLost
from workers.cluster.liveness import Liveness
from workers.cluster.processes import RayProcess, Role
from workers.rollout import pool as pool_module
from workers.rollout.messages import Completion, Request
from workers.rollout.pool import RolloutPool
from workers.rollout.replica import Building, Replica

RANKS = [Role(SimpleNamespace(how_lost=""), "actor")]
LOST_RANKS = [Role(SimpleNamespace(how_lost="is gone"), "actor")]


def request(uid: int, number: int = 0) -> Request:
    return Request((uid, number), [1], 1.0, 4, 0)


def of_worker(error: Exception) -> Exception:
    """Return the exception that Ray raises if an actor's method has raised `error`."""
    return RayTaskError("Host.call", "the worker's traceback", error).as_instanceof_cause()


async def settled() -> None:
    """Run the event loop until every task waits for an event that only the test can cause."""
    await asyncio.sleep(0)
    while asyncio.get_running_loop()._ready:
        await asyncio.sleep(0)


async def answers_of(pool: RolloutPool) -> list[Completion]:
    """Return the answers that arrived since the last call."""
    await settled()
    polling = asyncio.ensure_future(pool.poll())
    await settled()
    if polling.done():
        return polling.result()
    await cancelled(polling)
    return []


async def keys_of(pool: RolloutPool) -> list[tuple[int, int]]:
    return [answer.key for answer in await answers_of(pool)]


class Reply:
    """A pending call result, in place of Ray's object reference."""

    def __init__(self) -> None:
        self._outcome: concurrent.futures.Future = concurrent.futures.Future()
        self._asked: list[concurrent.futures.Future] = []

    @classmethod
    def of(cls, value) -> "Reply":
        reply = cls()
        reply.give(value)
        return reply

    @property
    def open(self) -> bool:
        return not self._outcome.done()

    def give(self, value=None) -> None:
        self._outcome.set_result(value)
        self._tell()

    def fail(self, error: Exception) -> None:
        self._outcome.set_exception(error)
        self._tell()

    def future(self) -> concurrent.futures.Future:
        """Return a new future that receives the call's result.

        Cancelling the future does not cancel the call, as with Ray.

        """
        future = concurrent.futures.Future()
        self._asked.append(future)
        self._tell()
        return future

    def _tell(self) -> None:
        if self._outcome.done():
            for future in self._asked:
                if future.set_running_or_notify_cancel():
                    error = self._outcome.exception()
                    future.set_result(self._outcome.result()) if error is None else future.set_exception(error)
            self._asked = []


class EngineProcess(RayProcess):
    """A fake process of a replica.

    Calls reach the engine at once, but the engine answers only when a test makes it answer.

    Attributes:
        alive: Whether the process lives. A test sets `alive` to False for a death that no caller has noticed, and calls
            `die` for a death that is reported.
        built: The pending construction of the engine.
        open: The result of the last `poll`, pending until the engine returns answers.
        patience: The time limit of each `poll` so far, in seconds.
        keys: Keys of the unfinished requests.
        finished: Keys of the answers that no `poll` has returned.
    """

    def __init__(self, number: int, replicas: "Replicas") -> None:
        self.alive, self.version, self.asleep = True, None, False
        self.keys, self.finished, self.patience = [], [], []
        self.built, self.open = Reply(), None
        self._replicas, self._number = replicas, number
        remote = {
            "introduce": lambda: Reply.of(None),
            "build": lambda *_: self.built,
            "call": lambda role, method, *arguments: self._called(method, arguments),
        }
        actor = SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in remote.items()})
        super().__init__(actor, f"rollout replica {number}", replicas.liveness)

    def _called(self, method, arguments):
        self._replicas.told.append((self._number, method))
        return getattr(self, f"take_{method}")(*arguments) if self.alive else Reply()

    def take_submit(self, requests):
        assert self.version is not None, "a request arrived before weights"
        self.keys += [one.key for one in requests]
        return Reply.of(None)

    def take_poll(self, patience_s):
        assert self.open is None or not self.open.open, "the previous poll is still open"
        self.patience.append(patience_s)
        self.open = Reply()
        return self.open

    def take_abort(self):
        self.keys, self.finished = [], []
        if self.open is not None and self.open.open:
            self.say()
        return Reply.of(None)

    def take_sleep(self):
        self.asleep = True
        return Reply.of(True)

    def take_close(self):
        return Reply.of(None)

    def finish(self, *keys) -> None:
        """Let the engine finish the answers `keys`, which the open poll does not return yet."""
        for key in keys:
            self.keys.remove(key)
            self.finished.append(key)

    def say(self) -> None:
        """Let the open poll return all finished answers.

        Without finished answers, the poll returns an empty list, as a real poll does after its time limit.
        """
        finished, self.finished = self.finished, []
        self.open.give([Completion(key, [self._number], [-1.0], "stop", [self.version]) for key in finished])

    def answer(self, *keys) -> None:
        """Let the engine finish answers, and let the open poll return them."""
        self.finish(*keys)
        self.say()

    def fail_poll(self) -> None:
        self.open.fail(of_worker(SyncError("weights of two versions")))

    def die(self) -> None:
        """Let the process die, and report its death at once."""
        self.alive = False
        self.lose("is gone")

    def kill(self) -> None:
        self.alive = False
        self.liveness.dismiss(self)


class Replicas:
    """The fake replicas of a pool.

    Attributes:
        processes: The current process of each replica.
        started: Number of processes that were started.
        told: The calls that reached the processes, as (replica, method).
        hold_builds: Whether engines are built only when a test gives the result of `built`.
    """

    def __init__(self, size: int, tasks) -> None:
        self.liveness = Liveness(hang_timeout_s=math.inf, start_timeout_s=math.inf, tasks=tasks, here="here")
        self.processes: list[EngineProcess | None] = [None] * size
        self.told: list[tuple[int, str]] = []
        self.started, self.hold_builds = 0, False
        self.all = [Replica(number, lambda number=number: self._start(number)) for number in range(size)]
        self.hold_builds = True

    def _start(self, number: int) -> Building:
        self.processes[number] = process = EngineProcess(number, self)
        self.started += 1
        if not self.hold_builds:
            process.built.give()
        return Building(Role(process, "rollout"), [process.build("rollout", "module:Engine")])

    @property
    def states(self):
        return [replica.state for replica in self.all]

    @property
    def versions(self):
        return [process.version for process in self.processes]

    @property
    def keys(self):
        return [process.keys for process in self.processes]


async def give_weights(ranks, engines, version, *, check, transport):
    """Fake a weight sync: give the weights to all engines, or raise an error at the first dead engine."""
    for engine in engines:
        await asyncio.sleep(0)
        if not engine.process.alive:
            engine.process.lose("is gone")
            raise WorkerLost("a process died in the sync")
        engine.process.version, engine.process.asleep = version, False


def fail_syncs(monkeypatch, error):
    """Make every later sync raise `error`."""

    async def sync(*_, **__):
        raise error

    monkeypatch.setattr(pool_module, "sync", sync)


async def pool_of(size, monkeypatch, tasks, *, busy=False, settled_nodes=None):
    """Return a pool and its fake replicas, which have weights of version 0.

    With `busy`, each replica has one request. `settled_nodes` is the pool's function `settled`.
    """
    monkeypatch.setattr(pool_module, "sync", give_weights)
    replicas = Replicas(size, tasks)
    pool = RolloutPool(replicas.all, tasks, settled=settled_nodes)
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    if busy:
        pool.submit([[request(uid)] for uid in range(size)])
    await settled()
    replicas.told.clear()
    return pool, replicas
