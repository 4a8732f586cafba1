"""Keeps processes for reward functions and stands outside them: whatever they do to one, the guard answers in time.

The guard is what becomes a Ray actor. A process below it costs a tenth of a second to replace, has no threads or files
of Ray's, and can be given limits that would be the end of an actor.
"""

import contextlib
import functools
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from rltrain.base.errors import WorkerError
from rltrain.settings.reward_config import RewardFunctionConfig
from workers.cluster import process_tree
from workers.cluster.progress import Process, announce, began_of, state_of
from workers.reward.child import READY
from workers.reward.messages import RewardRequest, RewardResult

_LOOK_S = 0.05  # between two looks at whether the process is still there; an answer is seen at once
_PIECE_S = 10.0  # between two pieces of a message that has no deadline
_GARBLED = "wrote where its process's answers go"
_START = "import sys; sys.path[:] = {path!r}; from workers.reward.child import serve; serve({descriptor}, {parent})"


@dataclass(frozen=True)
class Ended:
    """The process is gone, and with it the call; `reason` reads after "reward function 'name' ".

    `outside`: what ended it (SIGKILL, SIGSTOP) is more likely not of the function's doing. `results`: as of
    `workers.reward.transport.Lost`.
    """

    timed_out: bool
    reason: str
    outside: bool = field(default=False, repr=False)
    results: list[RewardResult] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Overdue:
    """A call of a function takes long; `results` as of `workers.reward.transport.Held`. `rest` waits on for it."""

    results: list[RewardResult] | None


class _LostError(Exception):
    """The process can go on no longer; the text reads as `Ended.reason`."""


# The processes that this one guards. Ending one ends what it left behind, which must not reach the others.
_LOCK, _GUARDED = threading.Lock(), set[int]()


@dataclass
class _Call:
    """A call under way: what was asked, and what has come of it."""

    requests: Sequence[RewardRequest]
    functions: int
    deadline_s: float
    stepwise: bool
    since: float  # when it was begun, or had its last result
    results: list[RewardResult] = field(default_factory=list)
    given: int = 0  # samples whose results were handed out before
    held: bool = False  # only the next of them is still of interest: the others are scored elsewhere

    @property
    def whole(self) -> int:
        """Samples that are through."""
        last = self.results[-1:]
        return len(self.results) - any(not one.failed and len(one.scores) < self.functions for one in last)

    def add(self, result: RewardResult) -> bool:
        """Take the next result; returns whether it is one that this call can have."""
        if self.whole < len(self.results):
            self.results.pop()
        self.results.append(result)
        self.since = _now()
        row = len(self.results) - 1
        return row < len(self.requests) and result.key == self.requests[row].key

    def new(self, results: list[RewardResult]) -> list[RewardResult]:
        """Those of all these results that were not handed out and are of interest."""
        return results[self.given : self.given + 1] if self.held and self.stepwise else results[self.given :]

    def hold(self) -> list[RewardResult] | None:
        """The results so far, from here on handed out; None where they do not come one by one."""
        new = self.new(self.results) if self.stepwise else None
        self.given, self.held = self.whole, True
        return new


class GuardedWorker:
    """A `RewardWorker` in a process of its own, which is replaced when it ends or takes too long."""

    def __init__(
        self, functions: Sequence[RewardFunctionConfig], *, memory_mb: int, directory: str | None = None, **options: Any
    ) -> None:
        """Start the process without waiting for it.

        Args:
            functions: in the order of the scores.
            memory_mb: what the process may allocate beyond what it has after its imports.
            directory: where it works; None: as this one.
            options: of `RewardWorker`.
        """
        self._first = (list(functions), options, memory_mb)
        self._directory = directory
        self._stopped = self._ready = False
        self._connection: Connection[Any, Any]
        process_tree.adopt_orphans()
        self._start()

    def ping(self) -> bool:
        """Wait until the process has imported everything.

        Raises:
            WorkerError: it ended before, or a function cannot be loaded.
        """
        while not self._ready:
            try:
                said = self._receive(None, math.inf)
            except _LostError as error:
                said = f"while it imported the functions, it {error}"
            if said is None:
                raise WorkerError(f"while it imported the functions, it {self._end()}")
            if said != READY:
                raise WorkerError(said)
            self._ready = True
        return True

    def score(
        self,
        requests: Sequence[RewardRequest],
        *,
        deadline_s: float,
        hold_s: float = math.inf,
        stepwise: bool = False,
        function: int | None = None,
        **limits: Any,
    ) -> list[RewardResult] | Overdue | Ended:
        """See `RewardWorker.score`; the process is killed, with all that it started, when it takes too long.

        Args:
            requests: what to score.
            deadline_s: seconds without a result after which the process is killed.
            hold_s: seconds without a result after which this returns Overdue.
            stepwise: have each result at once; for plain functions alone.
            function: as of `RewardWorker.score`.
            limits: further ones of `RewardWorker.score`.
        """
        functions = 1 if function is not None else len(self._first[0])
        self._call = _Call(requests, functions, deadline_s, stepwise, _now())
        try:
            _wait_at_most(self._connection, deadline_s)
            self._connection.send((requests, limits | {"function": function}, stepwise))
        except OSError:  # it ended after its last answer
            return self._ended("")
        return self._answer(hold_s)

    def rest(self) -> list[RewardResult] | Overdue | Ended:
        """Wait on for a call that is overdue; returns what has come of it since."""
        return self._answer(math.inf)

    def _answer(self, hold_s: float) -> list[RewardResult] | Overdue | Ended:
        call = self._call
        try:
            while True:
                until = call.since + min(call.deadline_s, hold_s if call.whole < len(call.requests) else math.inf)
                said = self._receive(call.since + call.deadline_s, until)
                if isinstance(said, list):
                    if _keys(said) != [request.key for request in call.requests[: len(said)]]:
                        raise _LostError(_GARBLED)
                    return call.new(said)
                if said is None:
                    overdue = self._process.poll() is None and _now() < call.since + call.deadline_s
                    return Overdue(call.hold()) if overdue else self._ended("")
                if not (call.stepwise and isinstance(said, RewardResult) and call.add(said)):
                    raise _LostError(_GARBLED)
        except _LostError as error:
            return self._ended(str(error))

    def _ended(self, said: str) -> Ended:
        """End the process that a call was lost in, and start another; `said`: why it could not go on."""
        status, began = self._process.poll(), began_of(self._process.pid)
        stopped = status is None and began is not None and state_of(self._process.pid, began) == "T"
        timed_out = not said and not stopped and status is None
        ending = self._end()
        self._start()
        reason = "was stopped (SIGSTOP)" if stopped else said or ending
        known = self._call.stepwise and said != _GARBLED
        results = self._call.new(self._call.results) if known else None
        return Ended(timed_out, reason, outside=stopped or status == -signal.SIGKILL, results=results)

    def stop(self) -> None:
        """End the process, also while another thread waits for it; there will be no further one."""
        with _LOCK:
            self._stopped = True
            self._kill()

    def _start(self) -> None:
        self._ready = False
        with _LOCK:
            if self._stopped:
                return
            ours, theirs = socket.socketpair()
            code = _START.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid())
            # What functions print is dropped: Ray would keep all of it on disk.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a function that signals its process group must not reach this one
            )
            _GUARDED.add(self._process.pid)
            theirs.close()
            self._connection = Connection(ours.detach())
        with contextlib.suppress(OSError):
            self._connection.send(self._first)

    def _receive(self, deadline: float | None, until: float) -> Any:
        """The next message; None if the process ended, or none began `until` then, or one was not whole by `deadline`.

        Raises _LostError where it is none, as the process's functions can write to the socket too, or where they use
        too much shared memory.
        """
        while not self._connection.poll(max(0.0, min(_LOOK_S, until - _now()))):
            if self._process.poll() is not None or _now() >= until:
                return None
            if process_tree.shared_memory_mb(self._process.pid) > self._first[2]:
                raise _LostError("ended its process (shared memory beyond reward.memory_mb)")
        _wait_at_most(self._connection, _PIECE_S if deadline is None else deadline - _now())
        try:
            message = self._connection.recv()
        except (BlockingIOError, EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            return None
        except Exception as error:
            raise _LostError(_GARBLED) from error
        if message is None:
            raise _LostError(_GARBLED)
        return message

    def _end(self) -> str:
        """Kill the process and all below it; returns how it had ended."""
        with _LOCK:
            status = self._process.poll()
            self._kill()
        self._connection.close()
        if status is None:
            return "did not answer in time"
        if status >= 0:
            return f"ended its process (exit status {status})"
        name = signal.Signals(-status).name if -status in signal.Signals.__members__.values() else f"signal {-status}"
        return f"ended its process ({name}{', as when memory runs out' if name == 'SIGKILL' else ''})"

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGSTOP)
        process_tree.end_descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        _GUARDED.discard(self._process.pid)
        process_tree.end_descendants(os.getpid(), spare=_GUARDED)  # what it left is ours now


class Guard:
    """A reward worker: a process for reward functions, and spare ones for while a call takes long.

    A spare process starts when it is pinged for the first time, and then stays.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Start the first process; arguments as of `GuardedWorker`."""
        self._new = functools.partial(GuardedWorker, *arguments, **options)
        self._lanes = {0: self._new()}

    def ping(self, lane: int) -> bool:
        """See `GuardedWorker`."""
        if lane not in self._lanes:
            self._lanes[lane] = self._new()
        return self._lanes[lane].ping()

    def score(self, lane: int, *arguments: Any, **options: Any) -> list[RewardResult] | Overdue | Ended:
        """See `GuardedWorker`."""
        return self._lanes[lane].score(*arguments, **options)

    def rest(self, lane: int) -> list[RewardResult] | Overdue | Ended:
        """See `GuardedWorker`."""
        return self._lanes[lane].rest()

    def introduce(self) -> Process | None:
        """Which process this is, for who watches it."""
        import ray

        return announce(ray.get_runtime_context().get_node_id())

    def stop(self) -> None:
        """End all processes, also while other threads wait for them; there will be no further ones."""
        for worker in list(self._lanes.values()):
            worker.stop()


def _wait_at_most(connection: Connection, seconds: float) -> None:
    """Have reads and writes that wait for the other side's piece of a message for longer raise BlockingIOError."""
    whole = max(seconds, 0.001)
    limit = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _keys(answer: Any) -> list[Any]:
    good = isinstance(answer, list) and answer and all(isinstance(result, RewardResult) for result in answer)
    return [result.key for result in answer] if good else [None]


def _now() -> float:
    return time.monotonic()
