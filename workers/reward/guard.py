"""Keeps a process for reward functions and stands outside it: whatever they do to it, the guard answers in time.

The guard is what becomes a Ray actor. A process below it costs a tenth of a second to replace, has no threads or files
of Ray's, and can be given limits that would be the end of an actor.
"""

import contextlib
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

from rltrain.errors import WorkerError
from rltrain.reward_config import RewardFunctionConfig
from workers.progress import Process, announce, began_of, state_of
from workers.reward import processes
from workers.reward.child import READY
from workers.reward.messages import RewardRequest, RewardResult

_LOOK_S = 0.05  # between two looks at whether the process is still there; an answer is seen at once
_PIECE_S = 10.0  # between two pieces of a message that has no deadline
_GARBLED = "wrote where its process's answers go"
_START = "import sys; sys.path[:] = {path!r}; from workers.reward.child import serve; serve({descriptor}, {parent})"


@dataclass(frozen=True)
class Ended:
    """The process is gone, and with it the call; `reason` reads after "reward function 'name' ".

    `outside`: what ended it (SIGKILL, SIGSTOP) is more likely not of the function's doing.
    """

    timed_out: bool
    reason: str
    outside: bool = field(default=False, repr=False)


class _LostError(Exception):
    """The process can go on no longer; the text reads as `Ended.reason`."""


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
        self._stopped, self._lock = False, threading.Lock()
        processes.adopt_orphans()
        self._start()

    def ping(self) -> bool:
        """Wait until the process has imported everything.

        Raises:
            WorkerError: it ended before, or a function cannot be loaded.
        """
        while not self._ready:
            try:
                said = self._receive(None)
            except _LostError as error:
                said = f"while it imported the functions, it {error}"
            if said is None:
                raise WorkerError(f"while it imported the functions, it {self._end()}")
            if said != READY:
                raise WorkerError(said)
            self._ready = True
        return True

    def score(
        self, requests: Sequence[RewardRequest], *, deadline_s: float, **limits: Any
    ) -> list[RewardResult] | Ended:
        """See `RewardWorker.score`; after `deadline_s` seconds the process is killed, with all that it started."""
        deadline, said = _now() + deadline_s, ""
        try:
            _wait_at_most(self._connection, deadline_s)
            self._connection.send((requests, limits))
            answer = self._receive(deadline)
            if answer is not None and _keys(answer) != [r.key for r in requests[: len(answer)]]:
                raise _LostError(_GARBLED)
        except _LostError as error:
            answer, said = None, str(error)
        except OSError:  # it ended after its last answer
            answer = None
        if answer is not None:
            return answer
        status, began = self._process.poll(), began_of(self._process.pid)
        stopped = status is None and began is not None and state_of(self._process.pid, began) == "T"
        timed_out = not said and not stopped and status is None
        ending = self._end()
        self._start()
        reason = "was stopped (SIGSTOP)" if stopped else said or ending
        return Ended(timed_out, reason, outside=stopped or status == -signal.SIGKILL)

    def introduce(self) -> Process | None:
        """Which process this is, for who watches it."""
        import ray

        return announce(ray.get_runtime_context().get_node_id())

    def stop(self) -> None:
        """End the process, also while another thread waits for it; there will be no further one."""
        with self._lock:
            self._stopped = True
            self._kill()

    def _start(self) -> None:
        self._ready = False
        with self._lock:
            if self._stopped:
                return
            ours, theirs = socket.socketpair()
            code = _START.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid())
            # What functions print is dropped: Ray would keep all of it on disk.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], cwd=self._directory,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # a function that signals its process group must not reach this one
            )  # fmt: skip
            theirs.close()
            self._connection = Connection(ours.detach())
        with contextlib.suppress(OSError):
            self._connection.send(self._first)

    def _receive(self, deadline: float | None) -> Any:
        """The next message; None if the process ended, or time is up, also in the middle of it.

        Raises _LostError where it is none, as the process's functions can write to the socket too, or where they use
        too much shared memory.
        """
        while not self._connection.poll(_LOOK_S if deadline is None else max(0.0, min(_LOOK_S, deadline - _now()))):
            if self._process.poll() is not None or (deadline is not None and _now() >= deadline):
                return None
            if processes.shared_memory_mb(self._process.pid) > self._first[2]:
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
        with self._lock:
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
        processes.end_descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        processes.end_descendants(os.getpid())  # what it left is ours now


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
