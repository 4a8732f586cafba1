"""The interface through which reward workers are called, and its implementation for a worker in the current process."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.base.background_tasks import outside_event_loop
from rltrain.base.trace import Recorded
from rltrain.settings.reward_config import RewardConfig
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.worker import RewardWorker


@dataclass(frozen=True)
class Call:
    """A call that makes one reward worker score samples.

    Attributes:
        requests: Samples to score. The worker scores the samples in the order of `requests`.
        function: Index of the only reward function to call. If `function` is None, the worker calls all functions.
        budget_s: Seconds after which the worker calls no further plain reward function, that is, a function that is
            neither batched nor async. When `budget_s` has passed, the worker returns results only for the samples that
            it has begun to score.
        limit_s: Maximum seconds that one call of a reward function may take.
        deadline_s: Seconds without a result after which the worker's process is killed and the call is lost.
        hold_s: Seconds without a result after which a `Held` event is reported. After the `Held` event, the slow call
            keeps running, and the worker may begin another call in a spare process.
        stepwise: Whether the worker reports each result immediately, instead of all results at the end of the call.
            Batched and async functions always report their results at the end of the call.
    """

    requests: tuple[RewardRequest, ...]
    function: int | None
    budget_s: float
    limit_s: float
    deadline_s: float
    hold_s: float
    stepwise: bool


@dataclass(frozen=True)
class Answer:
    """Event that reports the results of a call that has ended.

    `results` is the list that `RewardWorker.score` returned, which may cover only the first requests of the call.
    """

    slot: int
    results: list[SampleScores]


@dataclass(frozen=True)
class Held:
    """Event that reports that a call is slow, so that its worker may begin another call in a spare process.

    After a `Held` event, the slow call keeps running, and an `Answer` or `Lost` event reports when the slow call ends.
    If a slow call reports each result immediately (see `Call.stepwise`), its process finishes only the sample that it
    is scoring and begins no further sample. For a slow call with `stepwise=True`, the `Answer` or `Lost` event contains
    only the result of the sample that was being scored at the time of the `Held` event. If a slow call with
    `stepwise=True` has not begun to score a sample, the caller must send the sample again in another call.

    Attributes:
        slot: Index, from 0, of the reward process in which the call was started.
        results: Results that the slow call has reported so far, or None if `Call.stepwise` is False. The last element
            of `results` can be incomplete, because some reward functions may not have scored the last sample yet.
    """

    slot: int
    results: Sequence[SampleScores] | None


@dataclass(frozen=True)
class Lost:
    """Event that reports a call that has ended without returning all of its results.

    Attributes:
        slot: Index, from 0, of the reward process in which the call was started.
        timed_out: Whether the call was ended because it exceeded its deadline.
        reason: Why the call ended, if the call did not time out.
        outside: Whether the call was probably ended by something other than a reward function. `outside` is True if the
            whole worker was lost, if SIGKILL ended the process, or if SIGSTOP stopped the process.
        results: Results that the call produced before it ended, or None if the results are unknown. The last element
            of `results` can be incomplete (see `Held.results`).
    """

    slot: int
    timed_out: bool
    reason: str = ""
    outside: bool = False
    results: Sequence[SampleScores] | None = None


Event = Answer | Held | Lost


class Transport(Protocol):
    """Interface to the processes of reward workers.

    Each process has an index, which is called its slot, and runs at most one call at a time.

    Attributes:
        size: Number of reward workers. Each reward worker has one process, and possibly spare processes.
    """

    size: int

    def idle(self) -> Sequence[int]:
        """Return the slots (indices) of the processes in which a call may begin.

        While one process of a reward worker runs a call, no other process of the same worker may begin a call, unless a
        `Held` event has reported the running call as slow.
        """

    def start(self, slot: int, call: Call) -> None:
        """Begin a call in the idle process number `slot`, without waiting for the result."""

    async def events(self) -> Sequence[Event]:
        """Wait for events of the running calls, and return the events.

        The returned list may be empty, because the method `events` also returns when a worker has become ready or when
        `start` is called.
        """

    async def recorded(self) -> list[Recorded]:
        """Return and delete the timeline events that the workers' processes have recorded (see `rltrain.base.trace`).

        `recorded` does not return timeline events of the current process.
        """

    def close(self) -> None:
        """Stop the workers and drop their running calls."""


class InProcessTransport:
    """Transport to one reward worker in the current process.

    The method `events` runs the calls without enforcing the deadlines of the calls.
    """

    size = 1

    def __init__(self, reward: RewardConfig) -> None:
        self._worker = RewardWorker(reward.functions, concurrency=reward.concurrency, settings=settings(reward))
        self._call: Call | None = None

    def idle(self) -> Sequence[int]:
        """Return the slots of the processes in which a call may begin. See `Transport.idle`."""
        return [0] if self._call is None else []

    def start(self, slot: int, call: Call) -> None:
        """Store a scoring call, which the next call of `events` will run. See `Transport.start`."""
        self._call = call

    async def events(self) -> Sequence[Event]:
        """Run the stored scoring call and return its answer. See `Transport.events`."""
        await asyncio.sleep(0)  # Let other asyncio tasks run between two scoring calls.
        call, self._call = self._call, None
        if call is None:
            return []
        with outside_event_loop():
            results = self._worker.score(
                call.requests, function=call.function, budget_s=call.budget_s, limit_s=call.limit_s
            )
        return [Answer(0, results)]

    async def recorded(self) -> list[Recorded]:
        """Return an empty list, because the worker runs in the current process (see `Transport.recorded`)."""
        return []

    def close(self) -> None:
        """Forget the stored scoring call without running it. See `Transport.close`."""
        self._call = None


def settings(reward: RewardConfig) -> dict[str, Any]:
    """Return the run settings that reward functions can receive, as a dictionary from parameter name to value.

    A reward function receives each run setting for which it has a parameter.
    """
    return {"sandbox": reward.sandbox, "reward_timeout_s": reward.timeout_s}
