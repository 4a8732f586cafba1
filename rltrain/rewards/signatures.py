"""Defines the parameters of reward functions, and wraps reward functions that were written for other trainers.

rltrain calls a reward function with the parameters of one sample (`SINGLE`) or of a list of samples (`BATCHED`), and
with columns of the data. `adapted` recognises a function of TRL, verl or OpenRLHF by the names of its parameters, and
wraps it in a function that has rltrain's own parameters. The rest of rltrain calls a reward function of TRL, verl or
OpenRLHF only through the function's wrapper. TRL documents the parameters of its reward functions in the section "Using
a custom reward function" of the documentation of GRPOTrainer. The reward managers `naive` and `batch` of verl define
the parameters of verl's reward functions. OpenRLHF documents the parameters of its reward functions in the section
"Custom reward function" of its documentation. `rltrain.rewards.signatures` never imports torch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.rewards.result import RewardResult, ScoreError

# SINGLE has the names of the first two parameters of a reward function that scores one sample per call. BATCHED has the
# names of the first two parameters of a reward function that scores several samples per call.
SINGLE, BATCHED = ("prompt", "response"), ("prompts", "responses")
# Arguments that a reward function gets only through a parameter of the same name, never through `**columns`.
MESSAGES, RESPONSE_IDS = "prompt_messages", "response_ids"
# The columns in `OF_ENVIRONMENTS` exist only in runs with an environment or tools.
OF_ENVIRONMENTS = ("environment_reward", "environment_messages", "stop_reason")
ON_REQUEST = (MESSAGES, RESPONSE_IDS, *OF_ENVIRONMENTS)
ENVIRONMENTS = "environments"  # Parameter that gets TRL's environment objects; rltrain has no value for it.
_OWN = {"prompt", "response", "responses"}  # Parameters that only reward functions written for rltrain have.
_Values = Mapping[str, Any]


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters in the signature of a reward function.

    Raises:
        ConfigError: Python cannot read the reward function's signature.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward function '{getattr(function, '__name__', function)}' has no signature that Python can "
            "read; wrap the function in a Python function, such as def score(prompt, response): ..."
        ) from None


def is_batched(function: Callable[..., Any]) -> bool:
    """Return whether a reward function is batched, that is, takes a list of samples in each call."""
    return {p.name for p in parameters(function)} >= set(BATCHED)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of the reward function returns an awaitable."""
    target = function if inspect.isfunction(function) or inspect.ismethod(function) else type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(target)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Description of how another trainer, such as TRL, calls reward functions.

    Attributes:
        trainer: name of the trainer whose calls of reward functions the `Signature` describes.
        marks: sets of parameter names by which reward functions of the trainer are recognised. A reward function whose
            parameters include all names of one set in `marks` is treated as written for the trainer `trainer`.
        first: names of the first two parameters of the function that wraps the user's reward function: `SINGLE` if the
            function scores one sample per call, `BATCHED` if the function scores several samples per call.
        reads: names of the data columns from which rltrain builds the arguments of the reward function, if the data has
            these columns.
        truth: pair (parameter that gets the right answer, columns that can contain the right answer in order of
            preference); None if the trainer passes no right answer.
        gives: function that converts rltrain's arguments for a reward function to a dict of the arguments that the
            trainer `trainer` would pass.
        converts: function that converts the result of a reward function to the form that rltrain expects.
    """

    trainer: str
    marks: tuple[frozenset[str], ...]
    first: tuple[str, str]
    reads: tuple[str, ...]
    truth: tuple[str, tuple[str, ...]] | None = None
    gives: Callable[[_Values], dict[str, Any]]
    converts: Callable[[Any], Any]


class Adapted:
    """Wrapper through which rltrain calls a reward function that was written for another trainer.

    Attributes:
        trainer: name of the trainer for which the function was written.
        offered: names of the arguments that the function can get in addition to columns of the data.
        one_of: columns that can contain the right answer; () if the function needs no right answer. The data must have
            at least one of the columns in `one_of`.
    """

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        own = parameters(function)
        first = dict.fromkeys(signature.first, "")
        self.trainer, self.__name__ = signature.trainer, str(getattr(function, "__name__", signature.trainer))
        given = tuple(signature.gives(first | dict.fromkeys(signature.reads)))
        self._function, self._given, self._converts = function, signature.gives, signature.converts
        self._names = {p.name for p in own}
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own)
        self._first = signature.first
        self._truth, sources = signature.truth or ("", ())
        needed = any(p.name == self._truth and p.default is inspect.Parameter.empty for p in own)
        self.one_of = sources if needed else ()
        self.offered = tuple(name for name in given if name != self._truth)
        self.__signature__ = inspect.Signature(_wrapper_parameters(own, signature, given))

    def __call__(self, **values: Any) -> Any:
        """Call the wrapped function with the arguments that TRL, verl or OpenRLHF passes, and convert the result."""
        return self._converts(self._function(**self._arguments(values)))

    def _arguments(self, values: _Values) -> dict[str, Any]:
        hidden = {*self._first, *ON_REQUEST} - self._names
        arguments = {name: value for name, value in values.items() if name not in hidden} | self._given(values)
        truth = arguments.get(self._truth)
        if truth is None or (self._first == BATCHED and any(one is None for one in truth)):
            if self.one_of:
                raise ScoreError(
                    f"needs a value in one of the columns {', '.join(self.one_of)}, and this sample has none"
                )
            # If the right answer is missing, the function uses the default value of its parameter for the right answer.
            arguments.pop(self._truth, None)
        return {name: value for name, value in arguments.items() if self._takes_all or name in self._names}


class AsyncAdapted(Adapted):
    """Wrapper through which rltrain calls an async reward function that was written for another trainer."""

    async def __call__(self, **values: Any) -> Any:
        """Await the wrapped function with the arguments that TRL, verl or OpenRLHF passes, and convert the result."""
        return self._converts(await self._function(**self._arguments(values)))


def _wrapper_parameters(
    own: Sequence[inspect.Parameter], signature: Signature, given: Sequence[str]
) -> list[inspect.Parameter]:
    """Return the parameters of the function that wraps a user's reward function.

    The first parameters of the wrapping function are the prompt and the response, followed by the data columns in
    `signature.reads`. The last parameters of the wrapping function are copied from the user's function: the parameters
    for which the function's own trainer (such as TRL) passes no argument, and `**kwargs` if the user's function has it.
    """
    kinds = inspect.Parameter
    named = {name: kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in signature.first}
    named |= {name: kinds(name, kinds.KEYWORD_ONLY, default=None) for name in signature.reads}
    starred = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    rest = [p for p in own if p.kind not in starred and p.name not in named and p.name not in given]
    named |= {p.name: kinds(p.name, kinds.KEYWORD_ONLY, default=p.default) for p in rest}
    return [*named.values(), *(p for p in own if p.kind is kinds.VAR_KEYWORD)]


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function that was written for another trainer, so that rltrain can call the function.

    A reward function without the parameters of TRL, verl or OpenRLHF is returned unchanged.
    """
    try:
        names = {p.name for p in parameters(function)}
    except ConfigError:  # The parameters of the function cannot be read, which `check_columns` reports to the user.
        return function
    if names & _OWN:
        return function
    for signature in SIGNATURES:
        if any(marks <= names for marks in signature.marks):
            return (AsyncAdapted if is_async(function) else Adapted)(function, signature)
    return function


def trainer_of(function: Callable[..., Any]) -> str:
    """Return the name of the trainer for which a function from `load_function` was written; "" means rltrain."""
    return function.trainer if isinstance(function, Adapted) else ""


def offered(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a function from `load_function` can get in addition to data columns."""
    return function.offered if isinstance(function, Adapted) else BATCHED if is_batched(function) else SINGLE


def one_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the columns that can contain the right answer, or () if the function needs no right answer.

    If the function needs the right answer, the data must have at least one of the columns that `one_of` returns.
    """
    return function.one_of if isinstance(function, Adapted) else ()


def _trl(values: _Values) -> dict[str, Any]:
    """Return the arguments that TRL passes to a reward function.

    Each prompt and each completion is a text, or a list of messages if the prompt is a chat.
    """
    prompts, texts = values["prompts"], values["responses"]
    chats = values.get(MESSAGES) or [None] * len(texts)
    ids = values.get(RESPONSE_IDS)
    return {
        "prompts": [p if chat is None else [dict(m) for m in chat] for p, chat in zip(prompts, chats, strict=True)],
        "completions": [
            text if chat is None else [{"role": "assistant", "content": text}]
            for text, chat in zip(texts, chats, strict=True)
        ],
        "completion_ids": None if ids is None else [list(one) for one in ids],
        "log_metric": _drop,
        "log_extra": _drop,
    }


def _drop(name: str, value: Any) -> None:
    """Ignore a value that a function reports with TRL's `log_metric(name, value)` or `log_extra(column, values)`."""


_DATA_SOURCE, _EXTRA_INFO, _REWARD_MODEL = "data_source", "extra_info", "reward_model"
_VERL_TRUTH = ("ground_truth", _REWARD_MODEL, "answer")
_LABELS = ("label", "labels", "answer", "ground_truth")


def _verl(values: _Values) -> dict[str, Any]:
    """Return the arguments that verl passes to `compute_score` for one sample."""
    extra = values.get(_EXTRA_INFO)
    return {
        "data_source": values.get(_DATA_SOURCE) or "",
        "solution_str": values["response"],
        "ground_truth": _first_value({**values, _REWARD_MODEL: _nested_truth(values)}, _VERL_TRUTH),
        "extra_info": dict(extra) if isinstance(extra, Mapping) else {},
    }


def _verl_batch(values: _Values) -> dict[str, Any]:
    """Return the arguments that verl passes to `compute_score` for a list of samples.

    Each argument that verl passes is a list, such as `solution_strs` with one `solution_str` per sample.
    """
    count, reads = len(values["responses"]), (_DATA_SOURCE, _EXTRA_INFO, *_VERL_TRUTH)
    lists = {name: values.get(name) or [None] * count for name in reads}
    one_by_one = [
        _verl({"response": response} | {name: given[row] for name, given in lists.items()})
        for row, response in enumerate(values["responses"])
    ]
    singular = ("data_source", "solution_str", "ground_truth", "extra_info")
    return {f"{name}s": [one[name] for one in one_by_one] for name in singular}


def _nested_truth(values: _Values) -> Any:
    """Return the field `ground_truth` of the column `reward_model`, which is a struct in verl's data."""
    nested = values.get(_REWARD_MODEL)
    return nested.get("ground_truth") if isinstance(nested, Mapping) else None


def _verl_result(result: Any) -> Any:
    """Convert a result of verl's `compute_score`, which is a number or a dict with the key `score`.

    In a dict that verl's `compute_score` returns, the value 0 or 1 of the key `acc` says whether the answer is correct.
    """
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise ScoreError(
            f"returned a dict without 'score' (it has {', '.join(map(str, result)) or 'no keys'}); verl's signature "
            "takes the score from that key"
        )
    correct: Any = result.get("acc")
    correct = correct.item() if hasattr(correct, "item") else correct
    decided = isinstance(correct, int | float) and correct in (0, 1)
    return RewardResult(result["score"], success=bool(correct) if decided else None)


def _openrlhf(values: _Values) -> dict[str, Any]:
    """Return the arguments that OpenRLHF passes to a reward function.

    Each entry of `queries` is a prompt followed by its response.
    """
    prompts, responses = values["prompts"], values["responses"]
    rows = range(len(responses))
    lists = {name: values.get(name) or [None] * len(responses) for name in _LABELS}
    return {
        "queries": [prompt + response for prompt, response in zip(prompts, responses, strict=True)],
        "prompts": list(prompts),
        "labels": [_first_value({name: given[row] for name, given in lists.items()}, _LABELS) for row in rows],
    }


def _openrlhf_result(result: Any) -> Any:
    """Return the scores in a result of OpenRLHF's `reward_func`.

    OpenRLHF's `reward_func` returns either the scores or a dict that contains the scores under the key `rewards`.
    """
    if not isinstance(result, Mapping):
        return result
    if "rewards" not in result:
        raise ScoreError(
            f"returned a dict without 'rewards' (it has {', '.join(map(str, result)) or 'no keys'}); OpenRLHF's "
            "signature takes the scores from that key"
        )
    return result["rewards"]


def _first_value(values: _Values, names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _same(result: Any) -> Any:
    return result


def _each(result: Any) -> Any:
    """Convert each result of verl's batched `compute_score` to a score or a `RewardResult`, as `_verl_result` does."""
    return [_verl_result(one) for one in result] if isinstance(result, Sequence) else result


SIGNATURES = (
    Signature(
        trainer="verl",
        marks=(frozenset({"solution_str"}),),
        first=SINGLE,
        reads=(_DATA_SOURCE, _EXTRA_INFO, *_VERL_TRUTH),
        truth=("ground_truth", _VERL_TRUTH),
        gives=_verl,
        converts=_verl_result,
    ),
    Signature(
        trainer="verl",
        marks=(frozenset({"solution_strs"}),),
        first=BATCHED,
        reads=(_DATA_SOURCE, _EXTRA_INFO, *_VERL_TRUTH),
        truth=("ground_truths", _VERL_TRUTH),
        gives=_verl_batch,
        converts=_each,
    ),
    Signature(
        trainer="OpenRLHF",
        marks=(frozenset({"queries", "prompts"}), frozenset({"queries", "labels"})),
        first=BATCHED,
        reads=_LABELS,
        truth=("labels", _LABELS),
        gives=_openrlhf,
        converts=_openrlhf_result,
    ),
    Signature(
        trainer="TRL",
        marks=(frozenset({"completions"}), frozenset({"completion_ids"})),
        first=BATCHED,
        reads=(MESSAGES, RESPONSE_IDS),
        gives=_trl,
        converts=_same,
    ),
)
