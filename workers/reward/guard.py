"""Supervision of the child processes that run reward functions.

The Ray actor of a reward worker is an object of the class `Guard`. The reward functions run in child processes of the
guard. The guard answers each call in time even if the child process that runs the call hangs or dies. Unlike a Ray
actor, a child process can be replaced in a tenth of a second, has no threads or open files of Ray, and can run under
resource limits that would kill a Ray actor.
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

from rltrain.base import trace
from rltrain.base.errors import WorkerError
from rltrain.settings.reward_config import RewardFunctionConfig
from workers.cluster import process_tree
from workers.cluster.progress import Process, announce, began_of, state_of
from workers.reward.child import READY, Traced
from workers.reward.messages import RewardRequest, SampleScores

_LOOK_S = 0.05  # Seconds between two checks that the child process is alive.
_PIECE_S = 10.0  # Timeout in seconds of each read from the child process's socket while no deadline is set.
_GARBLED = "wrote into the socket that carries the results of its process"
_START = "import sys; sys.path[:] = {path!r}; from workers.reward.child import serve; serve({descriptor}, {parent})"


@dataclass(frozen=True)
class Ended:
    """Result of a scoring call whose child process ended, or was killed, before the call was complete.

    Attributes:
        timed_out: Whether the guard killed the child process because the scoring call exceeded its deadline.
        reason: Text that says how the child process failed. An error message shows the text directly after the words
            "reward function 'name'".
        outside: Whether the child process was ended by SIGKILL or stopped by SIGSTOP. Such a signal was probably not
            caused by a reward function.
        results: Results that the scoring call produced before the child process ended, or None if unknown; see
            `workers.reward.transport.Lost`.
    """

    timed_out: bool
    reason: str
    outside: bool = field(default=False, repr=False)
    results: list[SampleScores] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Overdue:
    """Reply of `GuardedWorker.score` if a scoring call still runs but has produced no result for `hold_s` seconds.

    Call `GuardedWorker.rest` to continue to wait for the overdue call.

    Attributes:
        results: Results that the scoring call has produced so far, or None if unknown; see
            `workers.reward.transport.Held`.
    """

    results: list[SampleScores] | None


class _LostError(Exception):
    """Error: the child process of a reward worker is no longer usable.

    The text of a `_LostError` becomes `Ended.reason`.
    """


# Pids of the child processes of all `GuardedWorker` objects. When a `GuardedWorker` kills the orphaned descendants of
# its own child process, the child processes of all other `GuardedWorker` objects must survive.
_LOCK, _GUARDED = threading.Lock(), set[int]()


@dataclass
class _Call:
    """A running scoring call, with its requests and the results received so far."""

    requests: Sequence[RewardRequest]
    functions: int
    deadline_s: float
    stepwise: bool
    since: float  # Time of the latest result, or the call's start time if no result has arrived.
    results: list[SampleScores] = field(default_factory=list)
    given: int = 0  # Number of samples whose results were already returned.
    held: bool = False  # Whether the method `hold` was called.

    @property
    def whole(self) -> int:
        """Return the number of samples that have failed or have the scores of all reward functions."""
        last = self.results[-1:]
        return len(self.results) - any(not one.failed and len(one.scores) < self.functions for one in last)

    def add(self, result: SampleScores) -> bool:
        """Store `result` as the next result of the scoring call.

        Return whether `result.key` is the key of the request whose result is expected next.
        """
        if self.whole < len(self.results):
            self.results.pop()
        self.results.append(result)
        self.since = _now()
        row = len(self.results) - 1
        return row < len(self.requests) and result.key == self.requests[row].key

    def new(self, results: list[SampleScores]) -> list[SampleScores]:
        """Return the elements of `results` that were not returned earlier during the scoring call.

        If the child process reports each result immediately (`stepwise`) and `hold` was called, return at most one
        result.
        """
        return results[self.given : self.given + 1] if self.held and self.stepwise else results[self.given :]

    def hold(self) -> list[SampleScores] | None:
        """Mark the scoring call as slow, because the scoring call has produced no result for too long.

        If `stepwise` is True, return the results that the child process has sent during the scoring call and that were
        not returned earlier. If `stepwise` is False, return None, because the child process sends all results at the
        end of the scoring call. After a call of `hold`, the method `new` omits all results that were complete when
        `hold` was called.
        """
        new = self.new(self.results) if self.stepwise else None
        self.given, self.held = self.whole, True
        return new


class GuardedWorker:
    """A `RewardWorker` in a separate child process, which is replaced when it ends or takes too long."""

    def __init__(
        self, functions: Sequence[RewardFunctionConfig], *, memory_mb: int, directory: str | None = None, **options: Any
    ) -> None:
        """Start the child process without waiting for the imports of the reward functions.

        Args:
            functions: Configs of the reward functions that the child process calls. The scores of each sample are in
                the order of `functions`.
            memory_mb: Megabytes of memory that the child process may allocate in addition to the memory that it uses
                after the imports.
            directory: Working directory of the child process. If `directory` is None, the child process uses the
                working directory of its parent.
            options: Keyword arguments of `RewardWorker`.
        """
        self._first = (list(functions), options, memory_mb)
        self._directory = directory
        self._stopped = self._ready = False
        self._connection: Connection[Any, Any]
        process_tree.adopt_orphans()
        self._start()

    def ping(self) -> bool:
        """Wait until the child process has imported all reward functions.

        Raises:
            WorkerError: The child process ended during the imports, or a reward function cannot be loaded.
        """
        while not self._ready:
            try:
                said = self._receive(None, math.inf)
            except _LostError as error:
                said = f"the imports of the reward functions failed: one of the functions {error}"
            if said is None:
                raise WorkerError(f"the imports of the reward functions failed: one of the functions {self._end()}")
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
    ) -> list[SampleScores] | Overdue | Ended:
        """Score samples in the child process with `RewardWorker.score`.

        If the child process sends no result within `deadline_s` seconds, the child process and all its descendants are
        killed.

        Args:
            requests: Samples to score.
            deadline_s: Seconds without a result after which the child process is killed.
            hold_s: Seconds without a result after which `score` returns an `Overdue` object, while the child process
                continues to score.
            stepwise: Whether the child process sends each result immediately, instead of all results at the end of the
                call. Batched and async functions always report their results at the end of the call.
            function: Index of the only function to call, or None to call all functions.
            limits: Keyword arguments that are passed on to `RewardWorker.score`: `budget_s` and `limit_s`.

        Returns:
            The results of the samples, Overdue if no result has arrived for `hold_s` seconds, or Ended if the child
            process has ended or was killed.
        """
        functions = 1 if function is not None else len(self._first[0])
        self._call = _Call(requests, functions, deadline_s, stepwise, _now())
        try:
            _wait_at_most(self._connection, deadline_s)
            self._connection.send((requests, limits | {"function": function}, stepwise))
        except OSError:  # The child process has ended since its previous scoring call.
            return self._ended("")
        return self._answer(hold_s)

    def rest(self) -> list[SampleScores] | Overdue | Ended:
        """Continue to wait for the running scoring call, after the method `score` has returned an `Overdue` object.

        Return only results that neither `score` nor an earlier call of `rest` has returned.
        """
        return self._answer(math.inf)

    def _answer(self, hold_s: float) -> list[SampleScores] | Overdue | Ended:
        call = self._call
        try:
            while True:
                until = call.since + min(call.deadline_s, hold_s if call.whole < len(call.requests) else math.inf)
                said = self._receive(call.since + call.deadline_s, until)
                if isinstance(said, Traced):
                    trace.adopt(said.events)
                    said = said.results
                if isinstance(said, list):
                    if _keys(said) != [request.key for request in call.requests[: len(said)]]:
                        raise _LostError(_GARBLED)
                    return call.new(said)
                if said is None:
                    overdue = self._process.poll() is None and _now() < call.since + call.deadline_s
                    return Overdue(call.hold()) if overdue else self._ended("")
                if not (call.stepwise and isinstance(said, SampleScores) and call.add(said)):
                    raise _LostError(_GARBLED)
        except _LostError as error:
            return self._ended(str(error))

    def _ended(self, said: str) -> Ended:
        """Replace the child process by a new one, and return the `Ended` result of the scoring call that was running.

        Args:
            said: Why the child process is no longer usable, or "" if the child process ended or timed out.
        """
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
        """Kill the child process without starting a new child process.

        This method may be called while another thread waits for the child process.
        """
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
            # Text that reward functions print is dropped, because Ray would store all output on disk. The child process
            # itself records the first line that each reward function prints.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                cwd=self._directory,
                env=os.environ | trace.environment("reward functions"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Signals to the child's process group must not reach the guard.
            )
            _GUARDED.add(self._process.pid)
            theirs.close()
            self._connection = Connection(ours.detach())
        with contextlib.suppress(OSError):
            self._connection.send(self._first)

    def _receive(self, deadline: float | None, until: float) -> Any:
        """Return the next message of the child process.

        Args:
            deadline: Time at which this method stops waiting for the end of the child process's message, or None for
                no deadline.
            until: Time at which this method stops waiting for the beginning of the child process's message.

        Returns:
            The message, or None if the child process has ended, if the message has not begun to arrive by `until`, or
            if the message is not complete by `deadline`.

        Raises:
            _LostError: The received data is not a valid message (a reward function may have written to the socket), or
                the child process uses too much shared memory.
        """
        while not self._connection.poll(max(0.0, min(_LOOK_S, until - _now()))):
            if self._process.poll() is not None or _now() >= until:
                return None
            if process_tree.shared_memory_mb(self._process.pid) > self._first[2]:
                raise _LostError("ended its process (its shared memory exceeded reward.memory_mb)")
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
        """Kill the child process and all its descendants.

        Return a text that says how the child process had ended before `_end` was called, or that the child process did
        not answer in time.
        """
        with _LOCK:
            status = self._process.poll()
            self._kill()
        self._connection.close()
        if status is None:
            return "did not answer in time"
        if status >= 0:
            return f"ended its process (exit status {status})"
        name = signal.Signals(-status).name if -status in signal.Signals.__members__.values() else f"signal {-status}"
        return f"ended its process ({name}{', for example because memory ran out' if name == 'SIGKILL' else ''})"

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGSTOP)
        process_tree.end_descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        _GUARDED.discard(self._process.pid)
        # When the child process has died, its surviving descendants become children of this process and must be killed
        # too.
        process_tree.end_descendants(os.getpid(), spare=_GUARDED)


class Guard:
    """Ray actor class of a reward worker.

    The Ray actor runs reward functions in its first child process and in spare child processes.

    While one child process runs a slow scoring call, a spare child process scores other samples. The first call of
    `ping` with the number of a spare child process starts the spare process, which then stays alive. In each method,
    the parameter `lane` is the index of one of the guard's child processes, from 0.
    """

    def __init__(self, *arguments: Any, environment: dict[str, str] | None = None, **options: Any) -> None:
        """Start the first child process.

        Args:
            arguments: Positional arguments of `GuardedWorker`.
            environment: Result of `trace.environment` in the driver, or None if the run has no timeline.
            options: Keyword arguments of `GuardedWorker`.
        """
        trace.start_from(environment or {})
        self._new = functools.partial(GuardedWorker, *arguments, **options)
        self._lanes = {0: self._new()}

    def ping(self, lane: int) -> bool:
        """Wait until child process number `lane` has imported the reward functions.

        Child process number `lane` is started if the child process does not exist yet.

        See `GuardedWorker.ping`.
        """
        if lane not in self._lanes:
            self._lanes[lane] = self._new()
        return self._lanes[lane].ping()

    def score(self, lane: int, *arguments: Any, **options: Any) -> list[SampleScores] | Overdue | Ended:
        """Score samples in child process number `lane`. See `GuardedWorker.score`."""
        with trace.span("score", f"process {lane}"):
            return self._lanes[lane].score(*arguments, **options)

    def rest(self, lane: int) -> list[SampleScores] | Overdue | Ended:
        """Continue to wait for the overdue scoring call of child process number `lane`. See `GuardedWorker.rest`."""
        with trace.span("continue to score", f"process {lane}"):
            return self._lanes[lane].rest()

    def take_events(self) -> trace.Recorded | None:
        """Return and delete timeline events of this process and its children, or None if the run has no timeline."""
        return trace.take()

    def introduce(self) -> Process | None:
        """Let other processes read the progress and the stack traces of this process.

        Return the identity of this process, such as its pid and start time, or None on a system without `/proc`.
        """
        import ray

        return announce(ray.get_runtime_context().get_node_id())

    def stop(self) -> None:
        """Kill all child processes without starting new child processes.

        This method may be called while other threads wait for the child processes.
        """
        for worker in list(self._lanes.values()):
            worker.stop()


def _wait_at_most(connection: Connection, seconds: float) -> None:
    """Set the connection's timeout: a read or write that blocks for longer than `seconds` raises BlockingIOError."""
    whole = max(seconds, 0.001)
    limit = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _keys(answer: Any) -> list[Any]:
    good = isinstance(answer, list) and answer and all(isinstance(result, SampleScores) for result in answer)
    return [result.key for result in answer] if good else [None]


def _now() -> float:
    return time.monotonic()
