"""N workers as one object: the same calls whether they are Ray actors, or one ordinary object in this process."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rltrain.errors import RLTrainError, WorkerError
from rltrain.protocol import DataProto
from rltrain.work import RowWork
from workers.dispatch import collect_rows, plan_metrics, split_minibatches, split_rows, sum_updates
from workers.host import Host

LOOK_S = 0.05  # between two looks at what else there is to do


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

    def wait(self, pending: list[Any]) -> list[Any]:
        """The results of `start`. Raises the first rank's own error, or WorkerError when a process died."""

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """Which of these have ended, waiting up to `timeout_s` seconds for the first."""

    def call(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Start and wait."""
        return self.wait(self.start(role, method, arguments, ranks=ranks))


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

    def wait(self, pending: list[Any]) -> list[Any]:
        """They are the results already."""
        return pending

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """All have ended."""
        return list(range(len(pending)))


class RayHosts(Hosts):
    """Hosts that are Ray actors."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors, self.size, self.concurrent, self.meanwhile = list(actors), len(actors), True, None

    def share(self, value: Any) -> Any:
        """Put the value into the object store once; ranks read it from there."""
        import ray

        return ray.put(value)

    def start(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Call all these ranks at once."""
        actors = self.actors if ranks is None else [self.actors[rank] for rank in ranks]
        return [actor.call.remote(role, method, *own) for actor, own in zip(actors, arguments, strict=True)]

    def wait(self, pending: list[Any]) -> list[Any]:
        """Wait for Ray; meanwhile others get their turn. One rank's error ends it, though others may never end."""
        import ray

        while True:
            try:
                return ray.get(pending, timeout=LOOK_S if self.meanwhile else None)
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RLTrainError):
                    raise error.cause from None
                raise WorkerError(_last_line(error.cause)) from error
            except ray.exceptions.RayActorError as error:
                raise WorkerError(
                    "a worker process died: it was killed, crashed, or ran out of memory (verbose=true shows Ray's "
                    "report)"
                ) from error
            except ray.exceptions.RayError as error:  # an object was lost, a node went away, memory ran out
                first = (str(error).strip().splitlines() or [""])[0]
                raise WorkerError(f"{type(error).__name__}: {first} (verbose=true shows Ray's report)") from error
            assert self.meanwhile is not None, "only then there is a timeout"
            self.meanwhile()

    def first(self, pending: list[Any], timeout_s: float) -> list[int]:
        """Ask Ray."""
        import ray

        if not pending:
            return []
        ray.wait(pending, num_returns=1, timeout=timeout_s)
        done = set(ray.wait(pending, num_returns=len(pending), timeout=0)[0])
        return [number for number, one in enumerate(pending) if one in done]


def _last_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"a worker failed: {type(error).__name__}: {said[-1] if said else ''} (verbose=true shows its traceback)"


class WorkerGroup:
    """One role on all ranks of a group of hosts.

    Args:
        hosts: the processes.
        role: which of their roles.
        work: what its model computes for a row; without it, ranks are balanced by tokens.
        sequence_ranks: neighbouring ranks that share out the tokens of each pack: they get the same rows and give the
            same results, and a pack may have so many times the tokens.
    """

    def __init__(self, hosts: Hosts, role: str, work: RowWork | None = None, *, sequence_ranks: int = 1) -> None:
        self.hosts, self.role, self.work = hosts, role, work or RowWork()
        self.sequence_ranks, self.size = sequence_ranks, hosts.size // sequence_ranks

    def meanwhile(self, function: Callable[[], None]) -> None:
        """Call this again and again while a call of this group is waited for."""
        self.hosts.meanwhile = function

    def start(self, method: str, *args: Any) -> list[Any]:
        """Start a call on every rank with the same arguments; `wait` for the results, or pass them on."""
        return self.hosts.start(self.role, method, [args] * self.hosts.size)

    def wait(self, pending: list[Any]) -> list[Any]:
        """Results by rank of `start`."""
        return self.hosts.wait(pending)

    def rows(self, method: str, batch: DataProto, *, max_tokens: int) -> DataProto:
        """A pass over all rows, shared out over the ranks; the new columns come back in the batch's order."""
        lengths, work = self.costs(batch)
        plan = split_rows(lengths, self.size, max_tokens * self.sequence_ranks, work=work)
        shared = self.hosts.share(batch)
        return collect_rows(self._call(method, [(shared, part) for part in plan]), plan)

    def update(
        self, batch: DataProto, minibatches: Sequence[list[int]], *arguments: Any, max_tokens: int
    ) -> dict[str, float]:
        """Train on the mini-batches in order, with further arguments of the role; returns metrics over all ranks."""
        lengths, work = self.costs(batch)
        tokens = max_tokens * self.sequence_ranks
        plans = split_minibatches(batch, lengths, minibatches, self.size, tokens, work=work)
        shared = self.hosts.share(batch)
        results = self._call("update", [(shared, plan, *arguments) for plan in plans])
        return sum_updates(results) | plan_metrics(plans, lengths, work)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each of these arguments for all ranks that share a pack's tokens; one result of each such group."""
        every = [own for own in arguments for _ in range(self.sequence_ranks)]
        return self.hosts.call(self.role, method, every)[:: self.sequence_ranks]

    def costs(self, batch: DataProto) -> tuple[list[int], list[int]]:
        """Tokens in a pack, and estimated work, of each row."""
        lengths = row_lengths(batch)
        return lengths, self.work.of_rows(lengths, batch.lengths("responses").tolist())


def row_lengths(batch: DataProto) -> list[int]:
    """Tokens that each row takes in a pack: the last response token predicts nothing and is left out."""
    return (batch.lengths("prompts") + batch.lengths("responses").clamp(min=1) - 1).tolist()
