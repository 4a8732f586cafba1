"""Which processes of a run are gone, stand still or hang: an observer on each machine, and what is made of it.

An observer looks from outside: at `/proc`, and at the counter that a process keeps. That of the driver's own machine is
an object in the driver; others are tiny Ray actors.
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

PROCESSES, STACKS = "processes.json", "stacks"  # in a run's output
LOOK_EVERY_S = 1.0
STOPPED_S = 3.0  # for so long may a process be stopped (SIGSTOP) before it counts as dead
_STACKS_S = 0.3  # in which a process that can has written its stacks down
_REMOTE_S = 10.0  # for what is asked of another machine's observer
_FRAMES = 3  # shown of each process


@dataclass(frozen=True)
class Sight:
    """What is seen of a process: its state (as of `progress.state_of`), its ticks, and calls under way."""

    state: str
    ticks: int = 0
    calls: int = 0


class Observer:
    """Looks at processes of its own machine, and ends them."""

    def look(self, processes: Sequence[Process]) -> list[Sight]:
        """What each is doing."""
        return [_sight(process) for process in processes]

    def stacks(self, processes: Sequence[Process]) -> list[str]:
        """The stacks of all threads of each; "" of one that is stopped or gone."""
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
        """End them at once, stopped ones too, and what they have started, also where they are gone already."""
        for process in processes:
            below = descendants(process.pid) if state_of(process.pid, process.began) else []
            # The system gives nobody the number of a group that has members left.
            leads = began_of(process.pid) in (None, process.began) and process.pid != os.getpgrp()
            files = leftovers.shared_files({process.pid, *below, *(leftovers.group_of(process.pid) if leads else ())})
            _signal(process, signal.SIGKILL)
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if leads:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            leftovers.remove(files)  # an engine that is killed does not do so itself


def _sight(process: Process) -> Sight:
    state = state_of(process.pid, process.began)
    with contextlib.suppress(OSError):
        return Sight(state, *counts_of(process)) if state else Sight("")
    return Sight("")  # it ended in this very moment


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if state_of(process.pid, process.began):  # not to another that has its number now
            os.kill(process.pid, number)


class Watch:
    """The observers of all machines of a run, started as they are needed.

    Args:
        hang_timeout_s: without any progress, after which a busy process counts as dead.
        start_timeout_s: in which a process must have started.
        folder: of the run's output, where it says which processes there are, and writes the stacks of those that hang.
        daemons: Ray's own processes, on which all others depend.
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
        self.others: dict[str, Any] = {}  # by machine
        self.asked: dict[str, tuple[Any, list[Process]]] = {}  # what an observer elsewhere has not answered yet
        self.seen: dict[Process, Sight] = {}  # what they said last
        self.named: dict[str, Process] = {}
        self.vigils: list[Vigil] = []  # of all groups of the run

    def name(self, name: str, process: Process) -> None:
        """Write down what a process is called, for people who look at a run, in place of what was called so before."""
        self.named[name] = process
        table = {one: {"pid": process.pid, "node": process.node} for one, process in sorted(self.named.items())}
        if self.folder is not None and self.folder.is_dir():
            partial = self.folder / f"{PROCESSES}.partial"
            with contextlib.suppress(OSError):
                partial.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
                partial.replace(self.folder / PROCESSES)

    def look(self, processes: Sequence[Process]) -> list[Sight | None]:
        """What each is doing, without waiting: of another machine, what was last heard from there, or None.

        Raises ClusterLost when a daemon of Ray has died: then its workers die too, and are not to blame.
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
        """The observer of another machine."""
        if node not in self.others:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy}
            self.others[node] = ray.remote(**options)(Observer).remote()
        return self.others[node]

    def kill(self, processes: Iterable[Process]) -> None:
        """End these processes; returns at once."""
        for process in processes:
            if process.node == self.here:
                self.own.kill([process])
            elif process.node in self.others:
                self.others[process.node].kill.remote([process])

    def stacks(self, processes: Sequence[Process], names: Sequence[str]) -> list[str]:
        """Have these processes' stacks written to files of these names; returns the innermost frames of each."""
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
    """What is known of the processes of one group, by rank: since when each is stopped or makes no progress.

    Args:
        watch: sees them.
        name: what each is called, with its rank.
        size: how many there are; each counts as starting until `expect` says where to hear from it.
    """

    def __init__(self, watch: Watch, name: str, size: int) -> None:
        self.watch, self.name, self.looked = watch, name, 0.0
        self.processes: list[Process | None] = [None] * size
        self.awaited: list[Any] = [None] * size  # by rank: a call whose result is its Process
        self.born, self.moved = [0.0] * size, [0.0] * size
        self.sights: list[Sight | None] = [None] * size
        self.stopped: list[float | None] = [None] * size
        self.gone: dict[int, str] = {}  # and how
        watch.vigils.append(self)

    def expect(self, rank: int, introduction: Any) -> None:
        """A new process takes this rank's place; this call of it will say which it is."""
        self.processes[rank], self.awaited[rank], self.sights[rank] = None, introduction, None
        self.born[rank] = self.moved[rank] = time.monotonic()
        self.stopped[rank] = None
        self.gone.pop(rank, None)

    def look(self, *, at_once: bool = False) -> None:
        """Look at all processes, unless that was done a moment ago."""
        now = time.monotonic()
        if not at_once and now < self.looked + LOOK_EVERY_S:
            return
        self.looked = now
        for vigil in self.watch.vigils:  # a process has its name before anybody waits for its group
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
        """Learn which processes have started since, and which have not in time.

        Args:
            patience_s: how long to wait for the introduction of each.
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
        """What these have to do begins now."""
        now = time.monotonic()
        for rank in ranks:
            self.moved[rank] = now

    def still_s(self, ranks: Iterable[int]) -> float:
        """For how long none of these ranks has got on."""
        return time.monotonic() - max((self.moved[rank] for rank in ranks), default=time.monotonic())

    def busy(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that are inside a call."""
        return [rank for rank in ranks if (sight := self.sights[rank]) is not None and sight.calls > 0]

    def give_up(self, rank: int, how: str) -> None:
        """This process counts as dead from now on, and is made so."""
        self.gone[rank] = how
        if process := self.processes[rank]:
            self.watch.kill([process])

    def end_stopped(self) -> None:
        """End the processes that are stopped: they would outlive Ray."""
        for rank, sight in enumerate(self.sights):
            if sight is not None and sight.state == "T":
                self.give_up(rank, "was stopped")

    def stacks(self, ranks: Sequence[int], phase: str) -> dict[int, str]:
        """Write down the stacks of these ranks, which hang in `phase`; returns the innermost frames of each."""
        known = [(rank, process) for rank in ranks if (process := self.processes[rank])]
        names = [f"{phase}_{self.name.replace(' ', '_')}_{rank}_{process.pid}" for rank, process in known]
        frames = self.watch.stacks([process for _, process in known], names)
        return {rank: found for (rank, _), found in zip(known, frames, strict=True)}

    def place(self, rank: int) -> str:
        """Which process that is, for messages."""
        process = self.processes[rank]
        return f"pid {process.pid} on node {process.node[:8]}" if process else "starting"


def innermost(stacks: str) -> str:
    """The innermost frames of the thread that does a group's work, as "function (file:line) < its caller"."""
    threads = [section for section in stacks.split("\n\n") if section.strip()]
    ours = [section for section in threads if "/workers/" in section]
    working = [section for section in ours if "/threading.py" not in section and "/queue.py" not in section]
    for section in (working or ours or threads)[-1:]:
        frames = [line.strip() for line in section.splitlines() if line.strip().startswith("File ")]
        return " < ".join(map(_short, frames[:_FRAMES]))
    return ""


def _short(frame: str) -> str:
    """`File "/a/b.py", line 3 in f` as "f (b.py:3)"."""
    path, _, rest = frame.removeprefix('File "').partition('", line ')
    line, _, function = rest.partition(" in ")
    return f"{function} ({Path(path).name}:{line})"


def _node_lives(node: str) -> bool:
    import ray

    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())
