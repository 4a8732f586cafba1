"""Detects processes of a run that have ended, are stopped or hang, and interrupts all waits for these processes.

One task in the driver observes the run's processes on the driver's machine once a second, and also as soon as one of
these processes ends. Each observation reads the state of every process from `/proc`, and every process's progress
counter. On each machine other than the driver's, a small Ray actor observes the run's processes on that machine.
"""

import asyncio
import contextlib
import functools
import json
import socket
import time
from collections.abc import Awaitable, Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rltrain.base.background_tasks import BackgroundTasks, Changes, cancelled
from rltrain.base.errors import ClusterLost, WorkerLost
from workers.cluster.daemon_threads import in_daemon_thread
from workers.cluster.exits import Exits
from workers.cluster.observer import Observer, Sight, innermost
from workers.cluster.progress import Process
from workers.cluster.ray_daemons import Daemons

_NAMED = 3  # A message names at most 3 of the processes whose results the driver awaits.
# Names, in the run's output folder, of the file with the table of processes and of the folder with the stack traces.
PROCESSES, STACKS = "processes.json", "stacks"
LOOK_EVERY_S = 1.0
STOPPED_S = 3.0  # Seconds after which a stopped process (SIGSTOP) counts as dead.
_PROOF_S = 2.0  # Seconds to wait, after a call has failed, for evidence that a process's death caused the failure.
_REMOTE_S = 10.0  # Timeout in seconds of a request to the observer actor of a remote machine.
_PORT_S = 1.0  # Timeout in seconds of a connection to the raylet of a remote machine.
_NODE_LOST = "is gone with its node (the node's raylet ended, or the node lost power or its network connection)"
T = TypeVar("T")


class WatchedProcess:
    """Last observed state of one process of a run, and the reason why the process was lost, if it was lost.

    A process is lost if it died, was stopped or hung.

    Args:
        name: Name of the process in messages and in `processes.json`, such as "training rank 0".
        liveness: The `Liveness` object that observes the process. If `liveness` is None, only Ray reports the process's
            death, and hangs are not detected.
        changes: Object that wakes waiting coroutines when the process is lost (dies, is stopped or hangs).

    Attributes:
        identity: Identity (pid, start time and machine) that the process has reported, or None before the report.
        phase: Name of the last call that was started on the process, used in error messages.
        how_lost: How the process was lost (died, was stopped or hung), or "" if the process has not been lost.
    """

    def __init__(self, name: str, liveness: "Liveness | None", changes: Changes | None = None) -> None:
        self.name, self.liveness, self.phase = name, liveness, "starting"
        self.identity: Process | None = None
        self.how_lost = ""
        self.sight: Sight | None = None
        self.seen_at = time.monotonic()  # time of the last observation of the process
        self.moved = time.monotonic()  # time of the last observation that showed progress of the process
        self.stopped_at: float | None = None
        self._changes = changes or Changes()

    @property
    def busy(self) -> bool:
        """Return whether the process was running a call when the process was last observed."""
        return self.sight is not None and self.sight.calls > 0

    def lose(self, how: str) -> None:
        """Mark the process as lost for the reason `how`, and kill the process.

        Do nothing if the process is already marked as lost.
        """
        if not self.how_lost:
            self.how_lost = how
            self._changes.notify()
            if self.liveness is not None:
                self.liveness.lost(self)

    def take(self, sight: Sight, now: float) -> None:
        """Store `sight`, the latest observed status of this worker process.

        If the process has ended, or has been stopped (SIGSTOP) for `STOPPED_S` seconds, mark the process as lost.
        """
        before, self.sight, self.seen_at = self.sight, sight, now
        if before is None or before.ticks != sight.ticks:
            self.moved = now
        if not sight.state:
            self.lose("is gone (killed, crashed or out of memory)")
        if sight.state != "T":
            self.stopped_at = None
        elif self.stopped_at is None:
            self.stopped_at = now
        elif now >= self.stopped_at + STOPPED_S:
            self.lose(f"has been stopped (SIGSTOP) for {STOPPED_S:g} s")

    async def unless_lost(self, awaitable: Awaitable[T]) -> T:
        """Return the result of `awaitable`, which depends on this worker process, unless the process is lost first.

        `unless_lost` has no timeout: the caller keeps waiting even while this worker process is idle.

        Raises WorkerLost if the process is marked as lost.
        """
        result = asyncio.ensure_future(awaitable)
        lost = asyncio.ensure_future(self._changes.until(lambda: self.how_lost))
        try:
            await asyncio.wait({result, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise WorkerLost(f"{self} {self.how_lost}")
            return result.result()
        finally:
            await cancelled(result, lost)

    @property
    def loss(self) -> str:
        """Return where the process ran and how it was lost, or "" if the process has not been lost."""
        return self.how_lost and f"({self._where}) {self.how_lost}"

    @property
    def _where(self) -> str:
        return f"pid {self.identity.pid} on {self.identity.host}" if self.identity else "starting"

    def __str__(self) -> str:
        return f"{self.name} ({self._where})"


class Liveness:
    """Monitor of the processes of a run, and of the Ray daemons that all of the processes need.

    Args:
        hang_timeout_s: Seconds without progress after which a busy process counts as hanging.
        start_timeout_s: Seconds within which a process must start.
        tasks: The run's background tasks, which are interrupted when a Ray daemon dies.
        here: Ray's node id of the driver's machine.
        folder: Output folder of the run, into which the table of processes and the stack traces of hanging processes
            are written.
        daemons: The Ray daemons whose death ends the run.
    """

    def __init__(
        self,
        *,
        hang_timeout_s: float,
        start_timeout_s: float,
        tasks: BackgroundTasks,
        here: str,
        folder: Path | None = None,
        daemons: Daemons | None = None,
    ) -> None:
        self.hang_timeout_s, self.start_timeout_s, self.folder = hang_timeout_s, start_timeout_s, folder
        self.tasks, self.here, self.own, self.daemons = tasks, here, Observer(), daemons or Daemons()
        self.processes: list[WatchedProcess] = []
        self.named: dict[str, Process] = {}
        self.scopes: set[ProgressScope] = set()
        self._others: dict[str, Any] = {}  # maps each remote machine's Ray node id to the machine's observer actor
        self._exits = Exits()
        self._interrupted = False
        tasks.start(self._observe_all(), "liveness")

    def admit(self, process: WatchedProcess, introduction: Any) -> None:
        """Start observing a new process.

        Args:
            process: The process to observe.
            introduction: Ray reference to the result of `Host.introduce`, the remote call with which the new process
                reports its identity.
        """
        self.processes.append(process)
        self.tasks.start(self._introduce(process, introduction), f"introduction of {process.name}")

    def dismiss(self, process: WatchedProcess) -> None:
        """Kill a process, even if the process is stopped or hangs, and stop observing the process."""
        process.lose("is being replaced")
        self.processes.remove(process)

    def lost(self, process: WatchedProcess) -> None:
        """Kill a process that was marked as lost, and wake the background task `_observe_all`.

        The task `_observe_all` makes all coroutines that wait for a lost process raise WorkerLost.
        """
        if process.identity is not None:
            self.kill([process.identity])
        self._exits.notify()

    def waited_for(self) -> str:
        """Return the names of the busy processes whose results the driver awaits; "" if it awaits no busy process.

        `waited_for` may be called in any thread.
        """
        # The event loop's thread changes the set of scopes. The copy is made in one step of the interpreter.
        awaited = dict.fromkeys(process for scope in list(self.scopes) for process in scope.processes)
        names = [str(process) for process in awaited if process.busy]
        more = [f"{len(names) - _NAMED} more processes"] if len(names) > _NAMED else []
        return ", ".join([*names[:_NAMED], *more])

    def look(self) -> None:
        """Observe the run's processes on this machine immediately."""
        now = time.monotonic()
        here = [(p, p.identity) for p in self.processes if p.identity and p.identity.node == self.here]
        alive = [(process, identity) for process, identity in here if not process.how_lost]
        sights = self.own.look([identity for _, identity in alive])
        for (process, _), sight in zip(alive, sights, strict=True):
            process.take(sight, now)

    def kill_stopped(self) -> None:
        """Kill the run's processes on this machine that are stopped (SIGSTOP).

        Processes that are stopped by SIGSTOP would continue to exist after Ray has shut down.
        """
        self.look()
        for process in list(self.processes):
            if process.sight is not None and process.sight.state == "T":
                process.lose("was stopped")

    async def nodes_settled(self) -> None:
        """Wait until Ray knows which raylets have ended, so that Ray places no new process on their nodes.

        Ray needs several seconds to notice that a raylet has ended. A process that Ray places on the node of an ended
        raylet cannot start. `nodes_settled` waits at most `start_timeout_s` seconds.

        Raises ClusterLost if a Ray daemon that the run needs has died.
        """
        deadline = time.monotonic() + self.start_timeout_s
        unnoticed = True
        while unnoticed and time.monotonic() < deadline:
            asking = asyncio.ensure_future(in_daemon_thread(_unnoticed))
            while not asking.done():
                self.daemons.check()  # if gcs_server has died, `ray.nodes` blocks for minutes
                await asyncio.wait({asking}, timeout=LOOK_EVERY_S)
            if unnoticed := asking.result():
                await asyncio.sleep(LOOK_EVERY_S)

    def kill(self, processes: Iterable[Process]) -> None:
        """Kill processes and their descendants, without waiting until the killed processes have ended."""
        for process in processes:
            if process.node == self.here:
                self.own.kill([process])
            elif process.node in self._others:
                self._others[process.node].kill.remote([process])

    async def stacks(self, processes: Sequence[WatchedProcess]) -> dict[WatchedProcess, str]:
        """Write the stack traces of processes into the output folder.

        Return the innermost stack frames of each process.
        """
        known = {process: process.identity for process in processes if process.identity is not None}
        texts: dict[Process, str] = {}
        for node in {identity.node for identity in known.values()}:
            there = [identity for identity in known.values() if identity.node == node]
            texts.update(zip(there, await self._stacks_on(node, there), strict=True))
        for process, identity in known.items():
            name = f"{process.phase}_{process.name.replace(' ', '_')}_{identity.pid}.txt"
            if self.folder is not None and self.folder.is_dir() and texts[identity]:
                with contextlib.suppress(OSError):
                    (self.folder / STACKS).mkdir(exist_ok=True)
                    (self.folder / STACKS / name).write_text(texts[identity], "utf-8")
        return {process: innermost(texts[identity]) for process, identity in known.items()}

    async def _stacks_on(self, node: str, processes: list[Process]) -> list[str]:
        if node == self.here:
            return await asyncio.to_thread(self.own.stacks, processes)
        import ray

        try:
            async with asyncio.timeout(_REMOTE_S):
                found: list[str] = await asyncio.wrap_future(self._observer(node).stacks.remote(processes).future())
                return found
        except (ray.exceptions.RayError, TimeoutError):
            return [""] * len(processes)

    async def _observe_all(self) -> None:
        """Observe Ray's daemons and the run's processes on the driver's machine until this task is cancelled."""
        with contextlib.closing(self._exits):
            for pid in self.daemons.local_pids():
                self._exits.add(pid)
            while True:
                self._check_daemons()
                self.look()
                for scope in list(self.scopes):
                    await scope.check_progress()
                await self._exits.wait(LOOK_EVERY_S)

    def _check_daemons(self) -> None:
        try:
            self.daemons.check()
        except ClusterLost as error:
            for scope in self.scopes:
                scope.fail(error)
        if not self._interrupted:
            try:
                self.daemons.check(at_rest=True)
            except ClusterLost as error:
                self._interrupted = True
                self.tasks.interrupt(error)

    async def _introduce(self, process: WatchedProcess, introduction: Any) -> None:
        """Wait until a new process reports its identity.

        Mark the process as lost if the process does not report its identity within `start_timeout_s` seconds.
        """
        import ray

        try:
            async with asyncio.timeout(self.start_timeout_s):
                identity: Process | None = await asyncio.wrap_future(introduction.future())
        except TimeoutError:
            limit = f"placement.start_timeout_s={self.start_timeout_s:g} s"
            process.lose(f"did not start within {limit}; are enough resources free?")
        except ray.exceptions.RayError:
            process.lose("died while it started")
        else:
            if identity is not None:
                process.identity = identity
                self._name(process.name, identity)
                await self._observe_new(process, identity)

    async def _observe_new(self, process: WatchedProcess, identity: Process) -> None:
        if process.how_lost:  # the process was marked as lost before it reported its pid
            self.kill([identity])
        elif identity.node == self.here:
            self._exits.add(identity.pid)
        elif identity.node not in self._others:
            self._observer(identity.node)
            self.tasks.start(self._observe_remote(identity.node), f"observer of node {identity.node[:8]}")

    async def _observe_remote(self, node: str) -> None:
        """Observe the run's processes on the remote machine `node`, until the machine is lost."""
        import ray

        while True:
            there = [(process, process.identity) for process in self.processes if process.identity]
            there = [(p, identity) for p, identity in there if identity.node == node and not p.how_lost]
            try:
                reply = self._observer(node).look.remote([identity for _, identity in there])
                sights: list[Sight] = await asyncio.wrap_future(reply.future())
            except ray.exceptions.RayError:
                del self._others[node]
                if not await in_daemon_thread(functools.partial(_node_lives, node)):
                    for process, _ in there:
                        process.lose(_NODE_LOST)
                    return
                sights = []
            for (process, _), sight in zip(there, sights, strict=False):
                process.take(sight, time.monotonic())
            await asyncio.sleep(LOOK_EVERY_S)

    def _observer(self, node: str) -> Any:
        """Return the observer actor of the machine `node`, and start the actor if it does not exist yet."""
        if node not in self._others:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy}
            self._others[node] = ray.remote(**options)(Observer).remote()
        return self._others[node]

    def _name(self, name: str, process: Process) -> None:
        """Add a process to the table in the output folder's file `processes.json`.

        Users can read the table of processes to inspect a run.
        """
        self.named[name] = process
        table = {one: {"pid": process.pid, "node": process.node} for one, process in sorted(self.named.items())}
        if self.folder is not None and self.folder.is_dir():
            partial = self.folder / f"{PROCESSES}.partial"
            with contextlib.suppress(OSError):
                partial.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
                partial.replace(self.folder / PROCESSES)


class ProgressScope:
    """Context manager whose method `until` raises WorkerLost if a given process is lost or all given processes hang.

    Args:
        processes: The processes that are needed to produce the result for which the method `until` waits.
        limit_s: All processes in `processes` count as hanging if none of these processes makes progress for `limit_s`
            seconds. If `limit_s` is None, the setting `trainer.hang_timeout_s` applies.
    """

    def __init__(self, processes: Collection[WatchedProcess], limit_s: float | None = None) -> None:
        self.processes, self.limit_s = list(processes), limit_s
        self.liveness = next((process.liveness for process in processes), None)
        self.failure: asyncio.Future[WorkerLost | ClusterLost] | None = None

    def __enter__(self) -> Self:
        self.failure = asyncio.get_running_loop().create_future()
        for process in self.processes:
            process.moved = time.monotonic()
        if self.liveness is not None:
            self.liveness.scopes.add(self)
            self.liveness.look()
        self.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.liveness is not None:
            self.liveness.scopes.discard(self)

    async def until(self, awaitable: Awaitable[T]) -> T:
        """Wait for a result that depends on the processes of this `ProgressScope`.

        Raises:
            WorkerLost: A process of this `ProgressScope` is lost, or no process of this `ProgressScope` makes progress.
            ClusterLost: A Ray daemon that the run needs has died.
        """
        assert self.failure is not None, "a ProgressScope must be used inside its `with` block"
        result = asyncio.ensure_future(awaitable)
        try:
            either: set[asyncio.Future[Any]] = {result, self.failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            raise self.failure.result()
        finally:
            await cancelled(result)

    async def proof(self) -> None:
        """Raise WorkerLost if a process of this `ProgressScope` is found to be lost.

        `proof` is called after an error that the death of a process may have caused. When a process dies, another
        process often fails before the driver notices the death, for example because a connection breaks. `proof`
        returns without an error once every process has been observed alive at least `_PROOF_S` seconds after the call
        of `proof`. If a process cannot be observed because its machine does not reply, `proof` waits until Ray declares
        the machine dead, but at most `hang_timeout_s` seconds.
        """
        assert self.failure is not None, "a ProgressScope must be used inside its `with` block"
        if self.liveness is not None:
            self.liveness.look()
            self.check()
            due = time.monotonic() + _PROOF_S
            await asyncio.wait({self.failure}, timeout=_PROOF_S)
            while self._unseen_since(due) and time.monotonic() < due + self.liveness.hang_timeout_s:
                await asyncio.wait({self.failure}, timeout=LOOK_EVERY_S)
        if self.failure.done():
            raise self.failure.result()

    def _unseen_since(self, due: float) -> bool:
        """Return whether a process on another machine than the driver's has not been observed since the time `due`.

        Return False if `failure` already contains an error.
        """
        if self.liveness is None or self.failure is None or self.failure.done():
            return False
        here = self.liveness.here
        return any(one.identity and one.identity.node != here and one.seen_at < due for one in self.processes)

    def check(self) -> None:
        """Make all calls of `until` raise WorkerLost if a process of this `ProgressScope` is lost."""
        if lost := [f"{one.phase}: {one} {one.how_lost}" for one in self.processes if one.how_lost]:
            self.fail(WorkerLost("; ".join(lost)))

    async def check_progress(self) -> None:
        """Make all calls of `until` raise WorkerLost if a process of this `ProgressScope` is lost or all processes
        hang.

        If all processes hang, the error contains the names and stack frames of the busy processes. If no process is
        busy, the error contains the names and stack frames of all processes of the `ProgressScope`.
        """
        self.check()
        if self.liveness is None or (self.failure is not None and self.failure.done()) or not self.processes:
            return
        limit = self.liveness.hang_timeout_s if self.limit_s is None else self.limit_s
        if time.monotonic() < max(process.moved for process in self.processes) + limit:
            return
        blamed = [process for process in self.processes if process.busy] or self.processes
        frames = await self.liveness.stacks(blamed)
        if self not in self.liveness.scopes:
            return  # the awaited results arrived while `stacks` read the stack traces
        said = [f"{one.phase}: {one} hangs in {frames.get(one) or '?'}" for one in blamed]
        for process in blamed:
            process.lose(f"made no progress for {limit:g} s")
        self.fail(WorkerLost(f"no progress for {limit:g} s: {'; '.join(said)}"))

    def fail(self, error: WorkerLost | ClusterLost) -> None:
        """Make all calls of `until` raise `error`, unless an earlier call of `fail` has given them another error."""
        if self.failure is not None and not self.failure.done():
            self.failure.set_result(error)


def _unnoticed() -> bool:
    """Return whether Ray counts any node as alive although the node's raylet has ended."""
    import ray

    return any(_refused(one["NodeManagerAddress"], one["NodeManagerPort"]) for one in ray.nodes() if one["Alive"])


def _node_lives(node: str) -> bool:
    """Return True if Ray counts a node as alive and the node's raylet does not refuse connections, else False.

    Ray counts a node as alive for some time after its raylet has died, although all workers of the node have ended.
    """
    import ray

    known = next((one for one in ray.nodes() if one["NodeID"] == node and one["Alive"]), None)
    return known is not None and not _refused(known["NodeManagerAddress"], known["NodeManagerPort"])


def _refused(host: str, port: int) -> bool:
    """Return whether a machine refuses connections to a port because no process listens on the port."""
    try:
        socket.create_connection((host, port), timeout=_PORT_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
