"""The life cycle of one rollout replica, which continues in a new process if the replica's process dies.

A replica builds its engine, receives weights and answers requests. When the replica's process dies, the replica starts
a new process.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast

from rltrain.base.background_tasks import Changes
from rltrain.base.errors import SyncError, WorkerError, WorkerLost
from workers.cluster.processes import Pending, Role, progress_required, results, results_in
from workers.rollout.messages import Answer, Completion, HasKey, Request
from workers.rollout.worker import RolloutWorker

# Seconds that an optional replica waits after the loss of its process before it looks for free CPUs and GPUs.
RETRY_S = 15.0
# Seconds after which `poll` returns even without finished answers. If a replica runs in the driver's own process, a
# running `poll` blocks the driver, so `poll` returns after LOCAL_POLL_S seconds.
LONG_POLL_S, LOCAL_POLL_S = 1.0, 0.05


class ReplicaState(StrEnum):
    """State of a rollout replica."""

    DEAD = "dead"
    STARTING = "starting"
    WAITING = "waiting for weights"
    SERVING = "serving"


@dataclass(frozen=True)
class Building:
    """A new process of a replica, in which the engine is being built.

    Attributes:
        role: Handle of the rollout worker that runs in the replica's new process.
        built: Pending calls that must end before the engine is ready.
        fetched: Running calls that copy the model's files to the machine on which the replica's new process runs.
            Copying the files may take any length of time, as long as it makes progress.
    """

    role: Role[RolloutWorker]
    built: Sequence[Pending[None]] = ()
    fetched: Sequence[Pending[str]] = ()


class Owner(Protocol):
    """Interface of the pool to which a rollout replica belongs."""

    changes: Changes
    started: bool

    def deliver(self, answers: Sequence[Answer]) -> None:
        """Receive finished answers from a replica."""

    def lose(self, uids: set[int]) -> None:
        """Record that the unfinished answers of the prompt groups `uids` were lost."""

    async def replacement_allowed(self, replica: "Replica", how: str) -> None:
        """Record the death of a replica, and wait until a new process is allowed to replace the dead process.

        Raises:
            WorkerError: The pool does not replace replicas, or too many replicas have died since the last answer.
        """

    async def room_for(self, replica: "Replica") -> None:
        """Wait until an optional replica may start a process."""

    def go_on_without(self, replica: "Replica", how: str) -> None:
        """Record that an optional replica was lost; the run goes on without the replica."""

    async def give_weights(self, replica: "Replica") -> None:
        """Wait until the replica has the weights that the pool sent last."""


class Replica:
    """One rollout replica. If its process dies, the replica continues in a new process.

    Args:
        number: Index of the replica in the pool.
        start: Function that starts a process for the replica, and begins to build the engine in the process.
        start_timeout_s: Maximum time to build the engine, in seconds.
        room: None if the run cannot go on without the replica. If the run can go on without the replica, the replica is
            called optional, and `room` is a function that waits until the cluster has free CPUs and GPUs for the
            replica. The first process of an optional replica starts when CPUs and GPUs are free. If the process of an
            optional replica is lost, the run goes on without the replica until CPUs and GPUs are free again.

    Attributes:
        running: Keys of the requests to the replica that have no answer yet.
        asleep: Whether the engine has released its device memory.
        announced: Whether a message has said that a process starts for the replica, and none yet that it serves.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[], Building],
        *,
        start_timeout_s: float = math.inf,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.number, self.start_timeout_s, self.room, self._start = number, start_timeout_s, room, start
        self.running: set[tuple[int, ...]] = set()
        self._aborts, self.state, self.asleep, self.announced = 0, ReplicaState.DEAD, False, False
        if room is None:
            self._begin()

    def _begin(self) -> None:
        building = self._start()
        self.role, self._building, self.began = building.role, building, time.monotonic()
        self.state, self.asleep = ReplicaState.STARTING, False
        self._sent: list[Pending[None]] = []  # Calls of `submit` that have not yet returned.
        self._open: list[Pending[list[Completion]]] = []  # The running call of `poll`, if any.

    @property
    def ready(self) -> bool:
        """Return whether the replica's engine is built and the replica's process is alive."""
        return self.state in (ReplicaState.WAITING, ReplicaState.SERVING) and not self.role.process.how_lost

    async def live(self, pool: Owner) -> None:
        """Answer requests until the asyncio task that runs `live` is cancelled.

        If the replica's process is lost, start a new process if the pool permits. An optional replica starts a process
        when the cluster has free CPUs and GPUs.
        """
        while True:
            if self.room is not None:
                await pool.room_for(self)
                self._begin()
            try:
                await self._serve(pool)
            except WorkerError as error:
                # If the engine of an optional replica fails, the run goes on without the replica.
                if self.room is None and not isinstance(error, WorkerLost):
                    raise
                self.state, how = ReplicaState.DEAD, self.role.process.loss or str(error)
                if self.room is None:
                    await pool.replacement_allowed(self, how)
                    self.role.process.kill()
                    self._begin()
                else:
                    pool.go_on_without(self, how)
                    self.role.process.kill()
                    await asyncio.sleep(RETRY_S)

    def submit(self, requests: Sequence[HasKey]) -> None:
        """Send requests to the engine, without waiting for a reply.

        An error of the engine is not raised by `submit`, but in the asyncio task that runs `live`.
        """
        self.running.update(request.key for request in requests)
        self._sent.append(self.role.start(RolloutWorker.submit, cast(Sequence[Request], requests)))

    def close(self) -> None:
        """Release the resources that a subclass of `Replica` holds in addition to the replica's process."""

    def drop(self) -> None:
        """Forget all unfinished requests, so that no answers to these requests are delivered to the pool."""
        self.running.clear()
        self._aborts += 1

    async def abort(self) -> None:
        """Make the engine abort all its requests.

        The caller must call `drop` first, so that no answers to the aborted requests are delivered to the pool.
        """
        if self.ready:
            try:
                await results(self._sent)  # Requests that reach the engine after `abort` would not be aborted.
                await self.role.call(RolloutWorker.abort)
                # Wait until the running `poll` has ended, because `poll` could return answers to requests that are
                # submitted after the abort.
                await results(self._open)
            except WorkerLost:
                return  # The task that runs `live` will replace the lost process.
            except SyncError:  # A failed weight sync is reported to the caller of the weight sync.
                if self.state is ReplicaState.SERVING:
                    raise

    async def sleep(self) -> bool | None:
        """Release the engine's device memory.

        Return True if the engine has released its memory, False if the engine keeps its memory, or None if the engine
        died.
        """
        role = self.role
        try:
            slept = await role.call(RolloutWorker.sleep)
        except WorkerLost:
            return None
        # If the replica's process was replaced during the call of `sleep`, the engine of the replacement is not asleep.
        if self.role is role:
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
        """Wait until the engine is built and can receive weights.

        Raises:
            WorkerLost: The process died, or the engine was not ready in time. If building the engine failed, WorkerLost
                is raised unless the pool is still starting and the replica is not optional. `live` catches WorkerLost
                and replaces the process.
            WorkerError: Building the engine failed during the pool's start, and the replica is not optional.
        """
        try:
            await results(self._building.fetched, limit_s=self.start_timeout_s)
            async with asyncio.timeout(None if self.start_timeout_s == math.inf else self.start_timeout_s):
                await results(self._building.built, limit_s=math.inf)
        except TimeoutError:
            limit = f"placement.start_timeout_s={self.start_timeout_s:g} s"
            raise WorkerLost(f"was not ready within {limit}: are enough resources free?") from None
        except WorkerLost as error:
            raise WorkerLost(f"did not start: {error}") from error
        except WorkerError as error:
            if not pool.started and self.room is None:
                raise
            raise WorkerLost(f"did not start: {error}") from error
        self.state = ReplicaState.WAITING
        pool.changes.notify()

    async def _answer(self, pool: Owner) -> None:
        """Deliver the engine's answers to the pool while requests are unfinished and the replica's state is SERVING."""
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
                    return  # A failed weight sync is reported to the caller of the weight sync.
                finally:
                    self._open = []
                self._sent = self._sent[len(sent) :]
                if aborts == self._aborts:
                    wanted = [answer for answer in answers if answer.key in self.running]
                    self.running -= {answer.key for answer in wanted}
                    pool.deliver(wanted)
                # Let other asyncio tasks run, because `poll` in the driver's process blocks the event loop.
                await asyncio.sleep(0)
