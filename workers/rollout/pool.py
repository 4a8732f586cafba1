"""Pool of rollout replicas: routes requests to replicas, and brings the actor's weights to them.

A replica is dead if its process is gone, is stopped or hangs. A dead replica is replaced while the others continue. The
replacement gets the weights of the current version, and then takes work. The prompt groups that the dead replica had
not finished are `lost`: the caller of the pool must submit them again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from rltrain.base.background_tasks import BackgroundTasks, Changes, cancelled
from rltrain.base.errors import RLTrainError, SyncError, WorkerError, WorkerLost
from workers.cluster.processes import Role, results
from workers.rollout.messages import Completion, Request
from workers.rollout.replica import Replica, ReplicaState
from workers.rollout.worker import RolloutWorker
from workers.sync.weight_sync import Sends, sync

logger = logging.getLogger(__name__)

REPLACEMENTS = 3  # deaths per replica, without an answer from any replica in between, before the pool gives up


class RolloutPool:
    """Replicas of the rollout engine.

    Args:
        replicas: The replicas, whose engines may still be under construction.
        tasks: The run's background tasks. Each replica lives in one of them.
        sleeps: Whether idle engines may release the memory of their devices.
        replaces: Whether a dead replica is replaced. Otherwise, the first death raises WorkerError.

    Attributes:
        changes: Signals a change of anything that the pool's or the replicas' coroutines wait for.
        started: Whether `start` has returned.
        asleep: Whether the engines have released their memory. `load` wakes them.
    """

    def __init__(
        self, replicas: Sequence[Replica], tasks: BackgroundTasks, *, sleeps: bool = False, replaces: bool = True
    ) -> None:
        self.replicas, self.sleeps, self.replaces = list(replicas), sleeps, replaces
        self.changes, self.started, self.asleep = Changes(), False, False
        self._tasks = tasks
        self._lives = [tasks.start(one.live(self), f"rollout replica {one.number}") for one in self.replicas]
        self._queue: list[Sequence[Request]] = []  # groups that wait until a replica can take them
        self._answers: list[Completion] = []
        self._lost: set[int] = set()  # uids of groups that lost answers when a replica died
        self._deaths = 0  # since the last answer
        # The ranks and arguments of the last `load`; None while the actor may have other weights than the engines.
        self._source: tuple[Sequence[Role[Sends]], int, bool] | None = None
        self._syncing = asyncio.Lock()

    async def start(self) -> None:
        """Wait until all replicas are ready for weights. Raises WorkerError if an engine cannot be built."""
        await self._tasks.until(self._all_built())
        self.started = True

    async def _all_built(self) -> None:
        await self.changes.until(lambda: all(replica.ready for replica in self.replicas))

    def submit(self, groups: Sequence[Sequence[Request]]) -> None:
        """Start to answer these groups. Returns at once.

        All samples of a group go to the same replica, the one with the fewest unfinished answers.
        """
        assert not self.asleep, "engines that sleep have no weights to answer with: load first"
        serving = [one for one in self.replicas if one.state is ReplicaState.SERVING and one.ready]
        if not serving:
            self._queue += groups
            return
        load = {replica.number: len(replica.running) for replica in serving}
        shares: dict[int, list[Request]] = {replica.number: [] for replica in serving}
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
        """Return the number of answers not yet returned, plus the number of lost groups."""
        running = sum(len(replica.running) for replica in self.replicas)
        return running + sum(map(len, self._queue)) + len(self._lost) + len(self._answers)

    async def poll(self) -> list[Completion]:
        """Wait for finished answers or lost groups, and return the answers. They are in the order of their arrival."""
        await self.changes.until(lambda: self._answers or self._lost)
        found, self._answers = self._answers, []
        return found

    def take_lost(self) -> set[int]:
        """Return the uids of groups that lost answers when replicas died, and clear the list.

        The caller must submit these groups again.
        """
        taken, self._lost = self._lost, set()
        return taken

    async def abort(self) -> None:
        """Drop all unfinished requests. Their answers are never returned, even if a request is submitted again."""
        self._queue, self._answers, self._lost = [], [], set()
        for replica in self.replicas:
            replica.drop()  # all before the first wait, during which answers and deaths of other replicas may come
        await asyncio.gather(*(replica.abort() for replica in self.replicas))

    async def sleep(self) -> None:
        """Release the engines' device memory to the training ranks until `load`, if the engines support that.

        This method waits for replacements that are being built. While the training ranks compute, a replacement might
        not find enough memory.
        """
        if not self.sleeps or self.asleep:
            return
        assert not self.pending, "engines with unfinished answers must not sleep"
        async with self._syncing:  # until `load`, no replacement gets weights, which would wake it
            source, self._source = self._source, None
        while True:
            await self._tasks.until(self._all_built())
            awake = [replica for replica in self.replicas if not replica.asleep]
            if not awake:
                break
            slept = await asyncio.gather(*(replica.sleep() for replica in awake))
            if False in slept:  # on a CPU no engine sleeps: do not try again
                self.sleeps, self._source = False, source
                self.changes.notify()
                return
        self.asleep = True

    async def hold_weights(self) -> None:
        """Declare that the actor's weights will change. Until the next `load`, no replacement gets weights.

        This method waits for a replacement that is getting weights now.
        """
        async with self._syncing:
            self._source = None

    async def load(self, ranks: Sequence[Role[Sends]], version: int, *, check: bool) -> None:
        """Send the actor's weights to all ready replicas and wake them. Other replicas get the weights once ready.

        Raises:
            SyncError: An engine does not compute with these weights.
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
        """Send the weights of the last load to a replica that lacks them, unless a load does it first."""
        while replica.state is ReplicaState.WAITING:
            due = self.changes.until(lambda: self._source or replica.state is not ReplicaState.WAITING)
            await replica.role.process.unless_lost(due)
            async with self._syncing:
                if self._source is None or replica.state is not ReplicaState.WAITING:
                    continue
                ranks, version, check = self._source
                try:
                    if await self._sync([replica], ranks, version, check=check):
                        logger.warning("rollout replica %d serves again, with weights %d", replica.number, version)
                except WorkerLost:
                    if not any(rank.process.how_lost for rank in ranks):
                        raise
                    self._source = None  # the actor is lost; the next load sends the weights of its successor
        self._resume()

    async def replacement_allowed(self, replica: Replica, how: str) -> None:
        """Record the death of a replica, and wait until another process may take its place.

        While engines sleep, no process starts, because the training ranks may need all memory.

        Raises:
            WorkerError: The pool does not replace replicas, or too many have died.
        """
        self._deaths += 1
        self._lost.update(uid for uid, _ in replica.running)
        replica.running.clear()
        limit = REPLACEMENTS * len(self.replicas)
        if not self.replaces or self._deaths > limit:
            raise WorkerError(
                f"rollout replica {replica.number} {how}; {self._deaths} died without an answer in between, and "
                f"{limit} may: look at verbose=true, its memory, and the room in the cluster"
            )
        when = " after the update" if self.asleep else ""
        logger.warning("rollout replica %d %s: another is started in its place%s", replica.number, how, when)
        self.changes.notify()
        await self.changes.until(lambda: not self.asleep)

    def deliver(self, answers: Sequence[Completion]) -> None:
        """Take finished answers of a replica. `poll` returns them."""
        if answers:
            self._deaths = 0
            self._answers += answers
            self.changes.notify()

    async def close(self) -> None:
        """End the engines."""
        await cancelled(*self._lives)
        ready = [replica.role for replica in self.replicas if replica.ready]
        with contextlib.suppress(RLTrainError):
            await results([role.start(RolloutWorker.close) for role in ready])

    async def _sync(
        self, replicas: Sequence[Replica], ranks: Sequence[Role[Sends]], version: int, *, check: bool
    ) -> bool:
        """Sync weights to these replicas once. Returns False if a replica died during the sync.

        After such a death, the other replicas answer nothing until another sync succeeds.
        """
        roles = {replica: replica.role for replica in replicas}
        for replica in replicas:
            replica.state = ReplicaState.WAITING
        try:
            await sync(ranks, list(roles.values()), version, check=check)
        except (WorkerLost, SyncError):
            if any(rank.process.how_lost for rank in ranks):
                raise
            if not any(replica.role is not role or role.process.how_lost for replica, role in roles.items()):
                raise
            return False
        for replica, role in roles.items():
            if replica.role is role and replica.ready:  # it was not replaced meanwhile
                replica.state, replica.asleep = ReplicaState.SERVING, False
        return True

    def _resume(self) -> None:
        """Wake the replicas' tasks, and route the groups that have waited for a replica."""
        self.changes.notify()
        if self._queue:
            queued, self._queue = self._queue, []
            self.submit(queued)
