"""Group of N workers as one object. The calls are the same for Ray actors and for one object in this process."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.base.errors import RLTrainError, WorkerError, WorkerLost
from rltrain.base.secret_values import redacted
from workers.cluster.liveness import LOOK_EVERY_S, Vigil, Watch
from workers.cluster.worker_process import Host

LOOK_S = 0.05  # polling interval in seconds while a wait also does other work
_PROOF_S = 2.0  # seconds in which the death of a process becomes visible after another process has noticed it


class Hosts(Protocol):
    """The processes of a group, by rank.

    Attributes:
        size: Number of processes.
        concurrent: Whether the processes compute while this process does other work.
        meanwhile: Callback that runs repeatedly while this process waits for the group.
    """

    size: int
    concurrent: bool
    meanwhile: Callable[[], None] | None

    def share(self, value: Any) -> Any:
        """Return a reference to pass in place of a large value that several ranks receive."""

    def start(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Start `method` of `role` on these ranks (all by default), each with its own arguments.

        Returns one pending result per rank. A pending result may be passed as an argument to another call. The process
        of that call then fetches the value itself.
        """

    def wait(
        self,
        pending: list[Any],
        *,
        ranks: Collection[int] | None = None,
        beside: Sequence["Hosts"] = (),
        limit_s: float | None = None,
    ) -> list[Any]:
        """Wait for the results of `start` on these ranks (all by default), and return them.

        Raises the error of the first rank that failed. Raises WorkerLost if a process died, or if no process that the
        results depend on made progress for `limit_s` seconds.

        Args:
            pending: Pending results of `start`.
            ranks: Ranks on which the calls run.
            beside: Other groups whose running calls the results may depend on.
            limit_s: Seconds without progress after which the processes count as hanging. None: the hang timeout.
        """

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """Return the indices of the calls that have ended. Waits up to `timeout_s` seconds for the first."""

    def dead(self, busy: Collection[int] = ()) -> dict[int, str]:
        """Return the dead ranks, and how each died.

        A rank is dead if its process is gone, has been stopped, or hangs while it is in `busy`.
        """
        return {}

    def call(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Start the calls on these ranks and wait for their results."""
        return self.wait(self.start(role, method, arguments, ranks=ranks), ranks=ranks)


class LocalHosts(Hosts):
    """Group of one host in this process."""

    def __init__(self, host: Host) -> None:
        self.host, self.size, self.concurrent, self.meanwhile = host, 1, False, None

    def share(self, value: Any) -> Any:
        """Return the value itself, because it stays in this process."""
        return value

    def start(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Run the method at once, in this process. See `Hosts.start`."""
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
        """Return `pending`, which already holds the results. See `Hosts.wait`."""
        return pending

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """Return all indices, because every call has ended. See `Hosts.first`."""
        return list(range(len(pending)))


class RayHosts(Hosts):
    """Group of hosts that are Ray actors.

    Args:
        actors: Actors by rank.
        name: Name of one process of the group in messages.
        spawn: Starts another actor of this kind for a rank. Required by `renew`.
        watch: Monitor of the processes. Without it, only Ray reports deaths, and hangs are not detected.
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
        """Put the value into Ray's object store once. All ranks read it from there."""
        import ray

        if self.vigil:
            self.vigil.watch.daemons.check()
        return ray.put(value)

    def start(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Start the calls on all these ranks at once. See `Hosts.start`."""
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
        """Wait for Ray calls and run `meanwhile` in between. See `Hosts.wait`.

        The error of one rank ends the wait, because the calls of other ranks may then never end.
        """
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
            except ray.exceptions.RayError as error:  # for example: lost object, lost node, out of memory
                first = (redacted(str(error)).strip().splitlines() or [""])[0]
                raise _lost(watched, proof_s=_PROOF_S) or WorkerError(
                    f"{type(error).__name__}: {first} (verbose=true shows Ray's report)"
                ) from error
            if self.meanwhile:
                self.meanwhile()
            if lost := _lost(watched) or _hung(watched, limit_s):
                raise lost

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """Return the indices of the Ray calls that have ended. See `Hosts.first`."""
        import ray

        if not pending:
            return []
        ray.wait(pending, num_returns=1, timeout=timeout_s)
        done = set(ray.wait(pending, num_returns=len(pending), timeout=0)[0])
        return [number for number, one in enumerate(pending) if one in done]

    def dead(self, busy: Collection[int] = ()) -> dict[int, str]:
        """Return the dead ranks, and how each died. See `Hosts.dead`."""
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
        """Kill the processes of these ranks, in whatever state, and start others in their places. Returns at once."""
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
        """Kill the processes that are stopped (SIGSTOP), because they would outlive Ray."""
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
        """Return a text for messages that identifies the process of a rank."""
        return f"{self.group.name} {rank} ({self.vigil.place(rank)})"


def _check_daemons(watched: Sequence[_Watched]) -> None:
    """Raise ClusterLost if a Ray daemon has died. A later Ray call could then end this process without a message."""
    for watch in {one.vigil.watch for one in watched}:
        watch.daemons.check()


def _greet(watched: Sequence[_Watched]) -> None:
    """Record the identities of the processes that have answered. `introduce` is the first call of each process."""
    for one in watched[:1]:
        one.vigil.greet(patience_s=_PROOF_S)


def _give_up(watched: Sequence[_Watched], cause: BaseException) -> None:
    """Mark a process as dead if it has reported itself as unusable. The text of `cause` is the recorded reason."""
    if isinstance(cause, WorkerLost) and cause.process is not None:
        for one in watched:
            for rank in one.ranks:
                if one.vigil.processes[rank] == cause.process:
                    one.vigil.give_up(rank, str(cause))


def _blame(watched: Sequence[_Watched], actor_id: str | None) -> None:
    """Mark an actor as dead because Ray reports its death.

    If the actor's machine is lost, there may be no other sign of the death yet.
    """
    for one in watched:
        for rank in one.ranks:
            if one.group.actors[rank]._actor_id.hex() == actor_id:
                one.vigil.gone.setdefault(rank, "is gone (killed, crashed, out of memory, or its machine lost)")


def _lost(watched: Sequence[_Watched], *, proof_s: float = 0.0) -> WorkerLost | None:
    """Return an error that names the dead processes, or None if none is dead.

    Args:
        watched: Ranks to check.
        proof_s: Seconds to wait until a death becomes visible.
    """
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
    """Return an error if no process has made progress for too long, otherwise None.

    The error names the phase, the hanging processes and their stack frames. Processes that only wait for work are not
    blamed, unless all processes wait.
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
