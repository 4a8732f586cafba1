"""Defines the names, types and rules of the config keys under `reward`, which say how answers are scored."""

import re
from typing import Any, Literal

from rltrain.settings.key import key, section
from rltrain.settings.typed import require

# Format string that names the config key `path` of a reward model in error messages; `{}` is replaced by the model's
# name.
REWARD_MODEL_KEY = "reward.models: path of '{}'"
_LARGEST_WEIGHT = 3.4e38  # The largest finite float32 number, 3.4028e38, rounded down to two digits.
_OF_THE_SAMPLE = ("prompt", "response", "prompts", "responses")


@section
class RewardFunctionConfig:
    """Settings of one reward function. The key `path` has the form `package.module:function` or `file.py:function`."""

    name: str = key("Name of the reward function in metrics and messages.", if_left_out="name of the Python function")
    path: str = key(
        "Python function to call, given by its module or file and its name.",
        values="`package.module:function` or `file.py:function`",
        if_left_out="required",
    )
    weight: float = key(
        "Factor by which the function's score is multiplied in the weighted sum of all scores.", if_left_out="`1.0`"
    )
    gate: bool = key(
        "true: if this function's score of an answer is <= 0, all other scores of the answer count as 0. false: other "
        "scores do not depend on this function.",
        if_left_out="`false`",
    )
    outcome: bool = key(
        "Whether the function's score says if the task was solved (true), or rates the form of the answer, such as its "
        "length (false).",
        if_left_out="`true`; for rltrain's own penalties, `outcome` is `false`",
    )
    success: float | None = key(
        "This function judges an answer as correct if its score of the answer is at least this value. null: the "
        "function's score does not decide whether an answer is correct, but a RewardResult that the function returns "
        "can decide with its field success.",
        if_left_out="`null`; for rltrain's functions that compare an answer with the right answer, `success` is `1.0`",
    )
    kwargs: dict[str, Any] = key(
        "Keyword arguments that every call of the reward function gets in addition to the values of the sample.",
        if_left_out="`{}`",
    )

    def __post_init__(self) -> None:
        for option in self.kwargs:
            require(
                isinstance(option, str) and option not in _OF_THE_SAMPLE,
                f"kwargs.{option}: must be the name of an option of the function, and not one of the names "
                f"{', '.join(_OF_THE_SAMPLE)}, whose values come from the sample; remove {option}",
            )


@section
class RewardModelConfig:
    """Settings of one reward model.

    The key `path` names a sequence classifier with one output, in Hugging Face format.
    """

    name: str = key("Name of the reward model in metrics and messages.", if_left_out="last part of `path`")
    path: str = key(
        "Sequence classifier with one output, in Hugging Face format: a directory, or a name on the Hugging Face hub.",
        values="path of a directory, or `ORG/NAME` with an optional `@REVISION`",
        if_left_out="required",
    )
    weight: float = key(
        "Factor by which the reward model's score is multiplied in the weighted sum of all scores.", if_left_out="`1.0`"
    )
    gate: bool = key(
        "true: if this reward model's score of an answer is <= 0, all other scores of the answer count as 0. false: "
        "other scores do not depend on this reward model.",
        if_left_out="`false`",
    )
    outcome: bool = key(
        "Whether the reward model's score says if the task was solved (true), or rates the form of the answer, such as "
        "its length (false).",
        if_left_out="`true`",
    )
    success: float | None = key(
        "This reward model judges an answer as correct if its score of the answer is at least this value. null: the "
        "reward model does not decide whether an answer is correct.",
        if_left_out="`null`",
    )
    prompt_template: str | None = key(
        "Template of the reward model's input text, with the fields {prompt} and {response}. null: use the reward "
        "model's chat template; if its tokenizer has no chat template, append the response to the prompt.",
        if_left_out="`null`",
    )

    def __post_init__(self) -> None:
        template = self.prompt_template
        require(
            template is None or "{response}" in template,
            f"prompt_template={template!r}: the template has no {{response}}; add {{response}}, as in "
            "'{prompt}{response}'",
        )

    @property
    def key(self) -> str:
        """The text by which error messages refer to the config key `path` of this reward model."""
        return REWARD_MODEL_KEY.format(self.name)


@section
class RewardConfig:
    """Settings of the reward functions and reward models, their resource limits, and the treatment of failures."""

    functions: list[RewardFunctionConfig] = key(
        "List of reward functions, each given as a mapping or only by its path. The default is the reward of the "
        "built-in task; for other data in data.train, the default is an empty list."
    )
    models: list[RewardModelConfig] = key("List of reward models, each given as a mapping or only by its path.")
    aggregation: str = key(
        "Way in which the scores of an answer are combined. sum: weighted sum. normalize_then_sum: the scores of "
        "each reward function or model are normalised within the prompt group before the weighted sum. Path of a "
        "function: the user's own function combines the scores.",
        values="`sum`, `normalize_then_sum`, or the path of a function",
    )
    timeout_s: float = key(
        "Maximum wall-clock time of one call of a reward function.", unit="seconds", above=0, changeable=True
    )
    memory_mb: int = key(
        "Maximum memory that a reward process may allocate after its start.",
        unit="MB",
        at_least=1,
        changeable=True,
    )
    concurrency: int = key(
        "Maximum number of async reward function calls that run concurrently in one process.",
        at_least=1,
        changeable=True,
    )
    sandbox: Literal["auto", "required"] = key(
        "Isolation of model-written code that reward functions run. auto: use Linux namespaces if they are "
        "available. required: refuse to start the run if Linux namespaces are not available."
    )
    max_failed_fraction: float = key(
        "Largest tolerated fraction of samples with failed rewards in one training step or evaluation. The run stops "
        "if the fraction of samples with failed rewards is larger than max_failed_fraction.",
        at_least=0,
        at_most=1,
        changeable=True,
    )

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        require(
            not self.components or any(c.weight for c in self.components),
            "functions, models: all weights are 0, so nothing is learnt; set at least one weight",
        )
        require(
            not self.components or any(c.weight and c.outcome for c in self.components),
            "functions, models: no function or model with a nonzero weight has outcome=true, so nothing says "
            "whether the task was solved; set outcome=true for one",
        )
        for component in self.components:
            name, weight = component.name, component.weight
            require(
                names.count(name) == 1,
                f"functions, models: the name '{name}' is used more than once; give each entry its own name",
            )
            require(
                bool(re.fullmatch(r"[^\s/]+", name)),
                f"functions, models: name {name!r}: the name is part of metric names, so it must not contain spaces "
                "or /; choose another name",
            )
            require(
                component.outcome or not component.gate,
                f"functions, models: '{name}' has gate=true and outcome=false: a gate decides whether the other "
                "scores count, and so decides the outcome; use outcome=true",
            )
            require(
                abs(weight) <= _LARGEST_WEIGHT,
                f"functions, models: weight of '{name}' is {weight:g}, which is outside float32's range "
                "(3.4e38); use a weight closer to 0",
            )

    @property
    def components(self) -> list[RewardFunctionConfig | RewardModelConfig]:
        """A list of the reward functions, followed by the reward models.

        The batch column `reward_components` holds the scores in the order of `components`.
        """
        return [*self.functions, *self.models]

    @property
    def names(self) -> list[str]:
        """A list of the names of the reward functions and reward models, in the order of `components`."""
        return [component.name for component in self.components]
