"""Detects which processes of a run are gone, are stopped or hang.

An observer on each machine reads `/proc` and the progress counter of each process. The observer of the driver's machine
is an object in the driver. The observers of other machines are small Ray actors.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.cluster import leftovers
from workers.cluster.process_tree import descendants
from workers.cluster.progress import STACKS_SIGNAL, Process, began_of, counts_of, stacks_of, state_of
from workers.cluster.ray_daemons import Daemons

PROCESSES, STACKS = "processes.json", "stacks"  # file and folder in a run's output
LOOK_EVERY_S = 1.0
STOPPED_S = 3.0  # seconds after which a stopped process (SIGSTOP) counts as dead
_STACKS_S = 0.3  # seconds that a process gets to write its stack traces
_REMOTE_S = 10.0  # timeout in seconds of a request to the observer of another machine
_FRAMES = 3  # stack frames shown of each process


@dataclass(frozen=True)
class Sight:
    """Observed status of a process: its state (see `progress.state_of`), its ticks and its number of running calls."""

    state: str
    ticks: int = 0
    calls: int = 0


class Observer:
    """Observes and kills processes of its own machine."""

    def look(self, processes: Sequence[Process]) -> list[Sight]:
        """Return the observed status of each process."""
        return [_sight(process) for process in processes]

    def stacks(self, processes: Sequence[Process]) -> list[str]:
        """Return the stack traces of all threads of each process. The text is "" for a stopped or dead process."""
        for process in processes:
            _signal(process, STACKS_SIGNAL)
        time.sleep(_STACKS_S)
        found = []
        for process in processes:
            text = ""
            with contextlib.suppress(OSError):
                text = stacks_of(process)
            found.append(text)
        return found

    def kill(self, processes: Sequence[Process]) -> None:
        """Kill these processes and their descendants at once, even if they are stopped.

        Descendants are also killed if their process is gone already.
        """
        for process in processes:
            below = descendants(process.pid) if state_of(process.pid, process.began) else []
            # The kernel does not reuse a pid while the process group with that number has members.
            leads = began_of(process.pid) in (None, process.began) and process.pid != os.getpgrp()
            files = leftovers.shared_files({process.pid, *below, *(leftovers.group_of(process.pid) if leads else ())})
            _signal(process, signal.SIGKILL)
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if leads:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            leftovers.remove(files)  # a killed engine does not remove its own files


def _sight(process: Process) -> Sight:
    state = state_of(process.pid, process.began)
    with contextlib.suppress(OSError):
        return Sight(state, *counts_of(process)) if state else Sight("")
    return Sight("")  # the process has ended since its state was read


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if state_of(process.pid, process.began):  # otherwise another process may have its pid now
            os.kill(process.pid, number)


class Watch:
    """The observers of all machines of a run. An observer starts when it is first needed.

    Args:
        hang_timeout_s: Seconds without progress after which a busy process counts as dead.
        start_timeout_s: Seconds in which a process must start.
        folder: Output folder of the run. It receives the table of processes and the stack traces of hanging processes.
        daemons: Ray's daemons, on which all other processes depend.
    """

    def __init__(
        self,
        *,
        hang_timeout_s: float,
        start_timeout_s: float,
        folder: Path | None = None,
        daemons: Daemons | None = None,
    ) -> None:
        import ray

        self.hang_timeout_s, self.start_timeout_s, self.folder = hang_timeout_s, start_timeout_s, folder
        self.daemons = daemons or Daemons()
        self.here, self.own = ray.get_runtime_context().get_node_id(), Observer()
        self.others: dict[str, Any] = {}  # observer actor of each other machine, by node id
        self.asked: dict[str, tuple[Any, list[Process]]] = {}  # unanswered request to each observer, by node id
        self.seen: dict[Process, Sight] = {}  # last status received from other machines
        self.named: dict[str, Process] = {}
        self.vigils: list[Vigil] = []  # one per group of the run

    def name(self, name: str, process: Process) -> None:
        """Record the name of a process in the output folder, for people who inspect a run.

        The process replaces an earlier one of the same name.
        """
        self.named[name] = process
        table = {one: {"pid": process.pid, "node": process.node} for one, process in sorted(self.named.items())}
        if self.folder is not None and self.folder.is_dir():
            partial = self.folder / f"{PROCESSES}.partial"
            with contextlib.suppress(OSError):
                partial.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
                partial.replace(self.folder / PROCESSES)

    def look(self, processes: Sequence[Process]) -> list[Sight | None]:
        """Return the observed status of each process, without waiting.

        For a process of another machine, this is the last status received, or None if there is none yet. Raises
        ClusterLost if a Ray daemon has died, because its workers then die too and are not to blame.
        """
        self.daemons.check()
        local = [process for process in processes if process.node == self.here]
        found: dict[Process, Sight | None] = dict(zip(local, self.own.look(local), strict=True))
        for node in {process.node for process in processes} - {self.here}:
            self._ask(node, [process for process in processes if process.node == node])
        return [found[process] if process in found else self.seen.get(process) for process in processes]

    def _ask(self, node: str, processes: list[Process]) -> None:
        import ray

        if node in self.asked:
            ref, asked_for = self.asked[node]
            if not ray.wait([ref], timeout=0)[0]:
                return
            del self.asked[node]
            try:
                self.seen.update(zip(asked_for, ray.get(ref), strict=True))
            except ray.exceptions.RayError:
                del self.others[node]
                if not _node_lives(node):
                    self.seen.update((process, Sight("")) for process in {*asked_for, *processes})
                    return
        if self.seen.get(processes[0]) == Sight("") and not _node_lives(node):
            self.seen.update((process, Sight("")) for process in processes)
            return
        self.asked[node] = self._observer(node).look.remote(processes), processes

    def _observer(self, node: str) -> Any:
        """Return the observer of another machine, and start it if necessary."""
        if node not in self.others:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy}
            self.others[node] = ray.remote(**options)(Observer).remote()
        return self.others[node]

    def kill(self, processes: Iterable[Process]) -> None:
        """Kill these processes. Returns at once."""
        for process in processes:
            if process.node == self.here:
                self.own.kill([process])
            elif process.node in self.others:
                self.others[process.node].kill.remote([process])

    def stacks(self, processes: Sequence[Process], names: Sequence[str]) -> list[str]:
        """Write the stack traces of these processes to files of these names. Returns the innermost frames of each."""
        import ray

        texts = dict.fromkeys(processes, "")
        for node in {process.node for process in processes}:
            there = [process for process in processes if process.node == node]
            if node == self.here:
                texts.update(zip(there, self.own.stacks(there), strict=True))
                continue
            with contextlib.suppress(ray.exceptions.RayError):
                found = ray.get(self._observer(node).stacks.remote(there), timeout=_REMOTE_S)
                texts.update(zip(there, found, strict=True))
        for process, name in zip(processes, names, strict=True):
            if self.folder is not None and self.folder.is_dir() and texts[process]:
                with contextlib.suppress(OSError):
                    (self.folder / STACKS).mkdir(exist_ok=True)
                    (self.folder / STACKS / f"{name}.txt").write_text(texts[process], "utf-8")
        return [innermost(texts[process]) for process in processes]


class Vigil:
    """Status of the processes of one group, by rank. It records since when each is stopped or makes no progress.

    Args:
        watch: Monitor that observes the processes.
        name: Name of the group's processes. The rank is appended to it.
        size: Number of ranks. The process of each rank is unknown until `expect` has received its identity.
    """

    def __init__(self, watch: Watch, name: str, size: int) -> None:
        self.watch, self.name, self.looked = watch, name, 0.0
        self.processes: list[Process | None] = [None] * size
        self.awaited: list[Any] = [None] * size  # by rank: pending call that returns its `Process`
        self.born, self.moved = [0.0] * size, [0.0] * size
        self.sights: list[Sight | None] = [None] * size
        self.stopped: list[float | None] = [None] * size
        self.gone: dict[int, str] = {}  # dead ranks, and how each died
        watch.vigils.append(self)

    def expect(self, rank: int, introduction: Any) -> None:
        """Register a new process for this rank. The result of the pending call `introduction` is its identity."""
        self.processes[rank], self.awaited[rank], self.sights[rank] = None, introduction, None
        self.born[rank] = self.moved[rank] = time.monotonic()
        self.stopped[rank] = None
        self.gone.pop(rank, None)

    def look(self, *, at_once: bool = False) -> None:
        """Update the status of all processes, at most once per `LOOK_EVERY_S` seconds unless `at_once`."""
        now = time.monotonic()
        if not at_once and now < self.looked + LOOK_EVERY_S:
            return
        self.looked = now
        for vigil in self.watch.vigils:  # name the processes of all groups, even before the driver waits for a group
            vigil.greet()
        known = [(rank, process) for rank, process in enumerate(self.processes) if process and rank not in self.gone]
        sights = self.watch.look([process for _, process in known])
        for (rank, _), sight in zip(known, sights, strict=True):
            if sight is not None:
                self._take(rank, sight, now)

    def _take(self, rank: int, sight: Sight, now: float) -> None:
        before, self.sights[rank] = self.sights[rank], sight
        if before is None or before.ticks != sight.ticks:
            self.moved[rank] = now
        if not sight.state:
            self.give_up(rank, "is gone (killed, crashed or out of memory)")
        if sight.state != "T":
            self.stopped[rank] = None
        elif self.stopped[rank] is None:
            self.stopped[rank] = now
        elif now >= (self.stopped[rank] or now) + STOPPED_S:
            self.give_up(rank, f"has been stopped (SIGSTOP) for {STOPPED_S:g} s")

    def greet(self, *, patience_s: float = 0.0) -> None:
        """Record the processes that have started, and mark those that did not start in time as dead.

        Args:
            patience_s: Seconds to wait for the identity of each process.
        """
        import ray

        for rank, call in enumerate(self.awaited):
            if call is None:
                continue
            if ray.wait([call], timeout=patience_s)[0]:
                self.awaited[rank] = None
                try:
                    self.processes[rank] = process = ray.get(call)
                    if process is not None:
                        self.watch.name(f"{self.name} {rank}", process)
                except ray.exceptions.RayError:
                    self.gone[rank] = "died while it started"
            elif time.monotonic() >= self.born[rank] + self.watch.start_timeout_s:
                self.awaited[rank] = None
                limit = self.watch.start_timeout_s
                self.gone[rank] = f"did not start within placement.start_timeout_s={limit:g} s; is there room for it?"

    def touch(self, ranks: Iterable[int]) -> None:
        """Restart the progress timers of these ranks, because their work begins now."""
        now = time.monotonic()
        for rank in ranks:
            self.moved[rank] = now

    def still_s(self, ranks: Iterable[int]) -> float:
        """Return the seconds since the latest progress of any of these ranks."""
        return time.monotonic() - max((self.moved[rank] for rank in ranks), default=time.monotonic())

    def busy(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks, among these, that are inside a call."""
        return [rank for rank in ranks if (sight := self.sights[rank]) is not None and sight.calls > 0]

    def give_up(self, rank: int, how: str) -> None:
        """Mark the process of this rank as dead, and kill it."""
        self.gone[rank] = how
        if process := self.processes[rank]:
            self.watch.kill([process])

    def end_stopped(self) -> None:
        """Kill the processes that are stopped (SIGSTOP), because they would outlive Ray."""
        for rank, sight in enumerate(self.sights):
            if sight is not None and sight.state == "T":
                self.give_up(rank, "was stopped")

    def stacks(self, ranks: Sequence[int], phase: str) -> dict[int, str]:
        """Write the stack traces of these ranks, which hang in `phase`. Returns the innermost frames of each."""
        known = [(rank, process) for rank in ranks if (process := self.processes[rank])]
        names = [f"{phase}_{self.name.replace(' ', '_')}_{rank}_{process.pid}" for rank, process in known]
        frames = self.watch.stacks([process for _, process in known], names)
        return {rank: found for (rank, _), found in zip(known, frames, strict=True)}

    def place(self, rank: int) -> str:
        """Return a text for messages that identifies the process of a rank."""
        process = self.processes[rank]
        return f"pid {process.pid} on node {process.node[:8]}" if process else "starting"


def innermost(stacks: str) -> str:
    """Return the innermost frames of the thread that does a group's work, as "function (file:line) < its caller"."""
    threads = [section for section in stacks.split("\n\n") if section.strip()]
    ours = [section for section in threads if "/workers/" in section]
    working = [section for section in ours if "/threading.py" not in section and "/queue.py" not in section]
    for section in (working or ours or threads)[-1:]:
        frames = [line.strip() for line in section.splitlines() if line.strip().startswith("File ")]
        return " < ".join(map(_short, frames[:_FRAMES]))
    return ""


def _short(frame: str) -> str:
    """Shorten a frame, such as `File "/a/b.py", line 3 in f` to "f (b.py:3)"."""
    path, _, rest = frame.removeprefix('File "').partition('", line ')
    line, _, function = rest.partition(" in ")
    return f"{function} ({Path(path).name}:{line})"


def _node_lives(node: str) -> bool:
    import ray

    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())
