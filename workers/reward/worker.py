"""Runs reward functions in whatever process it lives in: an ordinary object, or a Ray actor. Never imports torch."""

import math
import time
import traceback
from collections.abc import Sequence

from rltrain.rewards.loading import ScoreError, bind, load_function
from rltrain.schema import RewardFunctionConfig
from workers.reward.messages import RewardRequest, RewardResult

_LONGEST_TEXT = 300  # characters of an exception's text that an error keeps


class RewardWorker:
    """The reward functions of a run, loaded and ready to be called, one sample after another."""

    def __init__(self, functions: Sequence[RewardFunctionConfig]) -> None:
        """Import every function.

        Raises:
            ConfigError: one of them cannot be loaded.
        """
        self._functions = [(config.name, bind(load_function(config.path))) for config in functions]

    def ping(self) -> bool:
        """Answer, which a process does once it has started and imported everything."""
        return True

    def score(
        self, requests: Sequence[RewardRequest], *, function: int | None = None, budget_s: float = math.inf
    ) -> list[RewardResult]:
        """Score samples in order; a function that raises makes its sample failed, never 0.

        Args:
            requests: what to score.
            function: call only the function of this number; scores then hold one value.
            budget_s: seconds after which no further function is called, the first aside.

        Returns:
            One result each for the first requests. Unless the budget ran out that is all of them; if it did, the last
            result may hold the scores of the first functions only.
        """
        end = time.monotonic() + budget_s
        chosen = self._functions if function is None else [self._functions[function]]
        results: list[RewardResult] = []
        for request in requests:
            results.append(_score(request, chosen, end))
            if time.monotonic() >= end:
                break
        return results


def _score(request: RewardRequest, functions: list, end: float) -> RewardResult:
    scores: list[float | None] = []
    for name, function in functions:
        if scores and time.monotonic() >= end:
            break
        try:
            scores.append(function(request.prompt, request.response, request.columns))
        except (Exception, SystemExit) as error:  # Ctrl-C in an in-process run goes through
            return failed(request, len(functions), f"reward function '{name}' {_said(error)}")
    return RewardResult(request.key, tuple(scores))


def failed(request: RewardRequest, functions: int, error: str) -> RewardResult:
    """Build the result of a sample that could not be scored."""
    return RewardResult(request.key, (None,) * functions, failed=True, error=error)


def _said(error: BaseException) -> str:
    """Say in one line what was raised and where, from the user's side."""
    encodable = str(error).encode("utf-8", "backslashreplace").decode()  # the text may hold half a surrogate pair
    text = " ".join(encodable.split())[:_LONGEST_TEXT]
    if isinstance(error, ScoreError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {text}".rstrip(": ") + place
