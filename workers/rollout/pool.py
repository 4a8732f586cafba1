"""Pool of rollout replicas: distributes requests, syncs weights to all replicas, and replaces dead replicas.

A replica is dead if its process is gone, is stopped or hangs. A dead replica is replaced while the others continue. The
replacement gets the weights of the current version, and then takes work. The prompt groups that the dead replica had
not finished are `lost`: the caller of the pool must submit them again.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from rltrain.base.errors import SyncError, WorkerError, WorkerLost
from workers.cluster.host_groups import Hosts
from workers.rollout.messages import Completion, Request
from workers.sync.weight_sync import Ranks, sync

logger = logging.getLogger(__name__)

LONG_POLL_S = 1.0  # seconds after which a replica answers a poll even without finished answers
REPLACEMENTS = 3  # deaths per replica, without an answer from any replica in between, before the pool gives up


class State(StrEnum):
    """State of a replica."""

    DEAD = "dead"  # replaced at the next `load`, because no engine is built while training ranks compute
    STARTING = "starting"
    WAITING = "waiting for weights"
    SERVING = "serving"


class RolloutPool:
    """Replicas of the rollout engine.

    Args:
        hosts: One process per replica, each with the role "rollout".
        sleeps: Whether idle engines may release the memory of their devices.
        replace: Ends a replica's process, in whatever state, and starts another. Returns the call that builds the new
            engine. None: the first death of a replica raises WorkerError.
        building: By replica, the call that builds its engine. Empty if the engines are ready.
        start_timeout_s: Seconds in which an engine must be ready.

    Attributes:
        asleep: Whether the engines have released their memory. `load` wakes them.
        beside: Returns calls outside this pool that also end the wait of `poll`.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        sleeps: bool = False,
        replace: Callable[[int], Any] | None = None,
        building: Sequence[Any] = (),
        start_timeout_s: float = math.inf,
    ) -> None:
        self.hosts, self.sleeps, self.asleep, self.replace = hosts, sleeps, False, replace
        self.running: list[set[tuple[int, int]]] = [set() for _ in range(hosts.size)]
        self.sent: list[tuple[int, Any]] = []  # (replica, `submit` call that may not have arrived)
        self.asked: dict[int, Any] = {}  # by replica: the `poll` call that it has not answered
        self.found: list[Completion] = []  # answers that a `poll` had collected when it raised
        self.building: dict[int, Any] = dict(enumerate(building))  # by replica: the call that builds its engine
        self.start_timeout_s, self.began = start_timeout_s, dict.fromkeys(range(hosts.size), time.monotonic())
        self.state = [State.STARTING if n in self.building else State.SERVING for n in range(hosts.size)]
        self.queue: list[Sequence[Request]] = []  # groups that wait until a replica can take them
        self.lost: set[int] = set()  # uids of groups that lost answers when a replica died
        self.latest: tuple[Ranks, int, bool] | None = None  # actor, version and check of the last `load`
        self.deaths, self.started = 0, not self.building  # `deaths` counts since the last answer
        self.beside: Callable[[], Sequence[Any]] = tuple

    def start(self) -> None:
        """Wait until all replicas are ready for weights. Raises WorkerError if an engine cannot be built."""
        while self.building:
            self._settle(LONG_POLL_S)
            self.look()
        self.started = True

    def submit(self, groups: Sequence[Sequence[Request]]) -> None:
        """Start to answer these groups. Returns at once; the next `poll` raises any error of the engines.

        All samples of a group go to the same replica, the one with the fewest unfinished answers.
        """
        assert not self.asleep, "engines that sleep have no weights to answer with: load first"
        self.look()  # restarts the hang timers of the replicas that are still idle
        serving = self._in(State.SERVING)
        if not serving:
            self.queue += groups
            return
        shares: dict[int, list[Request]] = {replica: [] for replica in serving}
        for requests in groups:
            replica = min(serving, key=lambda n: (len(self.running[n]), n))
            shares[replica].extend(requests)
            self.running[replica].update(request.key for request in requests)
        chosen = [replica for replica, share in shares.items() if share]
        calls = self.hosts.start("rollout", "submit", [(shares[replica],) for replica in chosen], ranks=chosen)
        self.sent += zip(chosen, calls, strict=True)

    @property
    def pending(self) -> int:
        """Return the number of answers not yet returned, plus the number of lost groups."""
        return sum(map(len, self.running)) + sum(map(len, self.queue)) + len(self.lost) + len(self.found)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return the answers that have finished. Waits up to `timeout_s` seconds for the first.

        Each busy replica gets one call, which it answers once it has finished answers or after `LONG_POLL_S` seconds.
        Calling this method again meanwhile costs the replica nothing.
        """
        self.look()
        arrived = set(self.hosts.first([call for _, call in self.sent], 0.0))
        done, self.sent = (
            [one for number, one in enumerate(self.sent) if (number in arrived) is wanted] for wanted in (True, False)
        )
        for replica, call in done:
            self._result(replica, call)
        idle = [n for n in self._in(State.SERVING) if self.running[n] and n not in self.asked]
        patience = LONG_POLL_S if self.hosts.concurrent else timeout_s
        polls = self.hosts.start("rollout", "poll", [(patience,)] * len(idle), ranks=idle)
        self.asked.update(zip(idle, polls, strict=True))
        return self._answers(timeout_s)

    def _answers(self, timeout_s: float) -> list[Completion]:
        """Return the answers that the open `poll` calls have delivered."""
        open_polls = dict(self.asked)
        # A replica whose engine is ready also ends the wait.
        calls = [*open_polls.values(), *self.building.values(), *self.beside()]
        ended = set(self.hosts.first(calls, 0.0 if self.found else timeout_s))
        found = self.found
        for number, replica in enumerate(open_polls):
            if number not in ended or self.asked.pop(replica, None) is None:  # None: the replica died meanwhile
                continue
            answers = self._result(replica, open_polls[replica]) or []
            found += [answer for answer in answers if answer.key in self.running[replica]]
            self.running[replica] -= {answer.key for answer in answers}
        if found:
            self.deaths = 0
        self.found = []
        return found

    def take_lost(self) -> set[int]:
        """Return the uids of groups that lost answers when replicas died, and clear the list.

        The caller must submit these groups again.
        """
        taken, self.lost = self.lost, set()
        return taken

    def look(self) -> None:
        """Replace replicas whose processes are gone, stopped or hang, and find the ready ones. Does not wait."""
        busy = [replica for replica in self._in(State.SERVING) if self.running[replica]]
        for replica, how in self.hosts.dead(busy).items():
            if self.state[replica] is not State.DEAD:
                self._lose(replica, how)
        if self.building:
            self._settle(0.0)
        for replica in list(self.building):
            if time.monotonic() > self.began[replica] + self.start_timeout_s:
                limit = f"placement.start_timeout_s={self.start_timeout_s:g} s"
                self._lose(replica, f"was not ready within {limit}: is there room for it?")

    def mend(self) -> None:
        """Send the weights of the last `load` to replaced replicas. The actor must still have these weights.

        The replaced replicas then take work again.
        """
        if self.asleep or self.latest is None:
            return
        while waiting := self._in(State.WAITING):
            actor, version, check = self.latest
            if self._sync(waiting, actor, version, check=check):
                logger.warning("rollout replica %s serves again, with weights %d", _numbers(waiting), version)
        if self.queue and self._in(State.SERVING):
            queued, self.queue = self.queue, []
            self.submit(queued)

    def abort(self) -> None:
        """Drop all unfinished requests. Their answers are never returned, even if a request is submitted again."""
        self.queue = []
        for keys in self.running:
            keys.clear()
        self._finish(self.sent)  # otherwise these requests could reach the engine after the abort
        ready = self._in(State.SERVING, State.WAITING)
        calls = self.hosts.start("rollout", "abort", [()] * len(ready), ranks=ready)
        self._finish(list(zip(ready, calls, strict=True)))
        self._finish(list(self.asked.items()))
        self.sent, self.asked, self.found, self.lost = [], {}, [], set()

    def _finish(self, calls: Sequence[tuple[int, Any]]) -> None:
        for replica, call in calls:
            if self.state[replica] is not State.STARTING:
                self._result(replica, call)

    def sleep(self) -> None:
        """Release the engines' device memory to the training ranks until `load`, if the engines support that.

        This method waits for replacements that are being built. While the training ranks compute, a replacement might
        not find enough memory.
        """
        if self.sleeps and not self.asleep:
            assert not self.pending, "engines with unfinished answers must not sleep"
            if not self._in(State.SERVING, State.WAITING):
                self.start()
            told: dict[int, float] = {}  # by replica: start time of the engine that was told to sleep
            while awake := [n for n in self._in(State.SERVING, State.WAITING) if told.get(n) != self.began[n]]:
                told |= {replica: self.began[replica] for replica in awake}
                calls = self.hosts.start("rollout", "sleep", [()] * len(awake), ranks=awake)
                slept = [self._result(replica, call) for replica, call in zip(awake, calls, strict=True)]
                if False in slept:  # on a CPU no engine sleeps, so this pool does not try again
                    self.sleeps = False
                    return
                self.start()
            self.asleep = True

    def load(self, actor: Ranks, version: int, *, check: bool) -> None:
        """Send the actor's weights to all ready replicas and wake them. The other replicas get the weights from `mend`.

        Raises:
            SyncError: An engine does not compute with these weights.
            WorkerLost: A rank of the actor is lost.
        """
        self.latest, self.asleep = (actor, version, check), False
        for replica in self._in(State.DEAD):
            self._replace(replica)
        self.look()
        while ready := self._in(State.SERVING, State.WAITING):
            if self._sync(ready, actor, version, check=check):
                return

    def _sync(self, replicas: Sequence[int], actor: Ranks, version: int, *, check: bool) -> bool:
        """Sync weights to these replicas once. Returns False if a replica died during the sync.

        After such a death, the other replicas answer nothing until another sync succeeds.
        """
        began = dict(self.began)
        try:
            sync(actor, self.hosts, version, check=check, replicas=replicas)
        except (WorkerLost, SyncError):
            for replica in replicas:
                if self.state[replica] is State.SERVING:
                    self.state[replica] = State.WAITING
            if actor.hosts.dead():
                raise
            for replica, how in self.hosts.dead().items():
                self._lose(replica, f"{how} in weight sync {version}")
            if all(self.began.get(replica) == began.get(replica) for replica in replicas):  # none was replaced
                raise
            return False
        for replica in replicas:
            if self.began.get(replica) == began.get(replica):  # a `poll` during the sync may have replaced it
                self.state[replica] = State.SERVING
        return True

    def _in(self, *states: State) -> list[int]:
        return [replica for replica, own in enumerate(self.state) if own in states]

    def _result(self, replica: int, call: Any) -> Any:
        """Return the result of a replica's call, or None if the replica died. Raises the engine's own error."""
        try:
            return self.hosts.wait([call], ranks=[replica])[0]
        except WorkerLost as error:
            if self.state[replica] in (State.SERVING, State.WAITING):
                self._lose(replica, self.hosts.dead().get(replica, str(error)))
            return None
        except SyncError:  # from a failed sync, whose caller has seen the error already
            if self.state[replica] is State.SERVING:
                raise
            return None

    def _lose(self, replica: int, how: str) -> None:
        """Record the death of a replica and replace it. While the engines sleep, `load` replaces it instead.

        Raises WorkerError if the pool cannot replace replicas, or after too many deaths.
        """
        self.deaths += 1
        self.lost.update(uid for uid, _ in self.running[replica])
        self.running[replica].clear()
        self.asked.pop(replica, None)
        self.sent = [(other, call) for other, call in self.sent if other != replica]
        limit = REPLACEMENTS * self.hosts.size
        if self.replace is None or self.deaths > limit:
            raise WorkerError(
                f"rollout replica {replica} {how}; {self.deaths} died without an answer in between, and {limit} may: "
                "look at verbose=true, its memory, and the room in the cluster"
            )
        when = " after the update" if self.asleep else ""
        logger.warning("rollout replica %d %s: another is started in its place%s", replica, how, when)
        self.state[replica] = State.DEAD
        if not self.asleep:
            self._replace(replica)

    def _replace(self, replica: int) -> None:
        """Start another process in the place of a dead one."""
        assert self.replace is not None, "the first death ends a pool without replacements"
        self.state[replica] = State.STARTING
        self.building[replica], self.began[replica] = self.replace(replica), time.monotonic()

    def _settle(self, timeout_s: float) -> None:
        """Update the replicas whose engines have been built. Waits up to `timeout_s` seconds for the first.

        An engine that cannot be built counts as a death of its replica. At the start of a run, it raises WorkerError
        unless its process has died.
        """
        replicas = list(self.building)
        for number in self.hosts.first([self.building[replica] for replica in replicas], timeout_s):
            replica = replicas[number]
            call = self.building.pop(replica)
            try:
                self.hosts.wait([call], ranks=[replica])
            except WorkerError as error:
                if not self.started and not isinstance(error, WorkerLost):
                    raise
                self._lose(replica, f"did not start: {error}")
            else:
                self.state[replica] = State.WAITING

    def close(self) -> None:
        """End the engines."""
        ready = [n for n in self._in(State.SERVING, State.WAITING) if n not in self.hosts.dead()]
        self.hosts.call("rollout", "close", [()] * len(ready), ranks=ready)


def _numbers(replicas: Sequence[int]) -> str:
    return ", ".join(map(str, replicas))
