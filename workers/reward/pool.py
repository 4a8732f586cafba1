"""Pool of reward workers that scores samples as they arrive.

For speed, the pool sends samples to the workers in chunks. If a worker is lost while it scores a chunk, the pool sends
the chunk's unfinished samples again. Samples that may have caused the loss of the worker are sent one at a time. The
reward pool's code that uses Ray is in `workers.reward.ray_transport`.
"""

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rltrain.base.trace import Recorded
from rltrain.rewards.loading import load_function
from rltrain.rewards.result import both
from rltrain.rewards.signatures import is_async, is_batched
from rltrain.settings.reward_config import RewardConfig
from workers.cluster.liveness import Liveness
from workers.reward.messages import Key, RewardRequest, SampleScores
from workers.reward.transport import Answer, Call, Event, Held, InProcessTransport, Lost, Transport
from workers.reward.worker import failed

logger = logging.getLogger(__name__)

_BUDGET_S = 0.2  # Approximate seconds after which a worker returns its results, even if only part of a chunk is scored.
_GRACE_S = 1.0
_HOLD_SHARE = 0.1  # Share of a reward function's time limit after which a scoring call counts as slow (see `Held`).
_FIRST_CHUNK = 16
_LARGEST_CHUNK = 256
_TURNS = 4
_AGAIN = 2


@dataclass(frozen=True)
class _Alone:
    """A sample that is scored alone because it was slow or because its chunk's worker was lost.

    The reward functions that have not yet scored the sample are called one by one.
    """

    request: RewardRequest
    scores: tuple[float | None, ...] = ()
    # Whether the answer is correct, according to the functions called so far (see `SampleScores.success`).
    success: bool | None = None
    # Number of scoring calls of this sample that were probably ended by something other than a reward function (see
    # `Lost.outside`).
    again: int = 0


class RewardPool:
    """A set of workers that score samples.

    `submit` takes requests, and `poll` returns results in the order of completion.

    If a worker dies or takes too long, the unfinished samples of its chunk are scored again. A sample that may have
    caused the loss of the worker is scored alone, by one reward function after another. A sample fails with an error
    message if its reward function exceeds the time limit, or if a worker is lost while the sample is scored alone. If
    something other than a reward function probably ended the worker, a sample that is scored alone does not fail but is
    scored again, up to two times. The loss of one worker process makes at most one sample fail, and does not change the
    scores of other samples.
    """

    def __init__(self, transport: Transport, reward: RewardConfig) -> None:
        """Create a pool that calls its workers through `transport`.

        Other modules create pools with `in_process` or `on_ray`.

        Args:
            transport: Interface to the processes of the reward workers.
            reward: Reward functions and their limits. The scores of each result are in the order of
                `reward.functions`.
        """
        self._transport, self._timeout_s = transport, reward.timeout_s
        self._names = [function.name for function in reward.functions]
        self._kinds = [_kind(function.path) for function in reward.functions]
        self._fresh: deque[RewardRequest] = deque()
        self._alone: deque[_Alone] = deque()
        # Maps the slot (process number) of each running call to the samples being scored, or to None after an abort.
        self._running: dict[int, tuple[RewardRequest, ...] | _Alone | None] = {}
        self._held: set[int] = set()  # Slots (process numbers) that run a slow call (see `Held`).
        self._finished: list[SampleScores] = []
        self._keys: set[Key] = set()
        self._shown: set[str] = set()  # Reward functions whose first printed line was logged.
        # A worker runs up to `concurrency` calls of async functions at once. A chunk may have more samples than
        # `concurrency`, so that the worker can begin another call as soon as one call ends.
        self._concurrency, waits = reward.concurrency, "async" in self._kinds
        self._most = min(_TURNS * self._concurrency, _LARGEST_CHUNK) if waits else _LARGEST_CHUNK
        self._chunk = min(self._concurrency, self._most) if waits else _FIRST_CHUNK

    @classmethod
    def in_process(cls, reward: RewardConfig) -> Self:
        """Create a pool that scores samples in the current process while `poll` is running.

        A pool in the current process cannot stop a reward function at its time limit, unless the function is async.

        Raises:
            ConfigError: A reward function cannot be loaded.
        """
        return cls(InProcessTransport(reward), reward)

    @classmethod
    def on_ray(
        cls,
        reward: RewardConfig,
        *,
        workers: int,
        spares: int = 0,
        start_timeout_s: float,
        runtime_env: dict[str, Any] | None = None,
        liveness: Liveness | None = None,
    ) -> Self:
        """Create a pool that scores samples in Ray actors. Ray must already be initialised.

        This method starts the actors without waiting until they are ready.

        Args:
            reward: Reward functions and their limits. File paths of reward functions may be relative to this process's
                working directory.
            workers: Number of Ray actors that score samples.
            spares: Number of spare processes per actor. A spare process scores other samples while another process runs
                a slow call.
            start_timeout_s: Seconds within which an actor must start and import the reward functions.
            runtime_env: Ray runtime environment of the actors.
            liveness: Monitor that observes the actors' processes.
        """
        from workers.reward.ray_transport import RayTransport

        transport = RayTransport(
            reward,
            size=workers,
            spares=spares,
            start_timeout_s=start_timeout_s,
            runtime_env=runtime_env,
            liveness=liveness,
        )
        return cls(transport, reward)

    @property
    def pending(self) -> int:
        """Return the number of submitted requests whose results `poll` has not returned yet."""
        return len(self._keys)

    def submit(self, requests: Iterable[RewardRequest]) -> None:
        """Queue samples, and start to score them without waiting for results.

        Raises:
            ValueError: A request has the key of another request that is still pending.
        """
        for request in requests:
            if request.key in self._keys:
                raise ValueError(f"sample {request.key} is being scored already; poll its result, then submit it again")
            self._keys.add(request.key)
            if self._names:
                self._fresh.append(request)
            else:
                self._finished.append(SampleScores(request.key, ()))
        self._feed()

    async def poll(self) -> list[SampleScores]:
        """Wait until at least one result is finished, and return all finished results.

        If no request is pending, return [] immediately.

        Idle workers get new samples only during calls of `poll` and `submit`.

        Raises:
            WorkerError: A reward worker cannot be started.
        """
        while not self._finished and self._keys:
            for event in await self._transport.events():
                self._take(event)
            self._feed()
        results, self._finished = self._finished, []
        for result in results:
            self._keys.remove(result.key)
        return results

    async def recorded(self) -> list[Recorded]:
        """Return and delete the timeline events of the workers' processes (see `rltrain.base.trace`)."""
        return await self._transport.recorded()

    def abort(self) -> None:
        """Drop all requests whose results `poll` has not returned yet.

        The results of scoring calls that are in progress will be discarded, even if samples with the same keys are
        submitted again.
        """
        for queue in (self._fresh, self._alone, self._finished, self._keys):
            queue.clear()
        self._running = dict.fromkeys(self._running)

    def close(self) -> None:
        """Stop the workers and drop all pending requests, or do nothing if the pool is already closed."""
        self._transport.close()
        for queue in (self._fresh, self._alone, self._running, self._held, self._finished, self._keys):
            queue.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, event: Event) -> None:
        work = self._running.pop(event.slot)
        self._show_printed(event.results)
        if isinstance(event, Held):
            self._held.add(event.slot)
            self._running[event.slot] = self._begun(work, event.results)
            return
        was_held = event.slot in self._held
        self._held.discard(event.slot)
        if work is None:  # `abort` was called during the scoring call, so the results of the call are discarded.
            return
        if isinstance(event, Lost):
            self._lost(work, event)
        elif isinstance(work, _Alone):
            self._answered_alone(work, event)
        else:
            self._answered(work, event, adapt=not was_held)

    def _show_printed(self, results: Sequence[SampleScores] | None) -> None:
        """Log, once per run and reward function, the first line that the function has printed in a child process."""
        for name, line in results[-1].printed if results else ():
            if name not in self._shown:
                self._shown.add(name)
                who = f"reward function '{name}'" if name else "a reward function"
                logger.warning(
                    '%s printed: "%s"; reward processes discard printed text; to see it, run with placement=inprocess',
                    who,
                    line,
                )

    def _begun(self, work: Any, results: Sequence[SampleScores] | None) -> Any:
        """Record the results that a running chunk has so far, and queue the samples whose scoring has not begun.

        Returns:
            A tuple with the one sample of the chunk that is still being scored, or an empty tuple if all samples of the
            chunk have been scored. If `results` is None, or if `work` is not a chunk of samples, `work` is returned
            unchanged.
        """
        if results is None or not isinstance(work, tuple):
            return work
        whole = [result for result in results if result.failed or len(result.scores) == len(self._names)]
        for result in whole:
            self._finish(result)
        self._fresh.extendleft(reversed(work[len(whole) + 1 :]))
        return work[len(whole) : len(whole) + 1]

    def _feed(self) -> None:
        """Send samples to every idle worker.

        A sample that must be scored alone is sent before any chunk of new samples, because it might otherwise wait
        forever while new samples keep arriving.
        """
        for slot in self._transport.idle():
            if self._alone:
                suspect = self._alone.popleft()
                self._start(slot, suspect, (suspect.request,), function=len(suspect.scores))
            elif self._fresh:
                share = -(-len(self._fresh) // self._transport.size)
                count = min(self._chunk, share)
                requests = tuple(self._fresh.popleft() for _ in range(count))
                self._start(slot, requests, requests, function=None)

    def _start(self, slot: int, work: Any, requests: tuple[RewardRequest, ...], *, function: int | None) -> None:
        self._running[slot] = work
        kinds = self._kinds if function is None else [self._kinds[function]]
        # The deadline of a scoring call is the time budget `_BUDGET_S` plus `calls` times the time limit `timeout_s` of
        # one call of a reward function. After the time budget, a worker only finishes the running call of a plain
        # function (neither batched nor async), so all plain functions together add 1 to `calls`. Each batched function
        # adds 1 to `calls`, because a worker calls a batched function once for the whole chunk. At most `concurrency`
        # calls of async functions run at once, so the async functions together add their number of calls divided by
        # `concurrency`, rounded up, to `calls`.
        turns = -(-kinds.count("async") * len(requests) // self._concurrency)
        calls = max(1, ("plain" in kinds) + kinds.count("batched") + turns)
        # A scoring call with async functions gets `_GRACE_S` additional seconds, in which a late async function can be
        # cancelled and reported as failed.
        grace = _GRACE_S if "async" in kinds else 0.0
        deadline_s = _BUDGET_S + calls * self._timeout_s + grace
        # A scoring call counts as slow (see `Held`) after `hold_s` seconds without a result. The samples that a slow
        # scoring call has not begun to score are then queued again. After `_BUDGET_S` seconds, a worker does not start
        # to score any further sample of the scoring call. `hold_s` is at least `_BUDGET_S`, so that no sample of a slow
        # scoring call is scored twice. If a scoring call runs async functions, `hold_s` is infinite, so that no spare
        # process begins a second scoring call before the first call ends. Two simultaneous scoring calls of one worker
        # could run more than `reward.concurrency` calls of async functions at once. Even with an infinite `hold_s`, a
        # slow async function does not block a worker for long, because its calls are cancelled at their time limit.
        hold_s = math.inf if "async" in kinds else max(_BUDGET_S, _HOLD_SHARE * self._timeout_s)
        stepwise = set(kinds) == {"plain"}
        self._transport.start(slot, Call(requests, function, _BUDGET_S, self._timeout_s, deadline_s, hold_s, stepwise))

    def _answered(self, requests: tuple[RewardRequest, ...], answer: Answer, *, adapt: bool) -> None:
        done = len(answer.results)
        assert [r.key for r in answer.results] == [r.key for r in requests[:done]], (
            "a reward worker must return results in the order of the requests"
        )
        for request, result in zip(requests, answer.results, strict=False):
            # If the time budget ended before all reward functions had scored a sample, the remaining reward functions
            # score the sample later.
            if len(result.scores) < len(self._names):
                self._alone.append(_Alone(request, result.scores, result.success))
            else:
                self._finish(result)
        self._fresh.extendleft(reversed(requests[done:]))
        if not adapt:
            return
        # If the worker scored the whole chunk within the time budget, the next chunk may be four times as large. If the
        # worker scored only n samples of the chunk, the next chunk has at most 2 n samples, so that few samples stay
        # unscored.
        self._chunk = min(4 * self._chunk, self._most) if done == len(requests) else min(2 * done, self._chunk)

    def _answered_alone(self, work: _Alone, answer: Answer) -> None:
        (result,) = answer.results
        scores, success = work.scores + result.scores, both(work.success, result.success)
        if result.failed:
            self._finish(failed(work.request, len(self._names), result.error, len(work.scores)))
        elif len(scores) == len(self._names):
            self._finish(SampleScores(work.request.key, scores, success=success))
        else:
            self._alone.appendleft(_Alone(work.request, scores, success))

    def _lost(self, work: tuple[RewardRequest, ...] | _Alone, event: Lost) -> None:
        reason = f"did not return within {self._timeout_s:g} s" if event.timed_out else event.reason
        if isinstance(work, tuple) and event.results is not None:
            under_way = self._begun(work, event.results)
            if not under_way:  # All samples of the chunk are finished, so no sample needs to be scored again.
                return
            partial = {result.key: (result.scores, result.success) for result in event.results}
            suspect = _Alone(under_way[0], *partial.get(under_way[0].key, ()))
            # If the worker died before the deadline, the running reward function may not be the cause, so the sample is
            # scored again.
            if not event.timed_out:
                self._alone.append(suspect)
                return
            work = suspect
        elif isinstance(work, tuple) and event.timed_out and len(work) == len(self._names) == 1:
            # If a call with only one sample and only one reward function times out, this reward function must have
            # exceeded its time limit. If the worker died before the deadline of a call with one sample and one reward
            # function, the sample is scored again before it can fail, because something other than the reward function
            # could be the cause.
            work = _Alone(work[0])
        if isinstance(work, _Alone) and event.outside and work.again < _AGAIN:
            self._alone.append(replace(work, again=work.again + 1))
        elif isinstance(work, _Alone):
            error = f"reward function '{self._names[len(work.scores)]}' {reason}"
            self._finish(failed(work.request, len(self._names), error, len(work.scores)))
        else:
            logger.info("a reward worker %s; its %d samples are scored again, one by one", reason, len(work))
            self._alone.extend(_Alone(request) for request in work)

    def _finish(self, result: SampleScores) -> None:
        if result.failed:
            logger.debug("sample %s failed: %s", result.key, result.error)
        self._finished.append(replace(result, printed=()) if result.printed else result)


def _kind(path: str) -> str:
    """Return the kind of a reward function: "batched", "async" or "plain" (neither batched nor async)."""
    function = load_function(path)
    return "batched" if is_batched(function) else "async" if is_async(function) else "plain"
