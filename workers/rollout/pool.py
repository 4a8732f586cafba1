"""Pool of rollout replicas, which distributes requests over the replicas and sends the actor's weights to the replicas.

A replica counts as dead if its process has ended, is stopped (SIGSTOP) or hangs. A dead replica is replaced while the
other replicas continue to work. A new process that replaces a dead replica gets requests only after the new process
has received the current weights. The prompt groups that a dead replica had not finished are lost, and the caller of
the pool must submit the lost prompt groups again. An optional replica is a replica that the run can go on without: it
runs only while the cluster has CPUs and GPUs that no required process needs.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from rltrain.base.background_tasks import BackgroundTasks, Changes, cancelled
from rltrain.base.errors import RLTrainError, SyncError, WorkerError, WorkerLost
from rltrain.settings.schema import WeightTransport
from workers.cluster.processes import Role, results
from workers.rollout.messages import Answer, HasKey
from workers.rollout.replica import Replica, ReplicaState
from workers.rollout.worker import RolloutWorker
from workers.sync.weight_sync import Sends, sync

logger = logging.getLogger(__name__)

# The pool raises WorkerError if more than REPLACEMENTS * n replicas die without any finished answer in between, where n
# is the number of replicas that the run needs.
REPLACEMENTS = 3


class RolloutPool:
    """Pool of the replicas of the rollout engine.

    Args:
        replicas: The replicas of the pool, whose engines may still be starting.
        tasks: The run's background tasks, to which the pool adds one task per replica.
        sleeps: Whether idle engines are allowed to release their device memory.
        replaces: Whether a dead replica is replaced. If `replaces` is False, the first death of a replica raises
            WorkerError.
        transport: How weights travel to the replicas; one of the values of `rollout.weight_transport`.
        settled: Function that waits until Ray knows which nodes have ended. It is called before a new process replaces
            a dead one, so that Ray does not place the new process on a node that has ended.

    Attributes:
        changes: Object that wakes the waiting coroutines of the pool and of its replicas after each change of state.
        started: Whether the pool's method `start` has returned.
        asleep: Whether the engines have released their device memory. The method `load` wakes sleeping engines.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        tasks: BackgroundTasks,
        *,
        sleeps: bool = False,
        replaces: bool = True,
        transport: WeightTransport = "auto",
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.replicas, self.sleeps, self.replaces = list(replicas), sleeps, replaces
        self.changes, self.started, self.asleep = Changes(), False, False
        self.transport: WeightTransport = transport
        self._tasks, self._settled = tasks, settled
        self._lives = [tasks.start(one.live(self), f"rollout replica {one.number}") for one in self.replicas]
        self._queue: list[Sequence[HasKey]] = []  # Prompt groups that wait until a replica is ready.
        self._answers: list[Answer] = []
        self._lost: set[int] = set()  # Uids of the prompt groups that lost answers when a replica died.
        self._deaths = 0  # Number of replicas that died since the last answer arrived.
        # `_source` holds the arguments of the last call of `load`, which sends weights to the replicas. `_source` is
        # None if the pool must not send weights until the next call of `load`.
        self._source: tuple[Sequence[Role[Sends]], int, bool] | None = None
        self._syncing = asyncio.Lock()

    async def start(self) -> None:
        """Wait until the engines of all replicas that the run needs are built and can receive weights.

        Raises WorkerError if an engine cannot be built.
        """
        await self._tasks.until(self._all_built())
        self.started = True

    async def _all_built(self) -> None:
        """Wait until the engines of all replicas that the run needs are built."""
        await self.changes.until(lambda: all(replica.ready for replica in self._needed))

    @property
    def _needed(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.room is None]

    def submit(self, groups: Sequence[Sequence[HasKey]]) -> None:
        """Send the requests of prompt groups to the replicas, without waiting for the answers.

        All requests of a prompt group go to one replica, which is the replica with the fewest unfinished answers. If no
        replica can generate answers yet, the prompt groups are queued until a replica can generate answers.
        """
        assert not self.asleep, (
            "sleeping engines have no weights, so they cannot answer requests: call `load` before `submit`"
        )
        serving = [one for one in self.replicas if one.state is ReplicaState.SERVING and one.ready]
        if not serving:
            self._queue += groups
            return
        load = {replica.number: len(replica.running) for replica in serving}
        shares: dict[int, list[HasKey]] = {replica.number: [] for replica in serving}
        for requests in groups:
            number = min(load, key=lambda n: (load[n], n))
            shares[number].extend(requests)
            load[number] += len(requests)
        for replica in serving:
            if shares[replica.number]:
                replica.submit(shares[replica.number])
        self.changes.notify()

    @property
    def pending(self) -> int:
        """Return the number of answers that `poll` has not returned yet, plus the number of lost prompt groups."""
        running = sum(len(replica.running) for replica in self.replicas)
        return running + sum(map(len, self._queue)) + len(self._lost) + len(self._answers)

    async def poll(self) -> list[Answer]:
        """Wait until an answer is finished or a prompt group is lost.

        Return the finished answers in order of arrival.
        """
        await self.changes.until(lambda: self._answers or self._lost)
        found, self._answers = self._answers, []
        return found

    def take_lost(self) -> set[int]:
        """Return and forget the uids of the prompt groups that lost answers when replicas died.

        The caller must submit the prompt groups with lost answers again.
        """
        taken, self._lost = self._lost, set()
        return taken

    async def abort(self) -> None:
        """Drop all unfinished requests, all answers that `poll` has not returned, and the list of lost prompt groups.

        No answer to a dropped request is ever returned, even if a request with the same key is submitted later.
        """
        self._queue, self._answers, self._lost = [], [], set()
        for replica in self.replicas:
            # The requests of all replicas are dropped before the first `await`, because a replica could answer a
            # request or die during an `await`.
            replica.drop()
        await asyncio.gather(*(replica.abort() for replica in self.replicas))

    async def sleep(self) -> None:
        """If the engines can sleep, release their device memory for the training ranks until the next `load`.

        `sleep` first waits until all replacement engines are built, because an engine that is built while the training
        ranks compute might not find enough memory.
        """
        if not self.sleeps or self.asleep:
            return
        assert not self.pending, "engines with unfinished answers must not sleep"
        # Sending new weights to a sleeping engine would wake the engine. While `_source` is None, the pool sends no
        # weights to replacement replicas.
        async with self._syncing:
            source, self._source = self._source, None
        while True:
            await self._tasks.until(self._all_built())
            awake = [replica for replica in self._needed if not replica.asleep]
            if not awake:
                break
            slept = await asyncio.gather(*(replica.sleep() for replica in awake))
            # `Replica.sleep` returns False if the engine has not freed its device memory. Engines on a CPU never free
            # their memory.
            if False in slept:
                self.sleeps, self._source = False, source
                self.changes.notify()
                return
        self.asleep = True

    async def hold_weights(self) -> None:
        """Forbid sending weights to replacement replicas until the next call of `load`.

        The caller must call `hold_weights` before the actor's weights change. If a replacement replica is receiving
        weights, `hold_weights` waits until the transfer ends.
        """
        async with self._syncing:
            self._source = None

    async def load(self, ranks: Sequence[Role[Sends]], version: int, *, check: bool) -> None:
        """Send the actor's weights to all ready replicas, and wake their engines.

        A replica that is not ready yet gets the weights as soon as it is ready.

        Raises:
            SyncError: A rollout engine does not compute with the weights that were sent.
            WorkerLost: A rank of the actor is lost.
        """
        async with self._syncing:
            self.asleep, self._source = False, None
            self.changes.notify()
            while ready := [replica for replica in self.replicas if replica.ready]:
                if await self._sync(ready, ranks, version, check=check):
                    break
            self._source = ranks, version, check
        self._resume()

    async def give_weights(self, replica: Replica) -> None:
        """Send the actor's weights to a replica that waits for weights.

        `give_weights` sends the weights with the arguments that the caller passed in the last call of `load`.

        If a call of `load` sends weights to the replica while `give_weights` waits, `give_weights` sends nothing. After
        a call of `hold_weights`, the pool must not send weights, so `give_weights` waits until the next call of `load`
        has ended.
        """
        while replica.state is ReplicaState.WAITING:
            due = self.changes.until(lambda: self._source or replica.state is not ReplicaState.WAITING)
            await replica.role.process.unless_lost(due)
            async with self._syncing:
                if self._source is None or replica.state is not ReplicaState.WAITING:
                    continue
                ranks, version, check = self._source
                try:
                    await self._sync([replica], ranks, version, check=check)
                except WorkerLost:
                    if not any(rank.process.how_lost for rank in ranks):
                        raise
                    # A rank of the actor has died, so the pool sends no weights until the next call of `load`, which
                    # sends the weights of the restarted actor.
                    self._source = None
        self._resume()

    async def replacement_allowed(self, replica: Replica, how: str) -> None:
        """Record the death of a replica, and wait until a new process is allowed to replace the dead process.

        While the engines sleep, no replica process is allowed to start, because the training ranks may need all device
        memory.

        Raises:
            WorkerError: The pool does not replace replicas, or too many replicas have died since the last answer.
        """
        self._deaths += 1
        self._lost.update(uid for uid, _ in replica.running)
        replica.running.clear()
        limit = REPLACEMENTS * len(self._needed)
        if not self.replaces or self._deaths > limit:
            raise WorkerError(
                f"rollout replica {replica.number} {how}; {self._deaths} replicas have died since the last "
                f"answer, and the limit is {limit}: look at the replica's memory and the cluster's free resources "
                "(verbose=true shows more), and continue with trainer.resume=auto"
            )
        self.make_room(f"rollout replica {replica.number}")
        when = " after the update" if self.asleep else ""
        logger.warning("rollout replica %d %s: another process replaces it%s", replica.number, how, when)
        replica.announced = True
        self.changes.notify()
        if self._settled is not None:
            await self._settled()
        await self.changes.until(lambda: not self.asleep)

    async def room_for(self, replica: Replica) -> None:
        """Wait until the cluster has free CPUs and GPUs for an optional replica.

        An optional replica never starts while the training ranks restart, because the replica could take the CPUs or
        GPUs that the training ranks need. `room_for` waits while `_source` is None: `hold_weights` sets `_source` to
        None before the training ranks restart, and the first call of `load` after the restart sets `_source` again.
        """
        assert replica.room is not None, "only an optional replica may wait for free CPUs and GPUs"

        def settled() -> bool:
            # If two replicas started at the same time, both could count the same free CPUs and GPUs.
            starting = any(one.state is ReplicaState.STARTING for one in self.replicas)
            return self._source is not None and not starting and all(one.ready for one in self._needed)

        while True:
            await self.changes.until(settled)
            await replica.room()
            if settled():
                break
        logger.warning("rollout replica %d starts, because the cluster has room for it", replica.number)
        replica.announced = True

    def make_room(self, whom: str) -> None:
        """End all optional replicas, to free their CPUs and GPUs for a process that the run needs.

        Args:
            whom: name of the process that needs the CPUs and GPUs.
        """
        for replica in self.replicas:
            if replica.room is not None and replica.state is not ReplicaState.DEAD:
                replica.role.process.lose(f"ends, to make room for {whom}")

    def go_on_without(self, replica: Replica, how: str) -> None:
        """Record the loss of an optional replica, so that its unfinished prompt groups are submitted again."""
        self._lost.update(uid for uid, _ in replica.running)
        replica.running.clear()
        logger.warning("rollout replica %d %s: the run goes on with the other engines", replica.number, how)
        self.changes.notify()

    def deliver(self, answers: Sequence[Answer]) -> None:
        """Store the finished answers of a replica until `poll` returns the answers."""
        if answers:
            self._deaths = 0
            self._answers += answers
            self.changes.notify()

    def lose(self, uids: set[int]) -> None:
        """Record that prompt groups are lost, so that the caller of the pool submits these prompt groups again."""
        self._lost |= uids
        self.changes.notify()

    async def close(self) -> None:
        """End the replicas' tasks, and close all engines that are built."""
        await cancelled(*self._lives)
        for replica in self.replicas:
            replica.close()
        ready = [replica.role for replica in self.replicas if replica.ready]
        with contextlib.suppress(RLTrainError):
            await results([role.start(RolloutWorker.close) for role in ready])

    async def _sync(
        self, replicas: Sequence[Replica], ranks: Sequence[Role[Sends]], version: int, *, check: bool
    ) -> bool:
        """Try once to send the actor's weights to replicas.

        Return True if the transfer succeeded, or False if one of the replicas died during the transfer. After a failed
        transfer, the surviving replicas generate no answers until another transfer succeeds.
        """
        roles = {replica: replica.role for replica in replicas}
        for replica in replicas:
            replica.state = ReplicaState.WAITING
        try:
            await sync(ranks, list(roles.values()), version, check=check, transport=self.transport)
        except (WorkerLost, SyncError):
            if any(rank.process.how_lost for rank in ranks):
                raise
            if not any(replica.role is not role or role.process.how_lost for replica, role in roles.items()):
                raise
            return False
        for replica, role in roles.items():
            # A replica serves only if the process that received the weights is still alive and has not been replaced.
            if replica.role is role and replica.ready:
                replica.state, replica.asleep = ReplicaState.SERVING, False
                if replica.announced:
                    again = " again" if replica.room is None else ""
                    logger.warning(
                        "rollout replica %d serves%s, with weights of version %d", replica.number, again, version
                    )
                    replica.announced = False
        return True

    def _resume(self) -> None:
        """Wake the tasks of the replicas, and submit the prompt groups that have waited for a ready replica."""
        self.changes.notify()
        if self._queue:
            queued, self._queue = self._queue, []
            self.submit(queued)
