"""Environment workers of a run, and the rollout replicas that sample actions for the environment workers.

In a run with environments, the driver sends no requests to the rollout engines. Environment workers run the
trajectories and request each turn from a rollout replica, so the driver handles only whole trajectories.
"""

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from rltrain.base.background_tasks import BackgroundTasks, Changes
from rltrain.base.errors import WorkerError, WorkerLost
from rltrain.batch.trajectory import Trajectory
from workers.cluster.processes import Pending, RayProcess, Role, progress_required, results, results_in
from workers.environments.engines import Connection, LocalConnection, RayConnection
from workers.environments.messages import EpisodeRequest
from workers.environments.recording import ATTEMPTS, failed_trajectory
from workers.environments.worker import EnvironmentWorker, ReplicaId
from workers.rollout.replica import LOCAL_POLL_S, LONG_POLL_S, Owner, Replica, ReplicaState

logger = logging.getLogger(__name__)

# The run fails if more than 3 processes per environment worker (on average) have died before they ran a trajectory,
# without a finished trajectory in between.
REPLACEMENTS = 3


class Takes(Protocol):
    """Interface of a rollout replica that receives the finished trajectories of environment workers."""

    def deliver(self, trajectories: Sequence[Trajectory]) -> None:
        """Receive finished trajectories."""

    def lose(self, uids: set[int]) -> None:
        """Record that unfinished trajectories of prompt groups were lost because their environment worker died."""


class EnvironmentPool:
    """The environment workers of a run. If the process of a worker dies, the pool starts a new process for the worker.

    One trajectory can end the process in which many trajectories run, for example with a tool that crashes, or with a
    regular expression that never returns and blocks the other trajectories until the process counts as hanging. The
    pool cannot see which trajectory was at fault. The prompt groups of a dead process therefore run again a few at a
    time: half as many after each death, and one more after each group that finishes. If a process dies in which only
    one of these groups runs, this death counts as an attempt of the group's trajectories. A trajectory whose process
    has died in `ATTEMPTS` attempts is not run again and gets an error.

    Args:
        start: Function `start(number, starts)` that starts a process for the worker `number` and begins to build the
            worker. `starts` is the number of earlier processes of the worker.
        count: Number of environment workers.
        tasks: Collection of the run's background tasks, to which the pool adds one task per environment worker.
    """

    def __init__(
        self,
        start: Callable[[int, int], tuple[Role[EnvironmentWorker], Pending[None]]],
        count: int,
        tasks: BackgroundTasks,
    ) -> None:
        self.changes, self.deaths = Changes(), 0
        # Number of attempts to run each unfinished trajectory in which the trajectory's process died.
        self.failed_attempts = Counter[tuple[int, int]]()
        self.workers = [_Worker(number, start) for number in range(count)]
        for worker in self.workers:
            tasks.start(self._live(worker), f"environment worker {worker.number}")

    def submit(
        self, replica: ReplicaId, role: Role[Any], taker: Takes, groups: Sequence[Sequence[EpisodeRequest]]
    ) -> None:
        """Start trajectories whose actions a replica samples, without waiting for the trajectories to end.

        All trajectories of a prompt group go to one worker, which is the worker with the fewest unfinished
        trajectories.

        Args:
            replica: Identity of the replica's process (see `ReplicaId`).
            role: Handle of the replica's rollout worker.
            taker: Object that receives the finished trajectories.
            groups: The requests of each prompt group.
        """
        connection = connection_to(role)
        for requests in groups:
            for one in self.workers:
                one.forget(requests)
            worker = min(self.workers, key=lambda one: (len(one.running), one.number))
            suspect = any(self.failed_attempts[request.key] for request in requests)
            worker.submit(replica, connection, taker, requests, suspect=suspect)
        self.changes.notify()

    async def abort(self) -> None:
        """End all running trajectories, and drop all finished trajectories that have not been delivered yet."""
        for worker in self.workers:
            worker.drop_all()
            worker.aborts += 1
        for worker in self.workers:
            try:
                await results(worker.sent)  # The worker must receive all earlier `submit` calls before `abort`.
                await worker.role.call(EnvironmentWorker.abort)
            except WorkerLost:
                continue  # The background task `_live` starts a new process for an environment worker that died.

    def close(self) -> None:
        """End the workers that run in the driver's own process. Workers in other processes end when the run ends."""
        for worker in self.workers:
            if not worker.role.process.concurrent:
                worker.role.start(EnvironmentWorker.close)

    async def _live(self, worker: "_Worker") -> None:
        while True:
            try:
                await results([worker.built])
                worker.send_waiting()
                self.changes.notify()
                await self._serve(worker)
            except WorkerLost as error:
                self._replace(worker, worker.role.process.loss or str(error))

    async def _serve(self, worker: "_Worker") -> None:
        process = worker.role.process
        while True:
            await process.unless_lost(self.changes.until(lambda: worker.running))
            with progress_required([process]) as scope:
                while worker.running:
                    aborts, sent = worker.aborts, list(worker.sent)
                    poll = worker.role.start(
                        EnvironmentWorker.poll, LONG_POLL_S if process.concurrent else LOCAL_POLL_S
                    )
                    await results_in(scope, sent)
                    worker.sent = worker.sent[len(sent) :]
                    found = (await results_in(scope, [poll]))[0]
                    if found and aborts == worker.aborts:
                        self._finish(one.key for one in found)
                        worker.deliver(found)
                    # Let other asyncio tasks run, because `EnvironmentWorker.poll` blocks the event loop if the
                    # environment worker runs in the driver's process.
                    await asyncio.sleep(0)

    def _finish(self, keys: Iterable[tuple[int, int]]) -> None:
        self.deaths = 0
        for key in keys:
            self.failed_attempts.pop(key, None)

    def _replace(self, worker: "_Worker", how: str) -> None:
        started = worker.started
        self.deaths += not started
        limit = REPLACEMENTS * len(self.workers)
        if not worker.role.process.concurrent or self.deaths > limit:
            raise WorkerError(
                f"environment worker {worker.number} {how}; {self.deaths} workers have died before they ran a "
                f"trajectory, and the limit is {limit}: check the memory use of the environment and the tools"
            )
        logger.warning("environment worker %d %s: another process replaces it", worker.number, how)
        at_fault = self._at_fault(worker, started)
        error = (
            f"{ATTEMPTS} processes died while they ran this conversation; the last one "
            f"{worker.role.process.how_lost or how}; look for a call that crashes, hangs or needs too much memory"
        )
        failed = {key: failed_trajectory(key, error) for key in at_fault}
        if failed:
            self._finish(failed)
        worker.replace(failed)

    def _at_fault(self, worker: "_Worker", started: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Count a failed attempt for the trajectories that ran in a dead process.

        Returns:
            The keys of the trajectories that have no attempt left.
        """
        for key in started:
            alone = key[0] in worker.suspects and len(worker.suspects) == 1
            most = ATTEMPTS if alone else ATTEMPTS - 1
            self.failed_attempts[key] = min(self.failed_attempts[key] + 1, most)
        return [key for key in started if self.failed_attempts[key] >= ATTEMPTS]


# Trajectories that run in an environment worker, and the replica that samples their actions.
_Submission = tuple[ReplicaId, Connection, Sequence[EpisodeRequest]]


class _Worker:
    """One environment worker, which continues in a new process if its process dies.

    Attributes:
        running: Maps the key of each unfinished trajectory to the replica that will receive the finished trajectory.
        suspects: Uids of the prompt groups that run in the process after an earlier process of theirs has died.
        held: Requests of prompt groups whose process has died, and which wait because `portion` such groups are running
            already.
        portion: Maximum number of prompt groups in `suspects`.
    """

    def __init__(self, number: int, start: Callable[[int, int], tuple[Role[EnvironmentWorker], Pending[None]]]) -> None:
        self.number, self._start, self.starts, self.aborts = number, start, 0, 0
        self.running: dict[tuple[int, int], Takes] = {}
        self.held: deque[_Submission] = deque()
        self.portion = 1
        self._begin()

    def _begin(self) -> None:
        self.role, self.built = self._start(self.number, self.starts)
        self.starts += 1
        self.sent: list[Pending[Any]] = []
        self.waiting: list[_Submission] = []
        self.suspects: set[int] = set()
        self.ready = False  # Whether the environment worker has been built in its process.

    @property
    def started(self) -> list[tuple[int, int]]:
        """Return the keys of the unfinished trajectories that were sent to the worker's process."""
        unsent = {request.key for *_, requests in (*self.held, *self.waiting) for request in requests}
        return [key for key in self.running if key not in unsent]

    def submit(
        self,
        replica: ReplicaId,
        connection: Connection,
        taker: Takes,
        requests: Sequence[EpisodeRequest],
        *,
        suspect: bool,
    ) -> None:
        self.running |= dict.fromkeys((request.key for request in requests), taker)
        (self.held if suspect else self.waiting).append((replica, connection, requests))
        if self.ready:
            self.send_waiting()

    def forget(self, requests: Sequence[EpisodeRequest]) -> None:
        """Forget trajectories that are submitted again, because the replica that sampled their actions has died."""
        keys = {request.key for request in requests if self.running.pop(request.key, None) is not None}
        if keys:
            for queue in (self.held, self.waiting):
                for one in [one for one in queue if keys.intersection(request.key for request in one[2])]:
                    queue.remove(one)
            self._let_suspects_pass()

    def drop_all(self) -> None:
        """Forget all trajectories."""
        for kept in (self.running, self.waiting, self.held, self.suspects):
            kept.clear()

    def send_waiting(self) -> None:
        """Send the waiting requests, and mark the worker as ready, so that `submit` sends later requests at once."""
        while self.held and len(self.suspects) < self.portion:
            submission = self.held.popleft()
            self.suspects.add(submission[2][0].key[0])
            self.waiting.append(submission)
        self.ready, waiting, self.waiting = True, self.waiting, []
        self.sent += [self.role.start(EnvironmentWorker.submit, *one) for one in waiting]

    def deliver(self, trajectories: Sequence[Trajectory]) -> None:
        takers: dict[int, tuple[Takes, list[Trajectory]]] = {}
        for one in trajectories:
            if (taker := self.running.pop(one.key, None)) is not None:
                takers.setdefault(id(taker), (taker, []))[1].append(one)
        for taker, found in takers.values():
            taker.deliver(found)
        self._let_suspects_pass()

    def _let_suspects_pass(self) -> None:
        """Start further groups of `held`, one more for each group of `suspects` that has finished."""
        if self.suspects:
            finished = self.suspects - {uid for uid, _ in self.running}
            self.suspects -= finished
            self.portion += len(finished)
            if finished and self.ready:
                self.send_waiting()

    def replace(self, failed: Mapping[tuple[int, int], Trajectory]) -> None:
        """Continue in a new process, and report the trajectories of the old process as lost.

        Args:
            failed: Maps the key of each trajectory that must not run again to the trajectory to deliver.
        """
        ran = self.suspects or {uid for uid, _ in self.started}
        if ran:
            self.portion = max(1, len(ran) // 2)
        lost, self.running = self.running, {}
        self.held.clear()
        self.role.process.kill()
        self._begin()
        for taker in dict.fromkeys(lost.values()):
            keys = [key for key, owner in lost.items() if owner is taker]
            if ended := [failed[key] for key in keys if key in failed]:
                taker.deliver(ended)
            if uids := {uid for uid, number in keys if (uid, number) not in failed}:
                taker.lose(uids)


class EnvironmentReplica(Replica):
    """A rollout replica that samples turns for environment workers, instead of answers for the driver.

    Args:
        number: Index of the replica in the rollout pool.
        start: Function that starts a process for the replica, and begins to build the engine in the process.
        environments: The environment workers of the run.
        start_timeout_s: Maximum time to build the engine, in seconds.
        room: Function that waits until the cluster has enough free resources for an optional replica (see `Replica`);
            None if the replica is not optional.

    Attributes:
        begun: Number of processes that the replica has started so far.
    """

    begun = 0

    def __init__(
        self,
        number: int,
        start: Any,
        environments: EnvironmentPool,
        *,
        start_timeout_s: float = math.inf,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(number, start, start_timeout_s=start_timeout_s, room=room)
        self.environments = environments
        self._owner: Owner | None = None

    def _begin(self) -> None:
        self.begun += 1
        super()._begin()

    async def live(self, pool: Owner) -> None:
        """Sample turns until the replica's background task is cancelled.

        If the replica's process is lost, the replica starts a new process, unless the rollout pool forbids a new
        process.
        """
        self._owner = pool
        await super().live(pool)

    def submit(self, requests: Sequence[Any]) -> None:
        """Start trajectories in the environment workers, without waiting for the trajectories to end."""
        self.running.update(request.key for request in requests)
        groups: dict[int, list[EpisodeRequest]] = {}
        for request in requests:
            groups.setdefault(request.key[0], []).append(request)
        self.environments.submit((self.number, self.begun), self.role, self, list(groups.values()))

    def deliver(self, trajectories: Sequence[Trajectory]) -> None:
        """Pass finished trajectories on to the rollout pool."""
        assert self._owner is not None, "`live` must be called before a replica receives requests"
        wanted = [one for one in trajectories if one.key in self.running]
        self.running -= {one.key for one in wanted}
        self._owner.deliver(wanted)

    def lose(self, uids: set[int]) -> None:
        """Report prompt groups to the rollout pool as lost, because their environment worker has died."""
        assert self._owner is not None, "`live` must be called before a replica receives requests"
        self.running = {key for key in self.running if key[0] not in uids}
        self._owner.lose(uids)

    async def abort(self) -> None:
        """Make the environment workers and the engine abort all trajectories."""
        await self.environments.abort()
        await super().abort()

    def close(self) -> None:
        """End the environment workers."""
        self.environments.close()

    async def _answer(self, pool: Owner) -> None:
        """Wait until all trajectories have ended or the replica's state is no longer SERVING."""
        await self.role.process.unless_lost(
            pool.changes.until(lambda: not self.running or self.state is not ReplicaState.SERVING)
        )


def connection_to(role: Role[Any]) -> Connection:
    """Return a connection to a replica's rollout worker; the connection can be sent to an environment worker."""
    process = role.process
    if isinstance(process, RayProcess):
        return RayConnection(process.actor, role.name)
    return LocalConnection(process.host.roles[role.name])  # type: ignore[attr-defined]
