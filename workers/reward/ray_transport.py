"""Reward workers as Ray actors, each a guard with processes below it; replaced when they are gone."""

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
_MARGIN_S = 10.0  # the guard in the actor keeps a call's deadline; this is for an actor that is stuck itself
_STOP_S = 2.0
_ZERO_COPY = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"


@dataclass
class _Slot:
    """One process of an actor, and what it is asked for: to answer its first ping (`starting`) or a call.

    `pending` is None, and `starting` true, of a spare process that has not been needed so far.
    """

    actor: Any
    pending: Any  # a reference to its result, or None
    deadline: float
    attempts: int  # at starting it, this one included, since one was of use
    starting: bool = True
    held: bool = False
    limit_s: float = 0.0  # of the call under way: without a result

    @property
    def idle(self) -> bool:
        """Whether a call may begin."""
        return self.pending is None and not self.starting


class RayTransport:
    """See `workers.reward.transport.Transport`; each actor has one call under way at most that is not held.

    Slots 0 to size - 1 are the first processes of the actors, the next `size` slots their first spare ones, and so on.
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
        """Start `size` actors without waiting for them; `watch` sees those that are stopped."""
        self.size, self._spares = size, spares
        self._vigil = Vigil(watch, "reward worker", size) if watch else None
        # Actors have a working directory of their own.
        self._functions = [replace(function, path=absolute(function.path)) for function in reward.functions]
        self._options = {
            "concurrency": reward.concurrency,
            "memory_mb": reward.memory_mb,
            "settings": settings(reward),
        }
        self._start_timeout_s = start_timeout_s
        # Without CPUs of their own they fit beside engines and trainers; a retry would run a deadly sample again.
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        options["max_concurrency"] = spares + 2  # a call in each process, and one that stops them
        if runtime_env := _without_torch(runtime_env or {}):
            options["runtime_env"] = runtime_env
        self._actor_class = ray.remote(Guard).options(**options)
        self._slots = [self._started(number, attempts=1) for number in range(size)]
        self._slots += [self._unused(number) for _ in range(spares) for number in range(size)]

    def idle(self) -> Sequence[int]:
        """See `Transport`."""
        found = []
        for worker in range(self.size):
            lanes = self._lanes(worker)
            if not any(self._slots[number].pending is not None and not self._slots[number].held for number in lanes):
                found += [number for number in lanes if self._slots[number].idle][:1]
        return found

    def start(self, slot: int, call: Call) -> None:
        """See `Transport`."""
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
        """See `Transport`."""
        return [slot.pending for slot in self._slots if slot.pending is not None]

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """See `Transport`.

        Raises:
            WorkerError: an actor does not start.
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
        """See `Transport`."""
        if self._vigil:
            self._vigil.look(at_once=True)
            self._vigil.end_stopped()
        _kill([slot.actor for slot in self._slots[: self.size]])
        self._slots = []

    def _lanes(self, slot: int) -> range:
        """The slots of the same actor, its first process first."""
        return range(slot % self.size, len(self._slots), self.size)

    def _look(self, number: int, slot: _Slot, done: set[Any]) -> list[Event]:
        """See what has become of a slot's call; a slot whose actor is gone gets a new one."""
        worker = number % self.size
        if slot.pending in done:
            try:
                answer = ray.get(slot.pending)
            except Exception as error:  # whatever ended the call: the actor is not trusted with another
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
        """Have a worker whose call is held start another of its spare processes, unless one is free."""
        spare = [(number, self._slots[number]) for number in self._lanes(worker)]
        if not any(slot.idle for _, slot in spare):
            for number, slot in spare:
                if slot.pending is None and not slot.attempts:
                    self._slots[number] = self._waiting(slot.actor, number // self.size, attempts=1)
                    return

    def _gone(self, number: int, reason: str, error: Exception | None = None) -> list[Event]:
        """Replace an actor; the calls that it had are lost. A spare process that does not start is done without."""
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
        """Start another actor in the place of this one."""
        if self._vigil and number in self._vigil.gone:  # nobody is there to be asked
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
        """A slot for a spare process of this worker."""
        return _Slot(self._slots[worker].actor, None, 0.0, attempts=0)

    def _waiting(self, actor: Any, lane: int, *, attempts: int) -> _Slot:
        """A slot that is idle once its process has answered, so that imports never count as a call's time."""
        deadline = time.monotonic() + self._start_timeout_s
        return _Slot(actor, actor.ping.remote(lane), deadline, attempts=attempts)


def _without_torch(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Switch off what makes Ray import torch in every process, if the driver, and so perhaps the cluster, has it on."""
    if _ZERO_COPY not in os.environ:
        return runtime_env
    return runtime_env | {"env_vars": runtime_env.get("env_vars", {}) | {_ZERO_COPY: "0"}}


def _kill(actors: Sequence[Any]) -> None:
    """End actors' processes and what these have started, which works while they are inside C code too."""
    with contextlib.suppress(Exception):  # gone already, or Ray itself is
        stopped = [actor.stop.remote() for actor in actors]
        ray.wait(stopped, num_returns=len(stopped), timeout=_STOP_S)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


def _reason(error: Exception, *, starting: bool) -> str:
    """Say what happened: the last line of Ray's long text, which tells nothing of the cause where a process died."""
    if isinstance(error, ray.exceptions.RayActorError) and not starting:
        return "ended its process (it exited, crashed or ran out of memory)"
    lines = [line.strip() for line in redacted(str(error)).splitlines() if line.strip()]
    return f"could not answer ({lines[-1] if lines else type(error).__name__})"
