"""Reward workers as Ray actors, each a guard with a process below it; replaced when they are gone."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from rltrain.errors import WorkerError
from rltrain.reward_config import RewardConfig
from rltrain.rewards.loading import absolute
from workers.reward.guard import Ended, GuardedWorker
from workers.reward.transport import Answer, Call, Lost, settings
from workers.watch import Vigil, Watch

_START_ATTEMPTS = 3
_MARGIN_S = 10.0  # the guard in the actor keeps a call's deadline; this is for an actor that is stuck itself
_STOP_S = 2.0
_ZERO_COPY = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"


@dataclass
class _Slot:
    """One actor and what it is asked for: to answer its first ping (`starting`) or a call."""

    actor: Any
    pending: ray.ObjectRef | None
    deadline: float
    attempts: int  # at starting an actor here, this one included, since one was of use
    starting: bool = True


class RayTransport:
    """See `workers.reward.transport.Transport`; each actor has one call under way at most."""

    def __init__(
        self,
        reward: RewardConfig,
        *,
        size: int,
        start_timeout_s: float,
        runtime_env: dict[str, Any] | None,
        watch: Watch | None = None,
    ) -> None:
        """Start `size` actors without waiting for them; `watch` sees those that are stopped."""
        self.size = size
        self._vigil = Vigil(watch, "reward worker", size) if watch else None
        # Actors have a working directory of their own.
        self._functions = [replace(function, path=absolute(function.path)) for function in reward.functions]
        self._options = {
            "concurrency": reward.concurrency, "memory_mb": reward.memory_mb, "settings": settings(reward),
        }  # fmt: skip
        self._start_timeout_s = start_timeout_s
        # Without CPUs of their own they fit beside engines and trainers; a retry would run a deadly sample again.
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 2}
        if runtime_env := _without_torch(runtime_env or {}):
            options["runtime_env"] = runtime_env
        self._actor_class = ray.remote(GuardedWorker).options(**options)
        self._slots = [self._started(number, attempts=1) for number in range(size)]

    def idle(self) -> Sequence[int]:
        """See `Transport`."""
        return [number for number, slot in enumerate(self._slots) if slot.pending is None]

    def start(self, slot: int, call: Call) -> None:
        """See `Transport`."""
        chosen = self._slots[slot]
        chosen.pending = chosen.actor.score.remote(
            call.requests, function=call.function, budget_s=call.budget_s, limit_s=call.limit_s,
            deadline_s=call.deadline_s,
        )  # fmt: skip
        chosen.deadline = time.monotonic() + call.deadline_s + _MARGIN_S

    def calls(self) -> list[ray.ObjectRef]:
        """See `Transport`."""
        return [slot.pending for slot in self._slots if slot.pending is not None]

    def wait(self, timeout_s: float) -> list[Answer | Lost]:
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
        news = [self._look(number, slot, done) for number, slot in enumerate(self._slots)]
        return [event for event in news if event is not None]

    def close(self) -> None:
        """See `Transport`."""
        if self._vigil:
            self._vigil.look(at_once=True)
            self._vigil.end_stopped()
        _kill([slot.actor for slot in self._slots])
        self._slots = []

    def _look(self, number: int, slot: _Slot, done: set[ray.ObjectRef]) -> Answer | Lost | None:
        """See what has become of a slot's call; a slot whose actor is gone gets a new one."""
        if slot.pending in done:
            try:
                answer = ray.get(slot.pending)
            except Exception as error:  # whatever ended the call: the actor is not trusted with another
                return self._gone(number, slot, _reason(error, starting=slot.starting), timed_out=False)
            if isinstance(answer, Ended):
                self._slots[number] = self._waiting(slot.actor, attempts=1)
                return Lost(number, answer.timed_out, answer.reason, outside=answer.outside)
            was_starting, slot.starting, slot.pending = slot.starting, False, None
            return None if was_starting else Answer(number, answer)
        if self._vigil and number in self._vigil.gone:
            return self._gone(number, slot, self._vigil.gone[number], timed_out=False)
        if slot.pending is not None and time.monotonic() >= slot.deadline:
            return self._gone(number, slot, "did not answer in time, nor did what guards it", timed_out=False)
        return None

    def _gone(self, number: int, slot: _Slot, reason: str, *, timed_out: bool) -> Lost | None:
        """Replace an actor; its call, if it had one, is lost."""
        if self._vigil and number in self._vigil.gone:  # nobody is there to be asked
            with contextlib.suppress(Exception):
                ray.kill(slot.actor, no_restart=True)
        else:
            _kill([slot.actor])
        if self._vigil:
            self._vigil.give_up(number, reason)
        if not slot.starting:
            self._slots[number] = self._started(number, attempts=1)
            return Lost(number, timed_out, reason, outside=not timed_out) if slot.pending is not None else None
        if slot.attempts == _START_ATTEMPTS:
            raise WorkerError(f"reward worker {number} did not start in {slot.attempts} attempts: it {reason}")
        self._slots[number] = self._started(number, attempts=slot.attempts + 1)
        return None

    def _started(self, number: int, *, attempts: int) -> _Slot:
        actor = self._actor_class.remote(self._functions, **self._options)
        if self._vigil:
            self._vigil.expect(number, actor.introduce.remote())
        return self._waiting(actor, attempts=attempts)

    def _waiting(self, actor: Any, *, attempts: int) -> _Slot:
        """A slot that is idle once its actor has answered, so that imports never count as a call's time."""
        deadline = time.monotonic() + self._start_timeout_s
        return _Slot(actor, actor.ping.remote(), deadline, attempts=attempts)


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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"could not answer ({lines[-1] if lines else type(error).__name__})"
