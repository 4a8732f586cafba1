"""N workers as one object: the same calls whether they are Ray actors, or one ordinary object in this process."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.base.errors import RLTrainError, WorkerError, WorkerLost
from rltrain.base.secret_values import redacted
from workers.cluster.liveness import LOOK_EVERY_S, Vigil, Watch
from workers.cluster.worker_process import Host

LOOK_S = 0.05  # between two looks at what else there is to do
_PROOF_S = 2.0  # in which a death that others have noticed shows


class Hosts(Protocol):
    """The processes of a group, by rank.

    Attributes:
        size: how many.
        concurrent: whether they compute while this process does something else.
        meanwhile: called again and again while this process waits for them.
    """

    size: int
    concurrent: bool
    meanwhile: Callable[[], None] | None

    def share(self, value: Any) -> Any:
        """What to pass instead of a large value that several ranks get."""

    def start(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Start `method` of `role` on these ranks (all by default), each with its own arguments.

        What comes back may be passed as an argument to another call, whose process then fetches the value by itself.
        """

    def wait(
        self,
        pending: list[Any],
        *,
        ranks: Collection[int] | None = None,
        beside: Sequence["Hosts"] = (),
        limit_s: float | None = None,
    ) -> list[Any]:
        """The results of `start` on these ranks (all by default), which may depend on calls of the groups `beside` too.

        Raises the first rank's own error, or WorkerLost when a process died, or none of all these made any progress for
        `limit_s` seconds (by default those of a hang).
        """

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """Which of these have ended, waiting up to `timeout_s` seconds for the first."""

    def dead(self, busy: Collection[int] = ()) -> dict[int, str]:
        """The ranks whose processes are gone, have been stopped, or hang though they are `busy`; and how."""
        return {}

    def call(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Start and wait."""
        return self.wait(self.start(role, method, arguments, ranks=ranks), ranks=ranks)


class LocalHosts(Hosts):
    """One host, in this process."""

    def __init__(self, host: Host) -> None:
        self.host, self.size, self.concurrent, self.meanwhile = host, 1, False, None

    def share(self, value: Any) -> Any:
        """Nothing crosses a process: the value itself."""
        return value

    def start(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Call it here and now."""
        try:
            return [self.host.call(role, method, *own) for own in arguments]
        except RLTrainError:
            raise
        except Exception as error:
            raise WorkerError(_last_line(error)) from error

    def wait(
        self,
        pending: list[Any],
        *,
        ranks: Collection[int] | None = None,
        beside: Sequence[Hosts] = (),
        limit_s: float | None = None,
    ) -> list[Any]:
        """They are the results already."""
        return pending

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """All have ended."""
        return list(range(len(pending)))


class RayHosts(Hosts):
    """Hosts that are Ray actors.

    Args:
        actors: by rank.
        name: what one of them is called in messages.
        spawn: starts another actor of this kind for a rank; needed by `renew`.
        watch: sees what becomes of their processes; without it, deaths are known from Ray alone, and hangs are not.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        name: str = "worker",
        spawn: Callable[[int], Any] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.actors, self.size, self.concurrent, self.meanwhile = list(actors), len(actors), True, None
        self.name, self.spawn, self.phase = name, spawn, "starting"
        self.vigil = Vigil(watch, name, self.size) if watch else None
        if self.vigil:
            for rank, actor in enumerate(self.actors):
                self.vigil.expect(rank, actor.introduce.remote())

    def share(self, value: Any) -> Any:
        """Put the value into the object store once; ranks read it from there."""
        import ray

        if self.vigil:
            self.vigil.watch.daemons.check()
        return ray.put(value)

    def start(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Call all these ranks at once."""
        self.phase = f"{role}.{method}"
        actors = self.actors if ranks is None else [self.actors[rank] for rank in ranks]
        return [actor.call.remote(role, method, *own) for actor, own in zip(actors, arguments, strict=True)]

    def wait(
        self,
        pending: list[Any],
        *,
        ranks: Collection[int] | None = None,
        beside: Sequence[Hosts] = (),
        limit_s: float | None = None,
    ) -> list[Any]:
        """Wait for Ray; meanwhile others get their turn. One rank's error ends it, though others may never end."""
        import ray

        watched = [
            _Watched(group, group.vigil, ranks)
            for group, ranks in (
                (self, range(self.size) if ranks is None else ranks),
                *((group, range(group.size)) for group in beside if isinstance(group, RayHosts)),
            )
            if group.vigil
        ]
        for one in watched:
            one.vigil.touch(one.ranks)
        patience = LOOK_S if self.meanwhile else LOOK_EVERY_S if watched else None
        while True:
            _check_daemons(watched)
            try:
                results = ray.get(pending, timeout=patience)
                _greet(watched)
                return results
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayTaskError as error:
                _give_up(watched, error.cause)
                if isinstance(error.cause, RLTrainError):
                    raise _lost(watched) or error.cause from None
                raise _lost(watched, proof_s=_PROOF_S) or WorkerError(_last_line(error.cause)) from error
            except ray.exceptions.RayActorError as error:
                _blame(watched, error.actor_id)
                raise _lost(watched, proof_s=_PROOF_S) or WorkerLost(
                    f"{self.phase}: a worker process died, a {self.name}: it was killed, crashed, or ran out of memory "
                    "(verbose=true shows Ray's report)"
                ) from error
            except ray.exceptions.RayError as error:  # an object was lost, a node went away, memory ran out
                first = (redacted(str(error)).strip().splitlines() or [""])[0]
                raise _lost(watched, proof_s=_PROOF_S) or WorkerError(
                    f"{type(error).__name__}: {first} (verbose=true shows Ray's report)"
                ) from error
            if self.meanwhile:
                self.meanwhile()
            if lost := _lost(watched) or _hung(watched, limit_s):
                raise lost

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """Ask Ray."""
        import ray

        if not pending:
            return []
        ray.wait(pending, num_returns=1, timeout=timeout_s)
        done = set(ray.wait(pending, num_returns=len(pending), timeout=0)[0])
        return [number for number, one in enumerate(pending) if one in done]

    def dead(self, busy: Collection[int] = ()) -> dict[int, str]:
        """See `Hosts`."""
        if not self.vigil:
            return {}
        self.vigil.look()
        self.vigil.touch(set(range(self.size)) - set(busy))
        for rank in busy:
            limit = self.vigil.watch.hang_timeout_s
            if rank not in self.vigil.gone and self.vigil.still_s([rank]) >= limit:
                where = self.vigil.stacks([rank], "answering").get(rank, "?")
                self.vigil.give_up(rank, f"made no progress for {limit:g} s ({where})")
        return dict(self.vigil.gone)

    def renew(self, ranks: Sequence[int]) -> None:
        """End the processes of these ranks, however they are, and start others in their places; returns at once."""
        import ray

        assert self.spawn, "made to be renewed"
        self.phase = "starting"
        for rank in ranks:
            if self.vigil:
                self.vigil.give_up(rank, "is being replaced")
            ray.kill(self.actors[rank])
            self.actors[rank] = self.spawn(rank)
            if self.vigil:
                self.vigil.expect(rank, self.actors[rank].introduce.remote())

    def end(self) -> None:
        """End the processes that would outlive Ray: those that are stopped."""
        if self.vigil:
            self.vigil.look(at_once=True)
            self.vigil.end_stopped()


@dataclass(frozen=True)
class _Watched:
    """Ranks that a wait depends on."""

    group: RayHosts
    vigil: Vigil
    ranks: Collection[int]

    def describe(self, rank: int) -> str:
        """Which process that is."""
        return f"{self.group.name} {rank} ({self.vigil.place(rank)})"


def _check_daemons(watched: Sequence[_Watched]) -> None:
    """Raise ClusterLost where a daemon of Ray has died: a call of Ray's could end this process without a word."""
    for watch in {one.vigil.watch for one in watched}:
        watch.daemons.check()


def _greet(watched: Sequence[_Watched]) -> None:
    """Learn which processes have answered here: each was asked to introduce itself before anything else."""
    for one in watched[:1]:
        one.vigil.greet(patience_s=_PROOF_S)


def _give_up(watched: Sequence[_Watched], cause: BaseException) -> None:
    """Where a process says of itself that it is of no more use, it counts as dead, and is named with its reason."""
    if isinstance(cause, WorkerLost) and cause.process is not None:
        for one in watched:
            for rank in one.ranks:
                if one.vigil.processes[rank] == cause.process:
                    one.vigil.give_up(rank, str(cause))


def _blame(watched: Sequence[_Watched], actor_id: str | None) -> None:
    """Ray says that this actor is dead; where its machine is gone, nothing else may be seen of that yet."""
    for one in watched:
        for rank in one.ranks:
            if one.group.actors[rank]._actor_id.hex() == actor_id:
                one.vigil.gone.setdefault(rank, "is gone (killed, crashed, out of memory, or its machine lost)")


def _lost(watched: Sequence[_Watched], *, proof_s: float = 0.0) -> WorkerLost | None:
    """An error that names the processes that are gone, which may show within `proof_s` seconds only."""
    deadline = time.monotonic() + proof_s
    while True:
        found = []
        for one in watched:
            one.vigil.look(at_once=proof_s > 0)
            gone = ((rank, how) for rank, how in one.vigil.gone.items() if rank in one.ranks)
            found += [f"{one.group.phase}: {one.describe(rank)} {how}" for rank, how in gone]
        if found:
            return WorkerLost("; ".join(found))
        if not watched or time.monotonic() >= deadline:
            return None
        time.sleep(LOOK_S)


def _hung(watched: Sequence[_Watched], limit_s: float | None) -> WorkerLost | None:
    """An error that names phase, processes and where they are, if none of all has got on for too long.

    Who waits for work is not to blame, unless all do.
    """
    if not watched:
        return None
    limit = watched[0].vigil.watch.hang_timeout_s if limit_s is None else limit_s
    if min(one.vigil.still_s(one.ranks) for one in watched) < limit:
        return None
    blamed = [(one, busy) for one in watched if (busy := one.vigil.busy(one.ranks))]
    said = []
    for one, ranks in blamed or [(one, list(one.ranks)) for one in watched]:
        frames = one.vigil.stacks(ranks, one.group.phase)
        said += [f"{one.group.phase}: {one.describe(rank)} hangs in {frames.get(rank, '?')}" for rank in ranks]
        for rank in ranks:
            one.vigil.give_up(rank, f"made no progress for {limit:g} s")
    return WorkerLost(f"no progress for {limit:g} s: {'; '.join(said)}")


def _last_line(error: BaseException) -> str:
    said = redacted(str(error)).strip().splitlines()
    return f"a worker failed: {type(error).__name__}: {said[-1] if said else ''} (verbose=true shows its traceback)"
