"""Code that observes and kills processes of one machine, through `/proc` and the progress counter of each process."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.cluster import leftovers
from workers.cluster.process_tree import descendants
from workers.cluster.progress import STACKS_SIGNAL, Process, began_of, counts_of, stacks_of, state_of

_STACKS_S = 0.3  # Seconds to wait while processes write their stack traces.
_FRAMES = 3  # Maximum number of stack frames that a message shows for each process.


@dataclass(frozen=True)
class Sight:
    """Observed status of a process.

    Attributes:
        state: State of the process, as returned by `progress.state_of`.
        ticks: Number of `progress.tick` calls in the process so far.
        calls: Number of calls (blocks in `with progress.call()`) that run in the process, without the calls that are
            waiting for other processes.
    """

    state: str
    ticks: int = 0
    calls: int = 0


class Observer:
    """Object that observes and kills processes of the machine on which the object was created."""

    def look(self, processes: Sequence[Process]) -> list[Sight]:
        """Return the observed status of each process."""
        return [_sight(process) for process in processes]

    def stacks(self, processes: Sequence[Process]) -> list[str]:
        """Return the stack traces of all threads of each process, or "" for a stopped or dead process."""
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
        """Kill processes and their descendants at once, even processes that are stopped by SIGSTOP.

        The descendants of a process are killed even if the process itself has already ended.
        """
        for process in processes:
            below = descendants(process.pid) if state_of(process.pid, process.began) else []
            below += leftovers.started_by(leftovers.parent_mark(process.pid, process.began))
            # The kernel does not reuse a pid while a process group whose id equals the pid has members.
            leads = began_of(process.pid) in (None, process.began) and process.pid != os.getpgrp()
            files = leftovers.shared_files({process.pid, *below, *(leftovers.group_of(process.pid) if leads else ())})
            _signal(process, signal.SIGKILL)
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if leads:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            leftovers.remove(files)  # a killed engine cannot remove its shared-memory files itself


def _sight(process: Process) -> Sight:
    state = state_of(process.pid, process.began)
    with contextlib.suppress(OSError):
        return Sight(state, *counts_of(process)) if state else Sight("")
    return Sight("")  # the process ended after `state_of` had read its state


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if state_of(process.pid, process.began):  # a later process with the same pid must get no signal
            os.kill(process.pid, number)


def innermost(stacks: str) -> str:
    """Return the innermost frames of the thread that runs worker code, as "function (file:line) < calling function".

    Args:
        stacks: Stack traces of all threads of a process, as `faulthandler` writes them.
    """
    threads = [section for section in stacks.split("\n\n") if section.strip()]
    ours = [section for section in threads if "/workers/" in section]
    working = [section for section in ours if "/threading.py" not in section and "/queue.py" not in section]
    for section in (working or ours or threads)[-1:]:
        frames = [line.strip() for line in section.splitlines() if line.strip().startswith("File ")]
        return " < ".join(map(_short, frames[:_FRAMES]))
    return ""


def _short(frame: str) -> str:
    """Shorten the text of a stack frame: `File "/a/b.py", line 3 in f` becomes "f (b.py:3)"."""
    path, _, rest = frame.removeprefix('File "').partition('", line ')
    line, _, function = rest.partition(" in ")
    return f"{function} ({Path(path).name}:{line})"
