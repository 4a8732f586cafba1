"""The life of one rollout replica.

Its engine is built, gets weights and answers requests. When its process dies, another process takes its place.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rltrain.base.background_tasks import Changes
from rltrain.base.errors import SyncError, WorkerError, WorkerLost
from workers.cluster.processes import Pending, Role, progress_required, results, results_in
from workers.rollout.messages import Completion, Request
from workers.rollout.worker import RolloutWorker

# Seconds after which a replica answers a poll even without finished answers. A replica in the driver's process answers
# sooner, because nothing else in that process runs meanwhile.
LONG_POLL_S, LOCAL_POLL_S = 1.0, 0.05


class ReplicaState(StrEnum):
    """State of a replica."""

    DEAD = "dead"
    STARTING = "starting"
    WAITING = "waiting for weights"
    SERVING = "serving"


@dataclass(frozen=True)
class Building:
    """A new process of a replica.

    Attributes:
        role: The engine's role in the process.
        built: Pending calls after which the engine is ready.
        fetched: Pending calls after which the model is on the process's machine. They may take as long as they make
            progress.
    """

    role: Role[RolloutWorker]
    built: Sequence[Pending[None]] = ()
    fetched: Sequence[Pending[str]] = ()


class Owner(Protocol):
    """Interface of the pool that a replica belongs to."""

    changes: Changes
    started: bool

    def deliver(self, answers: Sequence[Completion]) -> None:
        """Take finished answers."""

    async def replacement_allowed(self, replica: "Replica", how: str) -> None:
        """Record the death of a replica, and wait until another process may start. Raises WorkerError if none may."""

    async def give_weights(self, replica: "Replica") -> None:
        """Wait until the replica has the weights of the last load."""


class Replica:
    """One rollout replica, over all processes that run it one after the other.

    Args:
        number: Number of the replica.
        start: Starts a process for the replica, and the construction of its engine.
        start_timeout_s: Seconds in which the engine must be ready.

    Attributes:
        running: Keys of the requests that have no answer yet.
        asleep: Whether the engine has released its device memory.
    """

    def __init__(self, number: int, start: Callable[[], Building], *, start_timeout_s: float = math.inf) -> None:
        self.number, self.start_timeout_s, self._start = number, start_timeout_s, start
        self.running: set[tuple[int, int]] = set()
        self._aborts = 0
        self._begin()

    def _begin(self) -> None:
        building = self._start()
        self.role, self._building, self.began = building.role, building, time.monotonic()
        self.state, self.asleep = ReplicaState.STARTING, False
        self._sent: list[Pending[None]] = []  # `submit` calls whose arrival is not confirmed
        self._open: list[Pending[list[Completion]]] = []  # the `poll` call without a result, if there is one

    @property
    def ready(self) -> bool:
        """Return whether the engine is built and its process lives."""
        return self.state in (ReplicaState.WAITING, ReplicaState.SERVING) and not self.role.process.how_lost

    async def live(self, pool: Owner) -> None:
        """Serve until the task is cancelled. Each lost process is replaced, as long as the pool allows it."""
        while True:
            try:
                await self._serve(pool)
            except WorkerLost as error:
                self.state = ReplicaState.DEAD
                await pool.replacement_allowed(self, self.role.process.how_lost or str(error))
                self.role.process.kill()
                self._begin()

    def submit(self, requests: Sequence[Request]) -> None:
        """Start to answer these requests. Returns at once; an error of the engine ends the replica's task."""
        self.running.update(request.key for request in requests)
        self._sent.append(self.role.start(RolloutWorker.submit, requests))

    def drop(self) -> None:
        """Forget all unfinished requests. Their answers are never delivered."""
        self.running.clear()
        self._aborts += 1

    async def abort(self) -> None:
        """Make the engine drop all requests, after `drop`."""
        if self.ready:
            try:
                await results(self._sent)  # otherwise these requests could reach the engine after the abort
                await self.role.call(RolloutWorker.abort)
                await results(self._open)  # otherwise this poll could take answers of later requests
            except WorkerLost:
                return  # the replica's own task replaces it
            except SyncError:  # from a failed sync, whose caller has seen the error already
                if self.state is ReplicaState.SERVING:
                    raise

    async def sleep(self) -> bool | None:
        """Release the engine's device memory. Returns False if the engine keeps it, and None if the replica died."""
        role = self.role
        try:
            slept = await role.call(RolloutWorker.sleep)
        except WorkerLost:
            return None
        if self.role is role:  # it was not replaced meanwhile
            self.asleep = slept
        return slept

    async def _serve(self, pool: Owner) -> None:
        await self._build(pool)
        process = self.role.process
        while True:
            if self.state is ReplicaState.WAITING:
                await pool.give_weights(self)
            await process.unless_lost(pool.changes.until(lambda: self.running or self.state is ReplicaState.WAITING))
            await self._answer(pool)

    async def _build(self, pool: Owner) -> None:
        """Wait until the engine is ready for weights.

        An engine that cannot be built counts as a death of the replica. At the start of a run, the error is raised as
        it is, unless the process has died.
        """
        try:
            await results(self._building.fetched, limit_s=self.start_timeout_s)
            async with asyncio.timeout(None if self.start_timeout_s == math.inf else self.start_timeout_s):
                await results(self._building.built, limit_s=math.inf)
        except TimeoutError:
            limit = f"placement.start_timeout_s={self.start_timeout_s:g} s"
            raise WorkerLost(f"was not ready within {limit}: is there room for it?") from None
        except WorkerLost as error:
            raise WorkerLost(f"did not start: {error}") from error
        except WorkerError as error:
            if not pool.started:
                raise
            raise WorkerLost(f"did not start: {error}") from error
        self.state = ReplicaState.WAITING
        pool.changes.notify()

    async def _answer(self, pool: Owner) -> None:
        """Deliver answers as long as requests are unfinished and the replica has the current weights."""
        process = self.role.process
        with progress_required([process]) as scope:
            while self.running and self.state is ReplicaState.SERVING:
                aborts, sent = self._aborts, list(self._sent)
                poll = self.role.start(RolloutWorker.poll, LONG_POLL_S if process.concurrent else LOCAL_POLL_S)
                self._open = [poll]
                try:
                    await results_in(scope, sent)
                    answers = (await results_in(scope, [poll]))[0]
                except SyncError:
                    if self.state is ReplicaState.SERVING:
                        raise
                    return  # from a failed sync, whose caller has seen the error already
                finally:
                    self._open = []
                self._sent = self._sent[len(sent) :]
                if aborts == self._aborts:
                    wanted = [answer for answer in answers if answer.key in self.running]
                    self.running -= {answer.key for answer in wanted}
                    pool.deliver(wanted)
                await asyncio.sleep(0)  # an engine in this process must let other tasks run
