"""Transport of calls to reward workers: the interface, and the implementation with a worker in this process."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.base.background_tasks import outside_event_loop
from rltrain.settings.reward_config import RewardConfig
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.worker import RewardWorker


@dataclass(frozen=True)
class Call:
    """Work for one worker.

    Attributes:
        requests: Samples to score, in this order.
        function: Index of the only function to call. None: call all functions.
        budget_s: Seconds after which the worker calls no further plain function and returns its results.
        limit_s: Seconds that one call of a function may take.
        deadline_s: Seconds without a result after which the worker is stopped and the call is lost.
        hold_s: Seconds without a result after which the call is held, so that its worker may begin another call.
        stepwise: Whether the worker reports results one by one. Possible for plain functions only.
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
    """Results of the first requests of a call, as `RewardWorker.score` returns them."""

    slot: int
    results: list[SampleScores]


@dataclass(frozen=True)
class Held:
    """A call takes long, so that other calls may begin on its worker. A later event reports the end of this call.

    In a stepwise call, the slot continues to score only the first request without a complete result. It drops the
    requests after that one. The later event concerns that one request alone.

    Attributes:
        slot: Number of the process.
        results: Results so far of a stepwise call. The last one may lack some of its scores. None for any other call.
    """

    slot: int
    results: Sequence[SampleScores] | None


@dataclass(frozen=True)
class Lost:
    """A call that will never be answered.

    Attributes:
        slot: Number of the process.
        timed_out: Whether the process took too long.
        reason: What ended the call, unless it timed out.
        outside: Whether a reward function is probably not the cause. This holds if the whole worker was lost, or if
            SIGKILL or SIGSTOP ended the process.
        results: Results so far, as in `Held`. None if they are unknown.
    """

    slot: int
    timed_out: bool
    reason: str = ""
    outside: bool = False
    results: Sequence[SampleScores] | None = None


Event = Answer | Held | Lost


class Transport(Protocol):
    """Processes of reward workers, numbered by slot. Each process takes one call at a time.

    Attributes:
        size: Number of workers. Each worker has one process and possibly spare processes.
    """

    size: int

    def idle(self) -> Sequence[int]:
        """Return the slots on which a call may begin. A worker with a running call that is not held has none."""

    def start(self, slot: int, call: Call) -> None:
        """Begin a call on an idle slot. Returns at once."""

    async def events(self) -> Sequence[Event]:
        """Wait for events of the running calls, and return them.

        Also returns, possibly without events, when a worker has started or a call was started meanwhile.
        """

    def close(self) -> None:
        """Stop the workers and drop their running calls."""


class InProcessTransport:
    """One worker in this process. Calls run inside `events`, and their deadlines are not enforced."""

    size = 1

    def __init__(self, reward: RewardConfig) -> None:
        self._worker = RewardWorker(reward.functions, concurrency=reward.concurrency, settings=settings(reward))
        self._call: Call | None = None

    def idle(self) -> Sequence[int]:
        """Return the slots on which a call may begin. See `Transport.idle`."""
        return [0] if self._call is None else []

    def start(self, slot: int, call: Call) -> None:
        """Store a call for the next `events`. See `Transport.start`."""
        self._call = call

    async def events(self) -> Sequence[Event]:
        """Run the stored call and return its answer. See `Transport.events`."""
        await asyncio.sleep(0)  # lets other tasks run between two calls
        call, self._call = self._call, None
        if call is None:
            return []
        with outside_event_loop():
            results = self._worker.score(
                call.requests, function=call.function, budget_s=call.budget_s, limit_s=call.limit_s
            )
        return [Answer(0, results)]

    def close(self) -> None:
        """Drop the stored call. See `Transport.close`."""
        self._call = None


def settings(reward: RewardConfig) -> dict[str, Any]:
    """Return the run settings that a reward function receives if it has parameters of these names."""
    return {"sandbox": reward.sandbox, "reward_timeout_s": reward.timeout_s}
