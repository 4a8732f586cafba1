"""Transport of calls to reward workers: the interface, and an implementation for a worker in the current process."""

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
    """A call that makes one worker score samples.

    Attributes:
        requests: Samples to score, in this order.
        function: Index of the only reward function to call. If `function` is None, the worker calls all functions.
        budget_s: Seconds after which the worker calls no further plain function (neither batched nor async) and returns
            its results.
        limit_s: Seconds that one call of a reward function may take.
        deadline_s: Seconds without a result after which the process is killed and the call is lost.
        hold_s: Seconds without a result after which the call is held: it continues, but its worker may begin another
            call in a spare process.
        stepwise: Whether the worker reports each result at once, instead of all results at the end of the call. Only
            plain functions (neither batched nor async) can be called stepwise.
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
    """Event: a call has ended.

    `results` is the list that `RewardWorker.score` returned, which may cover only the first requests of the call.
    """

    slot: int
    results: list[SampleScores]


@dataclass(frozen=True)
class Held:
    """Event: a call takes long, so its worker may begin another call in a spare process.

    A held call continues, and another event will report its end. If the held call is stepwise, its process continues
    only with the first request that has no complete result. The event at the end of a held stepwise call reports only
    the result of the continued request. All later requests of a held stepwise call must be scored in another call.

    Attributes:
        slot: Index of the process among the reward processes, from 0.
        results: The results of a stepwise call so far, where the last result may lack some scores, or None if the call
            is not stepwise.
    """

    slot: int
    results: Sequence[SampleScores] | None


@dataclass(frozen=True)
class Lost:
    """Event: a call has ended without an answer.

    Attributes:
        slot: Index of the process among the reward processes, from 0.
        timed_out: Whether the process took too long.
        reason: What ended the call, if it did not time out.
        outside: Whether the cause is probably not a reward function, because the whole worker was lost, or because
            SIGKILL or SIGSTOP ended the process.
        results: Results of the call so far, as in `Held`, or None if the results are unknown.
    """

    slot: int
    timed_out: bool
    reason: str = ""
    outside: bool = False
    results: Sequence[SampleScores] | None = None


Event = Answer | Held | Lost


class Transport(Protocol):
    """Interface to the processes of reward workers.

    Each process has a number, called its slot, and runs one call at a time.

    Attributes:
        size: Number of workers. Each worker has one process, and possibly spare processes.
    """

    size: int

    def idle(self) -> Sequence[int]:
        """Return the slots (numbers of processes) on which a call may begin.

        While a worker runs a call, no other call may begin on its slots, unless the running call is held (see `Held`).
        """

    def start(self, slot: int, call: Call) -> None:
        """Begin a call in the idle process number `slot`, without waiting for the result."""

    async def events(self) -> Sequence[Event]:
        """Wait for events of the running calls, and return them.

        This method also returns, possibly without events, when a worker has become ready, or when `start` is called
        while this method waits.
        """

    async def recorded(self) -> list[Recorded]:
        """Return and delete the timeline events that the workers' processes have recorded (see `rltrain.base.trace`).

        The events of the current process are not included.
        """

    def close(self) -> None:
        """Stop the workers and drop their running calls."""


class InProcessTransport:
    """Transport to one worker in the current process. `events` runs the calls without enforcing their deadlines."""

    size = 1

    def __init__(self, reward: RewardConfig) -> None:
        self._worker = RewardWorker(reward.functions, concurrency=reward.concurrency, settings=settings(reward))
        self._call: Call | None = None

    def idle(self) -> Sequence[int]:
        """Return the slots (numbers of processes) on which a call may begin. See `Transport.idle`."""
        return [0] if self._call is None else []

    def start(self, slot: int, call: Call) -> None:
        """Store a call, which the next `events` will run. See `Transport.start`."""
        self._call = call

    async def events(self) -> Sequence[Event]:
        """Run the stored call and return its answer. See `Transport.events`."""
        await asyncio.sleep(0)  # let other tasks run between two calls
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
        """Drop the stored call. See `Transport.close`."""
        self._call = None


def settings(reward: RewardConfig) -> dict[str, Any]:
    """Return run settings by name. A reward function receives each run setting for which it has a parameter."""
    return {"sandbox": reward.sandbox, "reward_timeout_s": reward.timeout_s}
