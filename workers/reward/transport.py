"""How calls reach reward workers: the interface, and the worker that is an ordinary object in this process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.settings.reward_config import RewardConfig
from workers.reward.messages import RewardRequest, RewardResult
from workers.reward.worker import RewardWorker


@dataclass(frozen=True)
class Call:
    """Work for one worker.

    Attributes:
        requests: samples to score, in this order.
        function: number of the only function to call; None: all of them.
        budget_s: seconds after which the worker calls no further function and returns what it has.
        limit_s: seconds that one call of a function may take.
        deadline_s: seconds without a result after which the call is lost, its worker stopped.
        hold_s: seconds without a result after which the call no longer keeps its worker from beginning another one.
        stepwise: whether results are known one by one: of plain functions.
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
    """Results of the first requests of a call, as of `RewardWorker.score`; `slot` is the worker's number."""

    slot: int
    results: list[RewardResult]


@dataclass(frozen=True)
class Held:
    """A function takes long, and other calls may begin meanwhile; another event will say what becomes of this one.

    `results`: those so far of a stepwise call, the last one perhaps without all of its scores; None of any other call.
    Of the requests after these, the first is still being scored in this slot, and the others are not any more. The
    event that follows is about that one request alone.
    """

    slot: int
    results: Sequence[RewardResult] | None


@dataclass(frozen=True)
class Lost:
    """A call that will never be answered: its worker took too long (`timed_out`), or `reason` says what it did.

    `outside`: what was lost is all of the worker, the part included that reward functions do not run in.
    `results`: as of `Held`; None where they are unknown.
    """

    slot: int
    timed_out: bool
    reason: str = ""
    outside: bool = False
    results: Sequence[RewardResult] | None = None


Event = Answer | Held | Lost


class Transport(Protocol):
    """Processes, numbered by slot, each of which takes one call at a time: `size` that work, and spare ones."""

    size: int

    def idle(self) -> Sequence[int]:
        """Return the slots that a call may begin on: none of a worker that has a call under way and not held."""

    def start(self, slot: int, call: Call) -> None:
        """Begin a call on an idle slot and return at once."""

    def calls(self) -> Sequence[Any]:
        """What Ray can wait for, that `wait` has news; nothing where calls are not Ray's."""

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Return what has become of calls, as soon as there is news (a started worker too) or after `timeout_s`."""

    def close(self) -> None:
        """Stop the workers; calls under way are dropped."""


class InProcessTransport:
    """One worker in this process: calls run inside `wait`, and no time limit can stop them."""

    size = 1

    def __init__(self, reward: RewardConfig) -> None:
        self._worker = RewardWorker(reward.functions, concurrency=reward.concurrency, settings=settings(reward))
        self._call: Call | None = None

    def idle(self) -> Sequence[int]:
        """See `Transport`."""
        return [0] if self._call is None else []

    def start(self, slot: int, call: Call) -> None:
        """See `Transport`."""
        self._call = call

    def calls(self) -> Sequence[Any]:
        """See `Transport`."""
        return ()

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """See `Transport`."""
        call, self._call = self._call, None
        if call is None:
            return []
        results = self._worker.score(
            call.requests, function=call.function, budget_s=call.budget_s, limit_s=call.limit_s
        )
        return [Answer(0, results)]

    def close(self) -> None:
        """See `Transport`."""
        self._call = None


def settings(reward: RewardConfig) -> dict[str, Any]:
    """What a function learns of the run, where it has a parameter of that name."""
    return {"sandbox": reward.sandbox, "reward_timeout_s": reward.timeout_s}
