"""The names, types and rules of the keys under `reward`, which define how answers are scored."""

import re
from typing import Any, Literal

from rltrain.settings.key import key, section
from rltrain.settings.typed import require

REWARD_MODEL_KEY = "reward.models: path of '{}'"  # text that names the `path` setting of a reward model in messages
_LARGEST_WEIGHT = 3.4e38  # largest float32
_OF_THE_SAMPLE = ("prompt", "response", "prompts", "responses")


@section
class RewardFunctionConfig:
    """Settings of one reward function. The key `path` has the form `package.module:function` or `file.py:function`."""

    name: str = key("Name of the function in metrics and messages.", if_left_out="name of the function")
    path: str = key(
        "Place of the function.", values="`package.module:function` or `file.py:function`", if_left_out="required"
    )
    weight: float = key("Factor of the function's score in the sum of all scores.", if_left_out="`1.0`")
    gate: bool = key("Count every other score as 0 where this function's score is <= 0.", if_left_out="`false`")
    outcome: bool = key(
        "true: the score says whether the task was solved. false: it rates the form of the answer, such as its length.",
        if_left_out="`true`; `false` for rltrain's own penalties",
    )
    success: float | None = key(
        "Lowest score of a correct answer. Accuracies count answers that reach it. null: the function does not decide "
        "whether an answer is correct, or does so in RewardResult.success.",
        if_left_out="`null`; `1.0` for rltrain's functions that compare an answer with the right one",
    )
    kwargs: dict[str, Any] = key("Keyword arguments of the function.", if_left_out="`{}`")

    def __post_init__(self) -> None:
        for option in self.kwargs:
            require(
                isinstance(option, str) and option not in _OF_THE_SAMPLE,
                f"kwargs.{option}: must be the name of an option, and not one of {', '.join(_OF_THE_SAMPLE)}, which "
                "come from the sample; remove it",
            )


@section
class RewardModelConfig:
    """Settings of one reward model.

    The key `path` names a sequence classifier with one output, in Hugging Face format.
    """

    name: str = key("Name of the reward model in metrics and messages.", if_left_out="last part of the path")
    path: str = key(
        "Sequence classifier with one output, in Hugging Face format: a directory, or a name on the hub.",
        values="path of a directory, or `ORG/NAME` with an optional `@REVISION`",
        if_left_out="required",
    )
    weight: float = key("Factor of the model's score in the sum of all scores.", if_left_out="`1.0`")
    gate: bool = key("Count every other score as 0 where this model's score is <= 0.", if_left_out="`false`")
    outcome: bool = key(
        "true: the score says whether the task was solved. false: it rates the form of the answer, such as its length.",
        if_left_out="`true`",
    )
    success: float | None = key(
        "Lowest score of a correct answer. Accuracies count answers that reach it. null: the model does not decide "
        "whether an answer is correct.",
        if_left_out="`null`",
    )
    prompt_template: str | None = key(
        "Template of the model's input, with {prompt} and {response}. null: the model's chat template, or prompt and "
        "response one after the other if it has none.",
        if_left_out="`null`",
    )

    def __post_init__(self) -> None:
        template = self.prompt_template
        require(
            template is None or "{response}" in template,
            f"prompt_template={template!r}: has no {{response}}; write one, as in '{{prompt}}{{response}}'",
        )

    @property
    def key(self) -> str:
        """Text that names the `path` setting of a reward model in messages."""
        return REWARD_MODEL_KEY.format(self.name)


@section
class RewardConfig:
    """Settings of all reward functions and reward models, of their limits, and of what happens if one fails."""

    functions: list[RewardFunctionConfig] = key(
        "Reward functions. An entry is a mapping, or only the path of a function."
    )
    models: list[RewardModelConfig] = key("Reward models. An entry is a mapping, or only the path of a model.")
    aggregation: str = key(
        "How the scores of an answer are combined. sum: weighted sum. normalize_then_sum: weighted sum of scores "
        "that are first normalised in their group. A path: a function of your own.",
        values="`sum`, `normalize_then_sum`, or the path of a function",
    )
    timeout_s: float = key(
        "Limit on the wall-clock time of one call of a reward function.", unit="seconds", above=0, changeable=True
    )
    memory_mb: int = key(
        "Limit on the memory that a reward process may allocate after its start.",
        unit="MB",
        at_least=1,
        changeable=True,
    )
    concurrency: int = key(
        "Maximum number of concurrent calls of async reward functions in one process.", at_least=1, changeable=True
    )
    sandbox: Literal["auto", "required"] = key(
        "Isolation of code that the model wrote. auto: use Linux namespaces where they are available. required: refuse "
        "to run without them."
    )
    max_failed_fraction: float = key(
        "Maximum fraction of the samples of a step or an evaluation whose reward may fail. The run stops if more fail.",
        at_least=0,
        at_most=1,
        changeable=True,
    )

    def __post_init__(self) -> None:
        require(
            bool(self.components),
            "functions is empty, and so is models: name one, as in reward.functions=[my_reward.py:score]",
        )
        names = [component.name for component in self.components]
        require(
            any(c.weight for c in self.components),
            "functions, models: all weights are 0, so nothing is learnt; set at least one of them",
        )
        require(
            any(c.weight and c.outcome for c in self.components),
            "functions, models: no function or model with a weight has outcome=true, so nothing says whether the "
            "task was solved; set outcome=true for one",
        )
        for component in self.components:
            name, weight = component.name, component.weight
            require(names.count(name) == 1, f"functions, models: two are named '{name}'; give each its own name")
            require(
                bool(re.fullmatch(r"[^\s/]+", name)),
                f"functions, models: name {name!r}: names of metrics contain it, so it must not contain spaces or /; "
                "choose another name",
            )
            require(
                component.outcome or not component.gate,
                f"functions, models: '{name}' has gate=true and outcome=false: a gate decides whether the other "
                "scores count, and so decides the outcome; use outcome=true",
            )
            require(
                abs(weight) <= _LARGEST_WEIGHT,
                f"functions, models: weight of '{name}' is {weight:g}: outside float32's range (3.4e38); lower it",
            )

    @property
    def components(self) -> list[RewardFunctionConfig | RewardModelConfig]:
        """The reward functions, followed by the reward models.

        The batch column `reward_components` holds the scores in the order of the returned list.
        """
        return [*self.functions, *self.models]

    @property
    def names(self) -> list[str]:
        """The names of the reward functions and models, in the order of `components`."""
        return [component.name for component in self.components]
