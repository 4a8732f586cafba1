"""The names, types and rules of the keys under `reward`, which define how answers are scored."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from rltrain.settings.typed import at_least, require

_LARGEST_WEIGHT = 3.4e38  # largest float32
_OF_THE_SAMPLE = ("prompt", "response", "prompts", "responses")


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function. `path` is `package.module:function` or `file.py:function`."""

    name: str
    path: str
    weight: float
    gate: bool  # true: if this function's score is <= 0, every other function counts 0
    outcome: bool  # true: the score tells whether the task was solved; false: it rates the form, such as length
    kwargs: dict[str, Any]  # keyword arguments of the function

    def __post_init__(self) -> None:
        for option in self.kwargs:
            require(
                isinstance(option, str) and option not in _OF_THE_SAMPLE,
                f"kwargs.{option}: must be the name of an option, and none of {', '.join(_OF_THE_SAMPLE)}, of which "
                "every sample has its own; take it out",
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """One reward model. `path` is the directory of a sequence classifier with one output in Hugging Face format."""

    name: str
    path: str
    weight: float
    gate: bool  # see RewardFunctionConfig
    outcome: bool  # see RewardFunctionConfig
    # Template with {prompt} and {response}. null: the model's chat template, or the concatenation if there is none.
    prompt_template: str | None

    def __post_init__(self) -> None:
        template = self.prompt_template
        require(
            template is None or "{response}" in template,
            f"prompt_template={template!r}: has no {{response}}; write one, as in '{{prompt}}{{response}}'",
        )

    @property
    def key(self) -> str:
        """Name of the model's `path` in messages."""
        return f"reward.models: path of '{self.name}'"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward functions and models, their limits, and the treatment of failures."""

    functions: list[RewardFunctionConfig]
    models: list[RewardModelConfig]
    aggregation: str  # sum, normalize_then_sum, or the path of the user's own function
    timeout_s: float  # limit on the wall-clock time of one call, in seconds
    memory_mb: int  # limit on the memory that a reward process allocates after its start, in MB
    concurrency: int  # number of concurrent calls of async functions in one process
    sandbox: Literal["auto", "required"]  # for model-written code; required: never run it without namespaces
    max_failed_fraction: float  # the run stops if a larger fraction of a step's samples fails

    def __post_init__(self) -> None:
        require(
            bool(self.components),
            "functions is empty, and so is models: name one, as in reward.functions=[my_reward.py:score]",
        )
        require(self.timeout_s > 0, f"timeout_s must be > 0, got {self.timeout_s}")
        at_least(self, 1, "concurrency", "memory_mb")
        share, names = self.max_failed_fraction, [component.name for component in self.components]
        require(0 <= share <= 1, f"max_failed_fraction must be in [0, 1], got {share}")
        require(
            any(c.weight for c in self.components),
            "functions, models: all weights are 0, so nothing is learnt; set one",
        )
        require(
            any(c.weight and c.outcome for c in self.components),
            "functions, models: none with a weight has outcome=true, so nothing says whether the task was solved; set "
            "it for one",
        )
        for component in self.components:
            name, weight = component.name, component.weight
            require(names.count(name) == 1, f"functions, models: two are named '{name}'; give each its own name")
            require(
                bool(re.fullmatch(r"[^\s/]+", name)),
                f"functions, models: name {name!r}: metrics are called by it, so no spaces and no /; give another",
            )
            require(
                component.outcome or not component.gate,
                f"functions, models: '{name}' has gate=true and outcome=false: a gate decides what the others count, "
                "and with them the outcome; use outcome=true",
            )
            require(
                abs(weight) <= _LARGEST_WEIGHT,
                f"functions, models: weight of '{name}' is {weight:g}: outside float32's range (3.4e38); lower it",
            )

    @property
    def components(self) -> list[RewardFunctionConfig | RewardModelConfig]:
        """The reward functions, followed by the reward models. This is the column order of `reward_components`."""
        return [*self.functions, *self.models]
