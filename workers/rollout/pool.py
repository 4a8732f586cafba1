"""Several rollout replicas as one: which replica answers what, weight syncs to all of them, and what if one dies.

A replica whose process is gone, stopped or hangs is replaced while the others go on. Another starts in its place, gets
the weights of the current version, and takes work from then on. What the dead one had not answered is `lost`: whoever
asked for it asks again.
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

LONG_POLL_S = 1.0  # a replica that has nothing to say for so long says that
REPLACEMENTS = 3  # for each replica, without an answer from any in between, before the pool gives up


class State(StrEnum):
    """What a replica can do."""

    DEAD = "dead"  # until the next `load`: no engine is built beside training ranks that compute
    STARTING = "starting"
    WAITING = "waiting for weights"
    SERVING = "serving"


class RolloutPool:
    """Replicas of the engine.

    Args:
        hosts: one process a replica, each with the role "rollout".
        sleeps: whether the engines may give up their devices' memory when they have nothing to do.
        replace: ends a replica's process, however it is, and starts another; returns the call that builds its engine.
            Without it a death is the pool's end.
        building: by replica, the call that builds its engine, where these are not ready yet.
        start_timeout_s: in which an engine must be ready.

    Attributes:
        asleep: whether they have; `load` wakes them.
        beside: the calls of others that end the wait of `poll` too.
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
        self.sent: list[tuple[int, Any]] = []  # by replica: `submit` calls that may not have arrived
        self.asked: dict[int, Any] = {}  # by replica: a `poll` that it has not answered
        self.found: list[Completion] = []  # what a `poll` had when it raised
        self.building: dict[int, Any] = dict(enumerate(building))  # by replica: the call that ends its start
        self.start_timeout_s, self.began = start_timeout_s, dict.fromkeys(range(hosts.size), time.monotonic())
        self.state = [State.STARTING if n in self.building else State.SERVING for n in range(hosts.size)]
        self.queue: list[Sequence[Request]] = []  # groups that no replica could take yet
        self.lost: set[int] = set()  # uids of groups some of whose answers died with a replica
        self.latest: tuple[Ranks, int, bool] | None = None  # actor, version and check of the last `load`
        self.deaths, self.started = 0, not self.building  # deaths: since the last answer
        self.beside: Callable[[], Sequence[Any]] = tuple

    def start(self) -> None:
        """Wait until all replicas are ready for weights. Raises WorkerError when one cannot be built."""
        while self.building:
            self._settle(LONG_POLL_S)
            self.look()
        self.started = True

    def submit(self, groups: Sequence[Sequence[Request]]) -> None:
        """Start answering; returns at once, and what goes wrong is raised by the next `poll`.

        A group's samples go to one replica, the one with the fewest unfinished answers.
        """
        assert not self.asleep, "engines that sleep have no weights to answer with: load first"
        self.look()  # who had nothing to do until now did not hang
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
        """Answers not yet returned, and groups that are lost."""
        return sum(map(len, self.running)) + sum(map(len, self.queue)) + len(self.lost) + len(self.found)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers that finished, waiting up to `timeout_s` seconds for the first.

        Each busy replica is asked once and answers when it has something, so that looking again costs it nothing.
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
        """What the polls under way have brought."""
        open_polls = dict(self.asked)
        # A replica that is ready is news too.
        calls = [*open_polls.values(), *self.building.values(), *self.beside()]
        ended = set(self.hosts.first(calls, 0.0 if self.found else timeout_s))
        found = self.found
        for number, replica in enumerate(open_polls):
            if number not in ended or self.asked.pop(replica, None) is None:  # it is gone meanwhile
                continue
            answers = self._result(replica, open_polls[replica]) or []
            found += [answer for answer in answers if answer.key in self.running[replica]]
            self.running[replica] -= {answer.key for answer in answers}
        if found:
            self.deaths = 0
        self.found = []
        return found

    def take_lost(self) -> set[int]:
        """The uids of groups that miss answers of replicas which died since the last call: to be asked for again."""
        taken, self.lost = self.lost, set()
        return taken

    def look(self) -> None:
        """Replace the replicas whose processes are gone, stopped or hang; see which are ready. Does not wait."""
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
        """Bring replicas that were replaced up to the weights of the last `load`, which the actor must still have.

        From then on they answer.
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
        """Drop everything unfinished: none of it is ever returned, even where it is asked for again."""
        self.queue = []
        for keys in self.running:
            keys.clear()
        self._finish(self.sent)  # or they would arrive after the engine was told to drop them
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
        """Let the training ranks have the memory of the devices until `load`, where the engines have any to give.

        A replacement that is being built is waited for: beside ranks that compute it might find no room.
        """
        if self.sleeps and not self.asleep:
            assert not self.pending, "engines with unfinished answers must not sleep"
            if not self._in(State.SERVING, State.WAITING):
                self.start()
            told: dict[int, float] = {}  # when the engine began that was told to
            while awake := [n for n in self._in(State.SERVING, State.WAITING) if told.get(n) != self.began[n]]:
                told |= {replica: self.began[replica] for replica in awake}
                calls = self.hosts.start("rollout", "sleep", [()] * len(awake), ranks=awake)
                slept = [self._result(replica, call) for replica, call in zip(awake, calls, strict=True)]
                if False in slept:  # on a CPU none of them does, and they need not be asked again
                    self.sleeps = False
                    return
                self.start()
            self.asleep = True

    def load(self, actor: Ranks, version: int, *, check: bool) -> None:
        """Send the actor's weights to all replicas that are ready, waking them; others get them from `mend`.

        Raises SyncError unless they compute with them, and WorkerLost when a rank of the actor is.
        """
        self.latest, self.asleep = (actor, version, check), False
        for replica in self._in(State.DEAD):
            self._replace(replica)
        self.look()
        while ready := self._in(State.SERVING, State.WAITING):
            if self._sync(ready, actor, version, check=check):
                return

    def _sync(self, replicas: Sequence[int], actor: Ranks, version: int, *, check: bool) -> bool:
        """One weight sync; False if a replica died of it, and the rest, who answer nothing till then, need another."""
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
            if self.began.get(replica) == began.get(replica):  # `poll` gets turns in a sync, and may have replaced it
                self.state[replica] = State.SERVING
        return True

    def _in(self, *states: State) -> list[int]:
        return [replica for replica, own in enumerate(self.state) if own in states]

    def _result(self, replica: int, call: Any) -> Any:
        """The result of a replica's call; None if it died. Raises what the engine raised."""
        try:
            return self.hosts.wait([call], ranks=[replica])[0]
        except WorkerLost as error:
            if self.state[replica] in (State.SERVING, State.WAITING):
                self._lose(replica, self.hosts.dead().get(replica, str(error)))
            return None
        except SyncError:  # of a sync that failed, which whoever asked for it knows
            if self.state[replica] is State.SERVING:
                raise
            return None

    def _lose(self, replica: int, how: str) -> None:
        """Have another process take the place of one that is dead."""
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
        """Start another process in the place of one that is dead."""
        assert self.replace is not None, "the first death ends a pool without replacements"
        self.state[replica] = State.STARTING
        self.building[replica], self.began[replica] = self.replace(replica), time.monotonic()

    def _settle(self, timeout_s: float) -> None:
        """See which engines are built. At the start of a run, one that cannot be is an error, not another death."""
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
