"""Code that calls reward functions in the current process.

The module `workers.reward.worker` is used in the driver, or in a child process of the Ray actor
`workers.reward.guard.Guard`. The module `workers.reward.worker` does not import torch.
"""

import asyncio
import bdb
import contextlib
import inspect
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rltrain.base import trace
from rltrain.base.errors import described, one_line
from rltrain.base.secret_values import redacted
from rltrain.rewards.loading import as_scores, as_verdict, bind, finish, load_function
from rltrain.rewards.result import ScoreError, Verdict, both
from rltrain.rewards.signatures import is_async, is_batched
from rltrain.settings.reward_config import RewardFunctionConfig
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.terminal import CALLING, NoTerminal

CALLS_TRACK = "reward functions"  # Name of the timeline row that shows the calls of reward functions.
_CANCEL_S = 2.0  # Seconds that a cancelled call of an async function may take to end.
Outcome = Verdict | BaseException


class _Function:
    """One loaded reward function."""

    def __init__(self, config: RewardFunctionConfig, settings: dict[str, Any]) -> None:
        function = load_function(config.path)
        own = {name: value for name, value in settings.items() if name in inspect.signature(function).parameters}
        self.name, self.bound = config.name, bind(function, own | config.kwargs)
        self.batched, self.asynchronous = is_batched(function), is_async(function)

    def call(self, request: RewardRequest) -> Outcome:
        """Score one sample. If the reward function raises an exception, return the exception."""
        CALLING.set(self.name)
        try:
            with self._span(request):
                if self.batched:
                    return as_verdict(as_scores(self._called([request]), 1)[0])
                return as_verdict(_finished(self.bound(request.prompt, request.response, request.columns)))
        except BaseException as error:
            return _unless_stopped(error)

    def _span(self, request: RewardRequest) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that records the scoring of one sample as an event of the timeline."""
        return trace.span(self.name, CALLS_TRACK, uid=request.key[0], sample=request.key[1])

    def call_all(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Score samples with one call of a batched function.

        If the batched function raises an error, score the samples one by one.
        """
        CALLING.set(self.name)
        try:
            with trace.span(self.name, CALLS_TRACK, samples=[list(request.key) for request in requests]):
                results = self._called(requests)
        except BaseException as error:
            _unless_stopped(error)
            return [self.call(request) for request in requests]
        try:
            return [_outcome(result) for result in as_scores(results, len(requests))]
        # If the numbers of scores and samples differ, the scores cannot be assigned to samples.
        except BaseException as error:
            return [_unless_stopped(error)] * len(requests)

    async def await_one(self, request: RewardRequest, limit_s: float) -> Outcome:
        """Score one sample with an async function, which is cancelled at its time limit.

        The async function runs in its own task, so that its exceptions and cancellations do not affect other samples.
        If the cancelled task does not end within `_CANCEL_S` seconds, the task is abandoned.
        """
        task = asyncio.ensure_future(self._awaited(request))
        await asyncio.wait([task], timeout=limit_s if math.isfinite(limit_s) else None)
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_CANCEL_S)
            ending = "" if task.done() else ", and did not end when it was cancelled"
            return ScoreError(f"did not return within {limit_s:g} s{ending}")
        return ScoreError("cancelled itself") if task.cancelled() else task.result()

    async def _awaited(self, request: RewardRequest) -> Outcome:
        CALLING.set(self.name)
        try:
            with self._span(request):
                return as_verdict(await self.bound(request.prompt, request.response, request.columns))
        except BaseException as error:  # If not caught, SystemExit and KeyboardInterrupt would end the event loop.
            return error

    def _called(self, requests: Sequence[RewardRequest]) -> Any:
        names = dict.fromkeys(name for request in requests for name in request.columns)
        columns = {name: [request.columns.get(name) for request in requests] for name in names}
        prompts, responses = [r.prompt for r in requests], [r.response for r in requests]
        return _finished(self.bound(prompts, responses, columns))


class RewardWorker:
    """The reward functions of a run, loaded and ready to be called.

    Plain functions (neither batched nor async) are called for one sample after another in the current thread. Async
    functions are called for up to `concurrency` samples at once. Each batched reward function is called once with all
    samples.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        *,
        concurrency: int = 64,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Import all reward functions.

        Args:
            functions: Config of each reward function. The scores of a sample have the same order as `functions`.
            concurrency: Maximum number of simultaneous calls of async functions.
            settings: Mapping from the name of each run setting to its value. A reward function receives each setting
                for which it has a parameter, unless the function's `kwargs` set the parameter.

        Raises:
            ConfigError: A reward function cannot be loaded.
        """
        self._functions = [_Function(config, settings or {}) for config in functions]
        self._concurrency = concurrency

    def ping(self) -> bool:
        """Return True, to show that this process has started and has imported all reward functions."""
        return True

    def score(
        self,
        requests: Sequence[RewardRequest],
        *,
        function: int | None = None,
        budget_s: float = math.inf,
        limit_s: float = math.inf,
        report: Callable[[SampleScores], None] | None = None,
    ) -> list[SampleScores]:
        """Score samples in the order of `requests`.

        If a reward function raises an exception for a sample, the sample is marked as failed and does not get a score
        of 0.

        Args:
            requests: Samples to score.
            function: Index of the only reward function to call; each result then has one score. If `function` is None,
                all reward functions are called.
            budget_s: Seconds after which no further plain function (neither batched nor async) is called. Even if
                `budget_s` is 0, one plain function is called for the first sample.
            limit_s: Seconds after which a call of an async function is cancelled and its sample fails.
            report: Callback that, after each call of a plain function, receives the scores that the sample has so far.

        Returns:
            One result per request. If the time budget `budget_s` runs out, results are returned only for the first
            requests, and the last returned result may lack the scores of some reward functions.
        """
        chosen = self._functions if function is None else [self._functions[function]]
        outcomes: list[dict[int, Outcome]] = [{} for _ in requests]
        done = _call_each(chosen, requests, outcomes, time.monotonic() + budget_s, report)
        requests = requests[:done]
        for number, one in enumerate(chosen):
            if one.batched:
                for found, outcome in zip(outcomes, one.call_all(requests), strict=False):
                    found[number] = outcome
        _await_each(chosen, requests, outcomes, limit_s, self._concurrency)
        return [_result(request, chosen, found) for request, found in zip(requests, outcomes, strict=False)]


def _call_each(
    functions: list[_Function],
    requests: Sequence[RewardRequest],
    outcomes: list[dict[int, Outcome]],
    end: float,
    report: Callable[[SampleScores], None] | None,
) -> int:
    """Call the plain functions (neither batched nor async) sample by sample, until the time budget runs out.

    If a plain function raises an exception, the sample fails, and the sample's remaining plain functions are not
    called.

    Returns:
        The number of samples for which at least one plain function was called. These samples are the first samples of
        the scoring call. If there are no plain functions, the number of all samples is returned.
    """
    plain = [(number, f) for number, f in enumerate(functions) if not f.batched and not f.asynchronous]
    for row, request in enumerate(requests if plain else ()):
        for number, one in plain:
            if outcomes[row] and time.monotonic() >= end:
                break
            outcomes[row][number] = one.call(request)
            if report:
                report(_result(request, functions, outcomes[row]))
            if isinstance(outcomes[row][number], BaseException):
                break
        if time.monotonic() >= end:
            return row + 1
    return len(requests)


def _await_each(
    functions: list[_Function],
    requests: Sequence[RewardRequest],
    outcomes: list[dict[int, Outcome]],
    limit_s: float,
    concurrency: int,
) -> None:
    """Call the async functions for all samples, with at most `concurrency` calls at once."""
    wanted = [
        (row, number, one, request)
        for number, one in enumerate(functions)
        if one.asynchronous and not one.batched
        for row, request in enumerate(requests)
    ]
    if not wanted:
        return

    async def in_turn(one: _Function, request: RewardRequest, turns: asyncio.Semaphore) -> Outcome:
        async with turns:
            return await one.await_one(request, limit_s)

    async def together() -> list[Outcome]:
        turns = asyncio.Semaphore(concurrency)
        return await asyncio.gather(*(in_turn(one, request, turns) for _, _, one, request in wanted))

    for (row, number, _, _), outcome in zip(wanted, finish(together()), strict=True):
        # Async reward functions do not run in the main thread, and Python raises KeyboardInterrupt only in the main
        # thread. If the user quits a debugger in the thread of the async functions, the debugger raises BdbQuit.
        outcomes[row][number] = _unless_stopped(outcome) if isinstance(outcome, bdb.BdbQuit) else outcome


def _result(request: RewardRequest, functions: list[_Function], found: dict[int, Outcome]) -> SampleScores:
    scores: list[float | None] = []
    success: bool | None = None
    for number, one in enumerate(functions):
        if number not in found:
            break  # The time budget ran out before this reward function was called.
        outcome = found[number]
        if isinstance(outcome, BaseException):
            return failed(request, len(functions), f"reward function '{one.name}' {_said(outcome)}", number)
        scores.append(outcome.score)
        success = both(success, outcome.success)
    return SampleScores(request.key, tuple(scores), success=success)


def failed(request: RewardRequest, functions: int, error: str, function: int) -> SampleScores:
    """Return the result of a sample that one reward function failed to score.

    Args:
        request: Request to score the sample.
        functions: Number of reward functions, which is also the number of scores in the result.
        error: One line that says which reward function failed and how.
        function: Index of the reward function that failed.
    """
    return SampleScores(request.key, (None,) * functions, failed=True, error=redacted(error), failed_function=function)


def _outcome(result: Any) -> Outcome:
    try:
        return as_verdict(result)
    except BaseException as error:  # `__repr__` or `__float__` of `result` may raise any exception.
        return _unless_stopped(error)


def _unless_stopped(error: BaseException) -> BaseException:
    """Return an exception that a reward function raised, or re-raise the exception if the user wants to stop the run.

    The user can stop the run with Ctrl-C (KeyboardInterrupt) or by quitting the debugger (BdbQuit). A KeyboardInterrupt
    or BdbQuit counts as the user's wish to stop the run only in the main thread of the driver. SIGINT has its default
    action in the child processes of a `Guard` actor, but not in the driver, so the action of SIGINT shows whether the
    current process is the driver.
    """
    here = threading.current_thread() is threading.main_thread()
    stops = isinstance(error, KeyboardInterrupt | bdb.BdbQuit)
    if here and stops and signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        raise error
    return error


def _finished(result: Any) -> Any:
    return finish(result) if inspect.iscoroutine(result) else result


def _said(error: BaseException) -> str:
    """Return one line that says which exception was raised, in which file and at which line."""
    text = described(error)
    if isinstance(error, ScoreError | NoTerminal):
        return text.removeprefix(f"{type(error).__name__}: ")
    # The traceback is read with `walk_tb`, which opens no source files, because the source file of a reward function
    # may not be readable.
    frames = list(traceback.walk_tb(error.__traceback__))
    place = f" ({one_line(frames[-1][0].f_code.co_filename)}:{frames[-1][1]})" if frames else ""
    return f"raised {text}{place}"
