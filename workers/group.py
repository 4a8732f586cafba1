"""N workers as one object: the same calls whether they are Ray actors, or one ordinary object in this process."""

from collections.abc import Sequence
from typing import Any, Protocol

from rltrain.errors import RLTrainError, WorkerError
from rltrain.protocol import DataProto
from workers.dispatch import collect_rows, split_minibatches, split_rows, sum_updates
from workers.host import Host


class Hosts(Protocol):
    """The processes of a group, by rank."""

    size: int

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

    def call(
        self, role: str, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Start and wait."""
        return self.wait(self.start(role, method, arguments, ranks=ranks))


class LocalHosts(Hosts):
    """One host, in this process."""

    def __init__(self, host: Host) -> None:
        self.host, self.size = host, 1

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


class RayHosts(Hosts):
    """Hosts that are Ray actors."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors, self.size = list(actors), len(actors)

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
        """Wait for Ray."""
        import ray

        try:
            return ray.get(pending)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RLTrainError):
                raise error.cause from None
            raise WorkerError(_last_line(error.cause)) from error
        except ray.exceptions.RayActorError as error:
            raise WorkerError(
                "a worker process died: it was killed, crashed, or ran out of memory (verbose=true shows Ray's report)"
            ) from error
        except ray.exceptions.RayError as error:  # an object was lost, a node went away, memory ran out
            first = (str(error).strip().splitlines() or [""])[0]
            raise WorkerError(f"{type(error).__name__}: {first} (verbose=true shows Ray's report)") from error


def _last_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"a worker failed: {type(error).__name__}: {said[-1] if said else ''} (verbose=true shows its traceback)"


class WorkerGroup:
    """One role on all ranks of a group of hosts.

    Args:
        hosts: the processes.
        role: which of their roles.
    """

    def __init__(self, hosts: Hosts, role: str) -> None:
        self.hosts, self.role = hosts, role

    def start(self, method: str, *args: Any) -> list[Any]:
        """Start a call on every rank with the same arguments; `wait` for the results, or pass them on."""
        return self.hosts.start(self.role, method, [args] * self.hosts.size)

    def wait(self, pending: list[Any]) -> list[Any]:
        """Results by rank of `start`."""
        return self.hosts.wait(pending)

    def rows(self, method: str, batch: DataProto, *, max_tokens: int) -> DataProto:
        """A pass over all rows, shared out over the ranks; the new columns come back in the batch's order."""
        plan = split_rows(row_lengths(batch), self.hosts.size, max_tokens)
        shared = self.hosts.share(batch)
        return collect_rows(self.hosts.call(self.role, method, [(shared, part) for part in plan]), plan)

    def update(
        self, batch: DataProto, minibatches: Sequence[list[int]], *arguments: Any, max_tokens: int
    ) -> dict[str, float]:
        """Train on the mini-batches in order, with further arguments of the role; returns metrics over all ranks."""
        plans = split_minibatches(batch, row_lengths(batch), minibatches, self.hosts.size, max_tokens)
        shared = self.hosts.share(batch)
        return sum_updates(self.hosts.call(self.role, "update", [(shared, plan, *arguments) for plan in plans]))


def row_lengths(batch: DataProto) -> list[int]:
    """Tokens that each row takes in a pack: the last response token predicts nothing and is left out."""
    return (batch.lengths("prompts") + batch.lengths("responses").clamp(min=1) - 1).tolist()
