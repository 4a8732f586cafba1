"""Code that sends scoring calls to reward workers in Ray actors, and receives the results of the calls.

Each actor supervises the child processes of one reward worker. The transport replaces lost actors.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from rltrain.base import trace
from rltrain.base.background_tasks import Changes, cancelled
from rltrain.base.errors import WorkerError
from rltrain.base.secret_values import redacted
from rltrain.rewards.loading import absolute
from rltrain.settings.reward_config import RewardConfig
from workers.cluster.liveness import Liveness, WatchedProcess
from workers.reward.guard import Ended, Guard, Overdue
from workers.reward.transport import Answer, Call, Event, Held, Lost, settings

logger = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_MARGIN_S = 10.0  # Seconds after a call's deadline until the guard process that runs the call counts as hung.
_STOP_S = 2.0
_TAKE_S = 1.0  # Maximum seconds for which the driver waits for the actors' timeline events.
_ZERO_COPY = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"


@dataclass
class _Slot:
    """One child process of a reward worker's actor, and the pending call of that process.

    While the child process starts, `starting` is True and the pending call is a call of `ping`. If `starting` is True
    and `pending` is None, the child process is a spare process that has not been started.
    """

    actor: Any
    process: WatchedProcess
    pending: asyncio.Future[Any] | None  # Result of the pending ping or call.
    deadline: float
    attempts: int  # Number of attempts to start the process since its last successful start.
    starting: bool = True
    held: bool = False
    limit_s: float = 0.0  # Seconds without a result after which the running call counts as lost.

    @property
    def idle(self) -> bool:
        """Return whether the slot's process has started and runs no call."""
        return self.pending is None and not self.starting

    @property
    def has_news(self) -> bool:
        """Return whether the pending ping or call has ended, or can never end because the actor is lost."""
        return self.pending is not None and (self.pending.done() or bool(self.process.how_lost))


class RayTransport:
    """Implementation of `workers.reward.transport.Transport` for reward workers in Ray actors.

    An actor runs at most one call at a time, not counting slow calls that were reported with a `Held` event. The child
    processes of all actors are numbered consecutively, and the number of a child process is called its slot. Slot s
    belongs to the actor with the index `s % size`, and is the child process with the index `s // size` of this actor,
    where `size` is the number of actors. Child process number 0 of an actor is its first process, and all its other
    child processes are spare processes.
    """

    def __init__(
        self,
        reward: RewardConfig,
        *,
        size: int,
        spares: int = 0,
        start_timeout_s: float,
        runtime_env: dict[str, Any] | None,
        liveness: Liveness | None = None,
    ) -> None:
        """Start `size` Ray actors without waiting until they are ready.

        Args:
            reward: Reward functions and their limits.
            size: Number of Ray actors. Each actor is one reward worker.
            spares: Number of spare processes of each reward worker.
            start_timeout_s: Seconds within which an actor must start and import the reward functions.
            runtime_env: Ray runtime environment of the actors.
            liveness: Monitor that detects stopped and dead actors.
        """
        self.size, self._spares = size, spares
        self._liveness, self._changes, self._calls = liveness, Changes(), 0
        # Relative paths of reward functions are made absolute, because the working directory of the Ray actors differs
        # from the working directory of this process.
        self._functions = [replace(function, path=absolute(function.path)) for function in reward.functions]
        self._options = {
            "concurrency": reward.concurrency,
            "memory_mb": reward.memory_mb,
            "settings": settings(reward),
        }
        self._start_timeout_s = start_timeout_s
        # The Ray actors of reward workers reserve no CPUs, so that Ray can start a reward worker even if engines and
        # training ranks reserve all CPUs. Ray must not retry a call whose reward worker has died, because a retry would
        # again score the sample that killed the reward worker.
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        # The actor can run one call per child process and one call of `stop` at the same time.
        options["max_concurrency"] = spares + 2
        if runtime_env := _without_torch(runtime_env or {}):
            options["runtime_env"] = runtime_env
        self._actor_class = ray.remote(Guard).options(**options)
        self._slots = [self._started(number, attempts=1) for number in range(size)]
        self._slots += [self._unused(number) for _ in range(spares) for number in range(size)]

    def idle(self) -> Sequence[int]:
        """Return the slots of the child processes in which a new call can begin. See `Transport.idle`."""
        found = []
        for worker in range(self.size):
            lanes = self._lanes(worker)
            if not any(self._slots[number].pending is not None and not self._slots[number].held for number in lanes):
                found += [number for number in lanes if self._slots[number].idle][:1]
        return found

    def start(self, slot: int, call: Call) -> None:
        """Begin a scoring call in the idle child process that has the number `slot`. See `Transport.start`."""
        chosen = self._slots[slot]
        chosen.pending = self._result(
            chosen.actor.score.remote(
                slot // self.size,
                call.requests,
                function=call.function,
                budget_s=call.budget_s,
                limit_s=call.limit_s,
                deadline_s=call.deadline_s,
                hold_s=call.hold_s if self._spares else math.inf,
                stepwise=call.stepwise,
            )
        )
        chosen.limit_s = call.deadline_s + _MARGIN_S
        chosen.deadline = time.monotonic() + call.budget_s + chosen.limit_s

    async def events(self) -> Sequence[Event]:
        """Wait for events of the running calls, and return the events. See `Transport.events`.

        Raises:
            WorkerError: An actor could not be started in `_START_ATTEMPTS` attempts.
        """
        busy = [slot for slot in self._slots if slot.pending is not None]
        deadline = min((slot.deadline for slot in busy), default=math.inf)
        started = self._calls
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if deadline == math.inf else deadline - time.monotonic()):
                await self._changes.until(lambda: self._calls != started or any(slot.has_news for slot in busy))
        news: list[Event] = []
        for number in range(len(self._slots)):
            news += self._look(number, self._slots[number])
        return news

    async def recorded(self) -> list[trace.Recorded]:
        """Return and delete the timeline events that the actors have recorded (see `Transport.recorded`).

        If an actor does not answer within `_TAKE_S` seconds, its timeline events are left out.
        """
        ready = [slot for slot in self._slots[: self.size] if not slot.starting and not slot.process.how_lost]
        if not trace.on() or not ready:
            return []
        calls = [asyncio.wrap_future(slot.actor.take_events.remote().future()) for slot in ready]
        done, late = await asyncio.wait(calls, timeout=_TAKE_S)
        await cancelled(*late)
        found = [call.result() for call in calls if call in done and call.exception() is None]
        return [one for one in found if one is not None]

    def close(self) -> None:
        """Stop the actors. See `Transport.close`."""
        if self._liveness:
            self._liveness.kill_stopped()
        for slot in self._slots:
            if slot.pending is not None:
                slot.pending.cancel()
        _kill([slot.actor for slot in self._slots[: self.size]])
        self._slots = []

    def _lanes(self, slot: int) -> range:
        """Return the slots of all child processes of the actor that runs the process in `slot`, in ascending order."""
        return range(slot % self.size, len(self._slots), self.size)

    def _result(self, reference: Any) -> "asyncio.Future[Any]":
        """Return the result of a ping or scoring call as a future.

        When a ping or scoring call starts or returns its result, a running call of the method `events` wakes up to look
        for new events.
        """
        result: asyncio.Future[Any] = asyncio.wrap_future(reference.future())
        result.add_done_callback(self._arrived)
        self._calls += 1
        self._changes.notify()
        return result

    def _arrived(self, result: "asyncio.Future[Any]") -> None:
        if not result.cancelled():
            result.exception()  # Read the exception, because asyncio logs every exception that no code reads.
        self._changes.notify()

    def _look(self, number: int, slot: _Slot) -> list[Event]:
        """Return the unreported events of the scoring call that runs in the child process of slot `number`.

        If the Ray actor that supervises the child process is lost, start a new Ray actor, and return a Lost event for
        each running call of the lost Ray actor.
        """
        worker = number % self.size
        if slot.pending is not None and slot.pending.done():
            try:
                answer = slot.pending.result()
            except Exception as error:  # After any error of a ping or scoring call, the child process counts as lost.
                return self._gone(number, _reason(error, starting=slot.starting), error)
            if isinstance(answer, Overdue):
                slot.pending, slot.held = self._result(slot.actor.rest.remote(number // self.size)), True
                slot.deadline = time.monotonic() + slot.limit_s
                self._use_a_spare(worker)
                return [Held(number, answer.results)]
            if isinstance(answer, Ended):
                self._slots[number] = self._waiting(slot, number // self.size, attempts=1)
                return [Lost(number, answer.timed_out, answer.reason, answer.outside, answer.results)]
            was_starting, slot.starting, slot.held, slot.pending = slot.starting, False, False, None
            return [] if was_starting else [Answer(number, answer)]
        if slot.process.how_lost:
            return self._gone(worker, slot.process.how_lost)
        if slot.pending is not None and time.monotonic() >= slot.deadline:
            return self._gone(number, "did not answer in time, nor did its guard process")
        return []

    def _use_a_spare(self, worker: int) -> None:
        """Start another spare process for a reward worker with a slow call, unless the worker has an idle process."""
        spare = [(number, self._slots[number]) for number in self._lanes(worker)]
        if not any(slot.idle for _, slot in spare):
            for number, slot in spare:
                if slot.pending is None and not slot.attempts:
                    self._slots[number] = self._waiting(slot, number // self.size, attempts=1)
                    return

    def _gone(self, number: int, reason: str, error: Exception | None = None) -> list[Event]:
        """Replace the Ray actor that runs the child process in slot `number`.

        Return a Lost event for each running call of the replaced actor. If the start of a spare process fails with a
        WorkerError, the actor is not replaced and continues without the spare process.
        """
        slot, worker = self._slots[number], number % self.size
        if slot.starting and number >= self.size and isinstance(getattr(error, "cause", None), WorkerError):
            logger.warning(
                "reward worker %d: a spare process did not start, and the worker continues without it: %s",
                worker,
                reason,
            )
            slot.pending = None
            return []
        lost: list[Event] = [
            Lost(lane, False, reason, outside=True)
            for lane in self._lanes(worker)
            if self._slots[lane].pending is not None and not self._slots[lane].starting
        ]
        slot = self._slots[worker]
        self._replace(worker, slot, reason)
        for lane in self._lanes(worker)[1:]:
            self._slots[lane] = self._unused(worker)
        return lost

    def _replace(self, number: int, slot: _Slot, reason: str) -> None:
        """Kill the Ray actor of a reward worker, and start a new Ray actor.

        Raise WorkerError if the Ray actor has failed to start `_START_ATTEMPTS` times.
        """
        if slot.process.how_lost:  # A lost actor can no longer answer a call of `stop`.
            with contextlib.suppress(Exception):
                ray.kill(slot.actor, no_restart=True)
        else:
            _kill([slot.actor])
        if self._liveness:
            self._liveness.dismiss(slot.process)
        if slot.starting and slot.attempts == _START_ATTEMPTS:
            raise WorkerError(f"reward worker {number} did not start in {slot.attempts} attempts: it {reason}")
        self._slots[number] = self._started(number, attempts=slot.attempts + 1 if slot.starting else 1)

    def _started(self, number: int, *, attempts: int) -> _Slot:
        actor: Any = self._actor_class.remote(
            self._functions, environment=trace.environment(f"reward worker {number}"), **self._options
        )
        process = WatchedProcess(f"reward worker {number}", self._liveness, self._changes)
        if self._liveness:
            self._liveness.admit(process, actor.introduce.remote())
        return self._waiting(_Slot(actor, process, None, 0.0, attempts=0), 0, attempts=attempts)

    def _unused(self, worker: int) -> _Slot:
        """Return the `_Slot` object of a spare child process of a reward worker, without starting the child process."""
        first = self._slots[worker]
        return _Slot(first.actor, first.process, None, 0.0, attempts=0)

    def _waiting(self, slot: _Slot, lane: int, *, attempts: int) -> _Slot:
        """Send a ping to a child process, and return the `_Slot` object of the child process.

        A child process answers a ping as soon as the child process has imported the reward functions. A child process
        gets scoring calls only after it has answered a ping, so the time of a scoring call does not include the time of
        importing the reward functions.
        """
        deadline = time.monotonic() + self._start_timeout_s
        pending = self._result(slot.actor.ping.remote(lane))
        return _Slot(slot.actor, slot.process, pending, deadline, attempts=attempts)


def _without_torch(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Return `runtime_env`, with Ray's option for zero-copy tensors turned off if the option is set in this process.

    Ray's option for zero-copy tensors makes Ray import torch in every process. If Ray's option for zero-copy tensors is
    set in this process, it may be set in the whole cluster, so it must be turned off explicitly for the actors.
    """
    if _ZERO_COPY not in os.environ:
        return runtime_env
    return runtime_env | {"env_vars": runtime_env.get("env_vars", {}) | {_ZERO_COPY: "0"}}


def _kill(actors: Sequence[Any]) -> None:
    """Kill the processes of the actors and all their descendants, even if an actor is executing C code."""
    with contextlib.suppress(Exception):  # The call of `stop` fails if an actor, or Ray itself, has already ended.
        stopped = [actor.stop.remote() for actor in actors]
        ray.wait(stopped, num_returns=len(stopped), timeout=_STOP_S)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


def _reason(error: Exception, *, starting: bool) -> str:
    """Return a text that describes how a Ray actor failed.

    The text that `_reason` returns usually contains the last line of Ray's long error message. If the Ray actor's
    process died during a scoring call, `_reason` returns a fixed text, because Ray's message does not tell the cause.
    """
    if isinstance(error, ray.exceptions.RayActorError) and not starting:
        return "ended its process (it exited, crashed or ran out of memory)"
    lines = [line.strip() for line in redacted(str(error)).splitlines() if line.strip()]
    return f"could not answer ({lines[-1] if lines else type(error).__name__})"
