"""Handles for worker processes and their roles, and functions that wait for the results of calls.

The driver's own process has the same interface as a process that is a Ray actor.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from rltrain.base import trace
from rltrain.base.background_tasks import outside_event_loop
from rltrain.base.errors import RLTrainError, WorkerError, WorkerLost
from rltrain.base.secret_values import redacted
from rltrain.batch.data_proto import DataProto
from workers.cluster.liveness import Liveness, ProgressScope, WatchedProcess
from workers.cluster.worker_process import Host, InnerCall, Join

if TYPE_CHECKING:
    import numpy as np

# Matches the pid, the IP address and the actor id in Ray's error message about a failed call.
_FAILED_IN = re.compile(r"\(pid=(\d+), ip=([^,\s)]+)(?:, actor_id=(\w+))?")

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


class WorkerProcess(Protocol):
    """A process that runs roles, such as the actor or the critic.

    Attributes:
        concurrent: Whether the process can compute while the driver does other work.
        how_lost: How the process was lost (died, was stopped or hung), or "" if the process has not been lost.
    """

    concurrent: bool
    how_lost: str

    @property
    def loss(self) -> str:
        """Return where the process ran and how it was lost, or "" if the process has not been lost."""

    def build(self, role: str, path: str, *args: Any, **kwargs: Any) -> "Pending[None]":
        """Start creating, in the process, an object of the class that `path` names, under the role name `role`.

        The argument `path` has the form "module:Class".
        """

    def model_directory(self, path: str) -> "Pending[str]":
        """Start to look up a model's directory on the process's machine, and to download the model if it is missing."""

    def start(self, role: str, method: str, *args: Any, **kwargs: Any) -> "Pending[Any]":
        """Start a call of a role's method, and return without waiting for the result.

        `Role.start` is the statically typed variant of `WorkerProcess.start`.
        """

    def share(self, value: W) -> W:
        """Store a large value, and return a reference that can be passed to several processes instead of the value."""

    async def unless_lost(self, awaitable: Awaitable[R]) -> R:
        """Return the result of `awaitable`, which depends on this worker process, unless the process is lost first.

        `unless_lost` has no timeout: the caller keeps waiting even while this worker process is idle.

        Raises WorkerLost if the process is marked as lost.
        """

    def lose(self, how: str) -> None:
        """Mark the process as lost for the reason `how`, and kill the process."""

    def kill(self) -> None:
        """Kill the process, even if the process is stopped or hangs."""


@dataclass(frozen=True)
class Pending(Generic[R]):
    """A call that was started on a worker process, and may still be running.

    Attributes:
        process: The process that runs the call.
        outcome: Ray reference to the result, or the result itself if the call ran in the driver's own process.
    """

    process: WorkerProcess
    outcome: Any

    @property
    def later(self) -> R:
        """Return a Ray reference to the result of a started call, for use as an argument of another call.

        A process that gets a Ray reference as an argument of a call waits for the referenced result and fetches it. If
        the started call ran in the driver's own process, `later` returns the result itself.
        """
        return cast(R, self.outcome)


@dataclass(frozen=True)
class Shared:
    """Selected rows and columns of a batch, passed to a call as several parts that are in Ray's object store.

    A worker process that receives a `Shared` argument joins the parts of the batch with the function `joined_rows`.

    Attributes:
        references: Ray references to the parts of the batch, each of which is itself a batch.
        rows_of_parts: For each part of the batch, the indices that the part's rows have in the whole batch.
        rows: The rows that the called method receives, as row indices of the whole batch.
        columns: Names of the columns that the called method receives.
    """

    references: Sequence[Any]
    rows_of_parts: Sequence["np.ndarray"]
    rows: "np.ndarray"
    columns: Sequence[str]

    def as_batch(self) -> DataProto:
        """Return `self`, cast to `DataProto` so that type checkers accept `self` as a `DataProto` argument."""
        return cast(DataProto, self)

    @property
    def join(self) -> Join:
        """Return the `Join` that tells the worker process how to join the parts of the batch into one batch."""
        return Join(self.rows_of_parts, self.rows, self.columns)


@dataclass(frozen=True)
class Role(Generic[W_co]):
    """Handle of a role in a worker process. The role's methods run in the worker process.

    Attributes:
        process: The worker process that runs the role.
        name: Name of the role in the process.
    """

    process: WorkerProcess
    name: str

    def start(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start a call of a method of the role's class, and return without waiting for the result."""
        return self.process.start(self.name, method.__name__, *args, **kwargs)

    def argument_for(
        self, other: "Role[Any]", method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return a reference to the result of `method`, for use as an argument of a method of the role `other`.

        If this role and the role `other` are in the same process, the process runs `method` immediately before the
        method of `other`, and passes the result on without a copy. If the roles are in different processes, `method` is
        started at once, and its result is sent to the process of `other` without passing through the driver.
        """
        if self.process is other.process:
            return cast(R, InnerCall(self.name, method.__name__, args, kwargs))
        return self.start(method, *args, **kwargs).later

    async def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the role's class in the worker process, and wait for the result."""
        return (await results([self.start(method, *args, **kwargs)]))[0]


class LocalProcess:
    """The driver's own process, with the same interface as a separate worker process.

    The method `LocalProcess.start` returns only after the called method has ended.
    """

    concurrent = False
    how_lost = loss = ""

    def __init__(self, host: Host) -> None:
        self.host = host

    def build(self, role: str, path: str, *args: Any, **kwargs: Any) -> Pending[None]:
        """Create the role's object in the driver's process before returning. See `WorkerProcess.build`."""
        with outside_event_loop():
            self.host.build(role, path, *args, **kwargs)
        return Pending(self, None)

    def model_directory(self, path: str) -> Pending[str]:
        """Look up a model's directory on this machine, and return only after a missing model was downloaded.

        See `WorkerProcess.model_directory`.
        """
        return Pending(self, self.host.model_directory(path))

    def start(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Run a method of a role in the driver's process, and return only after the method has ended.

        Raises:
            RLTrainError: The method failed with an RLTrainError, which is raised unchanged.
            WorkerError: The method failed with an error other than an RLTrainError.
        """
        try:
            with outside_event_loop():
                return Pending(self, self.host.call(role, method, *args, **kwargs))
        except RLTrainError:
            raise
        except Exception as error:
            raise WorkerError(_last_line(role, error)) from error

    def share(self, value: W) -> W:
        """Return `value` itself, because the driver's own process can use the value without a reference."""
        return value

    async def unless_lost(self, awaitable: Awaitable[R]) -> R:
        """Wait for `awaitable` without checking whether this process is lost, because this process is the driver."""
        return await awaitable

    def lose(self, how: str) -> None:
        """Always raise AssertionError, because nothing may mark the driver's own process as lost."""
        raise AssertionError(f"the driver's own process {how}")

    def kill(self) -> None:
        """Always raise AssertionError, because the driver must not kill its own process."""
        raise AssertionError("the driver must not kill its own process")


class RayProcess(WatchedProcess):
    """A worker process that is a Ray actor of the class `Host`.

    Args:
        actor: Handle of the Ray actor whose class is `Host`.
        name: Name of the process in messages.
        liveness: The `Liveness` object that observes the process, or None if no object observes the process.
    """

    concurrent = True

    def __init__(self, actor: Any, name: str, liveness: Liveness | None = None) -> None:
        super().__init__(name, liveness)
        self.actor = actor
        if liveness is not None:
            liveness.admit(self, actor.introduce.remote())

    def begin(self, method: Callable[Concatenate[Host, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start a call of a method of the process's `Host`, and return without waiting for the result."""
        return Pending(self, getattr(self.actor, method.__name__).remote(*args, **kwargs))

    def build(self, role: str, path: str, *args: Any, **kwargs: Any) -> Pending[None]:
        """Start creating an object of the class that `path` names in this worker process. See `WorkerProcess.build`.

        The argument `path` has the form "module:Class".
        """
        self.phase = f"{role}.build"
        return Pending(self, self.actor.build.remote(role, path, *args, **kwargs))

    def model_directory(self, path: str) -> Pending[str]:
        """Start to look up a model's directory on the process's machine, and to download the model if it is missing.

        See `WorkerProcess.model_directory`.
        """
        self.phase = "model download"
        return self.begin(Host.model_directory, path)

    def start(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Start a call of a role's method, and return without waiting for the result."""
        self._require_daemons()
        self.phase = f"{role}.{method}"
        joins = [arg.join if isinstance(arg, Shared) else None for arg in args]
        if not any(joins):
            return Pending(self, self.actor.call.remote(role, method, *args, **kwargs))
        # Ray resolves only references that are direct arguments, so each reference of a batch is passed as a separate
        # argument.
        flat = [one for arg in args for one in (arg.references if isinstance(arg, Shared) else [arg])]
        return Pending(self, self.actor.call_joined.remote(role, method, joins, *flat, **kwargs))

    def share(self, value: W) -> W:
        """Put a value into Ray's object store, and return a reference that can be passed to any number of processes."""
        import ray

        self._require_daemons()
        return cast(W, ray.put(value))

    def kill(self) -> None:
        """Kill the process, even if the process is stopped or hangs."""
        import ray

        if self.liveness is not None:
            self.liveness.dismiss(self)
        ray.kill(self.actor)

    def _require_daemons(self) -> None:
        """Raise ClusterLost if a Ray daemon has died.

        After the death of a Ray daemon, the next call to Ray could end the driver without an error message.
        """
        if self.liveness is not None:
            self.liveness.daemons.check()


async def results(
    pending: Sequence[Pending[R]], *, depends_on: Collection[WorkerProcess] = (), limit_s: float | None = None
) -> list[R]:
    """Wait for the results of calls that were started on worker processes.

    If a call fails, `results` raises the error without waiting for the remaining calls, which might never end.

    Args:
        pending: The started calls whose results are awaited.
        depends_on: Additional processes on which the results depend, although none of the calls in `pending` runs in
            these processes.
        limit_s: The processes on which the results depend count as hanging if none of these processes makes progress
            for `limit_s` seconds. If `limit_s` is None, the setting `trainer.hang_timeout_s` applies.

    Raises:
        WorkerLost: A worker process died, was stopped or hung.
        RLTrainError: A call failed with an RLTrainError, which is raised unchanged.
        WorkerError: A call failed with an error other than an RLTrainError.
    """
    with progress_required([*(one.process for one in pending), *depends_on], limit_s) as scope:
        if not scope.processes:
            return await results_in(scope, pending)
        with trace.span(f"wait: {scope.processes[0].phase}", processes=len(scope.processes)):
            return await results_in(scope, pending)


async def recorded_by(processes: Sequence[WorkerProcess]) -> list[trace.Recorded]:
    """Return and delete the recorded timeline events of all given processes except the driver's own process.

    If a process was lost (died, was stopped or hung), the timeline events of that process are missing from the result.
    """
    found = await asyncio.gather(*(_recorded_by(one) for one in processes if isinstance(one, RayProcess)))
    return [one for one in found if one is not None]


async def _recorded_by(process: RayProcess) -> trace.Recorded | None:
    with contextlib.suppress(RLTrainError), progress_required([process]) as scope:
        return (await results_in(scope, [process.begin(Host.take_events)]))[0]
    return None


def progress_required(processes: Sequence[WorkerProcess], limit_s: float | None = None) -> ProgressScope:
    """Return a `ProgressScope` that raises WorkerLost if a process is lost or if no process makes progress."""
    separate = [process for process in dict.fromkeys(processes) if isinstance(process, RayProcess)]
    return ProgressScope(separate, limit_s)


async def results_in(scope: ProgressScope, pending: Sequence[Pending[R]]) -> list[R]:
    """Wait for the results of calls, like the function `results`, but inside a `ProgressScope` that is already open."""
    import ray

    if not any(isinstance(one.process, RayProcess) for one in pending):
        return [one.outcome for one in pending]
    try:
        return await scope.until(asyncio.gather(*(asyncio.wrap_future(one.outcome.future()) for one in pending)))
    except ray.exceptions.RayTaskError as error:
        _lose_reported(scope, error.cause)
        if isinstance(error.cause, RLTrainError):
            raise _lost(scope) or error.cause from None
        await scope.proof()
        raise WorkerError(_last_line(_where(scope, error), error.cause)) from error
    except ray.exceptions.RayActorError as error:
        _lose_dead(scope, error.actor_id)
        await scope.proof()
        name = next((one.process.name for one in pending if isinstance(one.process, RayProcess)), "worker")
        raise WorkerLost(
            f"a worker process died during a call of {name}: the process was killed, crashed, or ran out of memory "
            "(verbose=true shows Ray's report)"
        ) from error
    except ray.exceptions.RayError as error:
        # Ray raises RayError if, for example, an object or a machine was lost, or memory ran out.
        first = (redacted(str(error)).strip().splitlines() or [""])[0]
        await scope.proof()
        raise WorkerError(f"{type(error).__name__}: {first} (verbose=true shows Ray's report)") from error


def _lose_reported(scope: ProgressScope, cause: BaseException) -> None:
    """If `cause` is a WorkerLost error that names a process of `scope`, mark this process as lost, and kill it."""
    if isinstance(cause, WorkerLost) and cause.process is not None:
        for process in scope.processes:
            if process.identity == cause.process:
                process.lose(str(cause))


def _lose_dead(scope: ProgressScope, actor_id: str | None) -> None:
    """Mark the process of a Ray actor as lost, because Ray reports the death of the Ray actor.

    If the machine of the Ray actor is lost, Ray's report can be the first sign that the process has died.
    """
    for process in scope.processes:
        if isinstance(process, RayProcess) and process.actor._actor_id.hex() == actor_id:
            process.lose("is gone (killed, crashed, out of memory, or its machine lost)")


def _lost(scope: ProgressScope) -> WorkerLost | None:
    """Return an error that names the lost processes of a `ProgressScope`, or None if no process is lost."""
    scope.check()
    failure = scope.failure.result() if scope.failure is not None and scope.failure.done() else None
    return failure if isinstance(failure, WorkerLost) else None


def _where(scope: ProgressScope, error: Exception) -> str:
    """Return the name of the process in which a call failed, with its pid and the address of its node.

    Args:
        scope: The `ProgressScope` in which the name of the call's process is looked up.
        error: The `RayTaskError` of the failed call. Only the text of a `RayTaskError` names the process in which a
            call failed. If a call failed because a call in another process had failed, the text of the error names both
            processes. The process that is named last in the text of the error is the process whose call failed first.
    """
    actors = {one.actor._actor_id.hex(): one.name for one in scope.processes if isinstance(one, RayProcess)}
    for pid, address, actor in reversed(_FAILED_IN.findall(str(error))):
        return f"{actors.get(actor, 'a worker')} (pid {pid} on {address})"
    return "a worker"


def _last_line(where: str, error: BaseException) -> str:
    said = redacted(str(error)).strip().splitlines()
    return f"{where} failed: {type(error).__name__}: {said[-1] if said else ''} (verbose=true shows its traceback)"
