"""Reward workers as Ray actors. Each actor is a guard with child processes, and is replaced when it is gone."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from rltrain.base.errors import WorkerError
from rltrain.base.secret_values import redacted
from rltrain.rewards.loading import absolute
from rltrain.settings.reward_config import RewardConfig
from workers.cluster.liveness import Vigil, Watch
from workers.reward.guard import Ended, Guard, Overdue
from workers.reward.transport import Answer, Call, Event, Held, Lost, settings

logger = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_MARGIN_S = 10.0  # the guard enforces a call's deadline; after this margin the guard itself counts as stuck
_STOP_S = 2.0
_ZERO_COPY = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"


@dataclass
class _Slot:
    """One process of an actor, with its pending first ping (`starting`) or its pending call.

    A spare process that has not been needed yet has `pending` None and `starting` True.
    """

    actor: Any
    pending: Any  # reference to the result of the ping or call, or None
    deadline: float
    attempts: int  # attempts to start the process since its last successful start, including the current one
    starting: bool = True
    held: bool = False
    limit_s: float = 0.0  # seconds without a result after which the running call is lost

    @property
    def idle(self) -> bool:
        """Return whether a call may begin."""
        return self.pending is None and not self.starting


class RayTransport:
    """Transport to reward workers in Ray actors. See `workers.reward.transport.Transport`.

    Each actor has at most one running call that is not held. Slots 0 to size - 1 are the first processes of the actors.
    The next `size` slots are the first spare processes of the actors, and so on.
    """

    def __init__(
        self,
        reward: RewardConfig,
        *,
        size: int,
        spares: int = 0,
        start_timeout_s: float,
        runtime_env: dict[str, Any] | None,
        watch: Watch | None = None,
    ) -> None:
        """Start `size` actors without waiting for them. `watch` detects actors that are stopped (SIGSTOP) or gone."""
        self.size, self._spares = size, spares
        self._vigil = Vigil(watch, "reward worker", size) if watch else None
        # Actors have another working directory, so relative paths would not work there.
        self._functions = [replace(function, path=absolute(function.path)) for function in reward.functions]
        self._options = {
            "concurrency": reward.concurrency,
            "memory_mb": reward.memory_mb,
            "settings": settings(reward),
        }
        self._start_timeout_s = start_timeout_s
        # Actors reserve no CPUs, so that they fit beside engines and training ranks. Ray must not retry a call, because
        # that would run a sample again that kills its worker.
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        options["max_concurrency"] = spares + 2  # one call per process, plus `stop`
        if runtime_env := _without_torch(runtime_env or {}):
            options["runtime_env"] = runtime_env
        self._actor_class = ray.remote(Guard).options(**options)
        self._slots = [self._started(number, attempts=1) for number in range(size)]
        self._slots += [self._unused(number) for _ in range(spares) for number in range(size)]

    def idle(self) -> Sequence[int]:
        """Return the slots on which a call may begin. See `Transport.idle`."""
        found = []
        for worker in range(self.size):
            lanes = self._lanes(worker)
            if not any(self._slots[number].pending is not None and not self._slots[number].held for number in lanes):
                found += [number for number in lanes if self._slots[number].idle][:1]
        return found

    def start(self, slot: int, call: Call) -> None:
        """Begin a call on an idle slot. See `Transport.start`."""
        chosen = self._slots[slot]
        chosen.pending = chosen.actor.score.remote(
            slot // self.size,
            call.requests,
            function=call.function,
            budget_s=call.budget_s,
            limit_s=call.limit_s,
            deadline_s=call.deadline_s,
            hold_s=call.hold_s if self._spares else math.inf,
            stepwise=call.stepwise,
        )
        chosen.limit_s = call.deadline_s + _MARGIN_S
        chosen.deadline = time.monotonic() + call.budget_s + chosen.limit_s

    def calls(self) -> list[Any]:
        """Return the Ray references of the pending pings and calls. See `Transport.calls`."""
        return [slot.pending for slot in self._slots if slot.pending is not None]

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Return what has happened to the running calls. See `Transport.wait`.

        Raises:
            WorkerError: An actor does not start.
        """
        if self._vigil:
            self._vigil.look()
        busy = [slot for slot in self._slots if slot.pending is not None]
        if not busy:
            return []
        until_deadline = min(slot.deadline for slot in busy) - time.monotonic()
        refs = [slot.pending for slot in busy]
        ray.wait(refs, num_returns=1, timeout=max(0.0, min(timeout_s, until_deadline)))
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0.0)[0])
        news: list[Event] = []
        for number in range(len(self._slots)):
            news += self._look(number, self._slots[number], done)
        return news

    def close(self) -> None:
        """Stop the actors. See `Transport.close`."""
        if self._vigil:
            self._vigil.look(at_once=True)
            self._vigil.end_stopped()
        _kill([slot.actor for slot in self._slots[: self.size]])
        self._slots = []

    def _lanes(self, slot: int) -> range:
        """Return the slots of the actor that has this slot. The first slot is the actor's first process."""
        return range(slot % self.size, len(self._slots), self.size)

    def _look(self, number: int, slot: _Slot, done: set[Any]) -> list[Event]:
        """Return the events of a slot's call. A slot whose actor is gone gets a new actor."""
        worker = number % self.size
        if slot.pending in done:
            try:
                answer = ray.get(slot.pending)
            except Exception as error:  # after any error, the actor gets no further calls
                return self._gone(number, _reason(error, starting=slot.starting), error)
            if isinstance(answer, Overdue):
                slot.pending, slot.held = slot.actor.rest.remote(number // self.size), True
                slot.deadline = time.monotonic() + slot.limit_s
                self._use_a_spare(worker)
                return [Held(number, answer.results)]
            if isinstance(answer, Ended):
                self._slots[number] = self._waiting(slot.actor, number // self.size, attempts=1)
                return [Lost(number, answer.timed_out, answer.reason, answer.outside, answer.results)]
            was_starting, slot.starting, slot.held, slot.pending = slot.starting, False, False, None
            return [] if was_starting else [Answer(number, answer)]
        if self._vigil and worker in self._vigil.gone:
            return self._gone(worker, self._vigil.gone[worker])
        if slot.pending is not None and time.monotonic() >= slot.deadline:
            return self._gone(number, "did not answer in time, nor did what guards it")
        return []

    def _use_a_spare(self, worker: int) -> None:
        """Start another spare process of a worker whose call is held, unless one of its processes is idle."""
        spare = [(number, self._slots[number]) for number in self._lanes(worker)]
        if not any(slot.idle for _, slot in spare):
            for number, slot in spare:
                if slot.pending is None and not slot.attempts:
                    self._slots[number] = self._waiting(slot.actor, number // self.size, attempts=1)
                    return

    def _gone(self, number: int, reason: str, error: Exception | None = None) -> list[Event]:
        """Replace an actor and return its running calls as lost.

        If a spare process fails to start with a WorkerError, only that process is given up.
        """
        slot, worker = self._slots[number], number % self.size
        if slot.starting and number >= self.size and isinstance(getattr(error, "cause", None), WorkerError):
            logger.warning("reward worker %d: a spare process does not start, it is done without: %s", worker, reason)
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
        """Start a new actor in the place of this one. Raises WorkerError after `_START_ATTEMPTS` failed starts."""
        if self._vigil and number in self._vigil.gone:  # the actor can no longer answer a call of `stop`
            with contextlib.suppress(Exception):
                ray.kill(slot.actor, no_restart=True)
        else:
            _kill([slot.actor])
        if self._vigil:
            self._vigil.give_up(number, reason)
        if slot.starting and slot.attempts == _START_ATTEMPTS:
            raise WorkerError(f"reward worker {number} did not start in {slot.attempts} attempts: it {reason}")
        self._slots[number] = self._started(number, attempts=slot.attempts + 1 if slot.starting else 1)

    def _started(self, number: int, *, attempts: int) -> _Slot:
        actor: Any = self._actor_class.remote(self._functions, **self._options)
        if self._vigil:
            self._vigil.expect(number, actor.introduce.remote())
        return self._waiting(actor, 0, attempts=attempts)

    def _unused(self, worker: int) -> _Slot:
        """Return a slot for a spare process of this worker that has not been started."""
        return _Slot(self._slots[worker].actor, None, 0.0, attempts=0)

    def _waiting(self, actor: Any, lane: int, *, attempts: int) -> _Slot:
        """Return a slot that becomes idle once its process answers a ping. Imports never count as a call's time."""
        deadline = time.monotonic() + self._start_timeout_s
        return _Slot(actor, actor.ping.remote(lane), deadline, attempts=attempts)


def _without_torch(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Return the runtime environment with Ray's zero-copy tensors switched off if the driver has set that option.

    The option makes Ray import torch in every process. If the driver has set it, the cluster may have set it too.
    """
    if _ZERO_COPY not in os.environ:
        return runtime_env
    return runtime_env | {"env_vars": runtime_env.get("env_vars", {}) | {_ZERO_COPY: "0"}}


def _kill(actors: Sequence[Any]) -> None:
    """Kill the actors' processes and all processes below them. This also works while an actor runs C code."""
    with contextlib.suppress(Exception):  # the actors, or Ray itself, may be gone already
        stopped = [actor.stop.remote() for actor in actors]
        ray.wait(stopped, num_returns=len(stopped), timeout=_STOP_S)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


def _reason(error: Exception, *, starting: bool) -> str:
    """Return a text that says what happened.

    The text contains the last line of Ray's long error message. For a dead process the text is fixed, because Ray's
    message does not tell the cause.
    """
    if isinstance(error, ray.exceptions.RayActorError) and not starting:
        return "ended its process (it exited, crashed or ran out of memory)"
    lines = [line.strip() for line in redacted(str(error)).splitlines() if line.strip()]
    return f"could not answer ({lines[-1] if lines else type(error).__name__})"
