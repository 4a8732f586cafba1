"""Defines the config keys under `algorithm.distillation`: the teachers, and how the policy learns from the teachers."""

import re
from typing import Literal

from rltrain.settings.key import key, section
from rltrain.settings.typed import require

TEACHER = "teacher"  # The role name of a teacher on the training ranks is "teacher", a space, and the teacher's name.
# Format string that names the config key `path` of a teacher in error messages; `{}` is replaced by the teacher's name.
TEACHER_KEY = "algorithm.distillation.teachers: path of '{}'"
REFERENCE = "reference"  # A teacher whose `path` is "reference" is the run's reference model.
# Default prompt template of a teacher that is the reference model. The template comes from the SDFT paper, arXiv
# 2601.19897 section 3.
DEMONSTRATION_TEMPLATE = (
    "{prompt}\n\nThis is an example for a response to the question:\n{demonstration}\n\n"
    "Now answer with a response of your own, including the thinking process."
)
_ENDPOINT = ("http://", "https://")


@section
class TeacherConfig:
    """Settings of one teacher, whose distribution the policy learns to match on the policy's own answers.

    A teacher is a frozen model on the training ranks, or a model that an HTTP endpoint serves.
    """

    name: str = key(
        "Name of the teacher in metrics, in messages, and in the data column that "
        "algorithm.distillation.teacher_column names.",
        if_left_out="name is the last part of `path`, or the host of an endpoint",
    )
    path: str = key(
        "The teacher, which must have the policy's tokenizer. A directory or a name on the Hugging Face hub: a causal "
        "language model that is kept frozen and sharded on the training ranks. reference: the run's reference model, "
        "which has the starting weights of the policy. A URL: an endpoint with vLLM's completions API, which gives "
        "the log-probs of the answers' tokens.",
        values="path of a directory, `ORG/NAME` with an optional `@REVISION`, `reference`, or `http://HOST:PORT/v1`",
        if_left_out="required",
    )
    prompt_template: str | None = key(
        "Template of the prompt that the teacher sees instead of the policy's prompt, with the field {prompt} and "
        "columns of the data in braces. If the prompt is a list of chat messages, the text from this template replaces "
        "the text of the last user message. null: the teacher sees the policy's prompt.",
        if_left_out="`null`; for `path=reference`, SDFT's template with the column `demonstration`",
    )
    model: str | None = key(
        "Name of the model at the endpoint. null: the first model that the endpoint lists.", if_left_out="`null`"
    )
    api_key_env: str | None = key(
        "Name of the environment variable that holds the API key of the endpoint. null: no key is sent.",
        if_left_out="`null`",
    )

    def __post_init__(self) -> None:
        template = self.prompt_template
        for name in ("model", "api_key_env"):
            require(
                self.is_endpoint or getattr(self, name) is None,
                f"{name}={getattr(self, name)} with path={self.path}: only an endpoint has this setting; leave "
                f"{name} out",
            )
        require(
            self.path != REFERENCE or template is not None,
            "path=reference without prompt_template: this teacher would only pull the policy back to its starting "
            "weights, which algorithm.kl_loss.kl_loss_coef does too; set a prompt_template with a demonstration",
        )
        require(
            template is None or "{prompt}" in template,
            f"prompt_template={template!r}: the template has no {{prompt}}; add {{prompt}}, as in "
            f"'{{prompt}}\\n\\nHint: {{hint}}'",
        )

    @property
    def key(self) -> str:
        """Name that error messages use for the config key `path` of this teacher."""
        return TEACHER_KEY.format(self.name)

    @property
    def is_endpoint(self) -> bool:
        """Whether the teacher is an HTTP endpoint, and not a model on the training ranks."""
        return self.path.startswith(_ENDPOINT)

    @property
    def is_model(self) -> bool:
        """Whether the teacher is a separate model on the training ranks, loaded from a directory or from the Hugging
        Face hub.
        """
        return not self.is_endpoint and self.path != REFERENCE

    @property
    def role(self) -> str:
        """Name of the role on the training ranks that computes the teacher's log-probs."""
        assert not self.is_endpoint, (
            "the training ranks do not compute a teacher's log-probs if the teacher is an endpoint"
        )
        return REFERENCE if self.path == REFERENCE else f"{TEACHER} {self.name}"


@section
class DistillationConfig:
    """Settings of distillation, in which the policy learns from teachers on the policy's own answers."""

    teachers: list[TeacherConfig] = key(
        "List of teachers, each given as a mapping or only by its path. An empty list: no distillation."
    )
    teacher_column: str | None = key(
        "Column of the data that holds the name of each row's teacher. null: all rows have the same teacher, which "
        "must be the only entry of algorithm.distillation.teachers."
    )
    mode: Literal["reward", "loss"] | None = key(
        "How distillation lowers the reverse KL divergence from the policy to the teacher. reward: log(pi_teacher / "
        "pi_old) of a token is added to the token's advantage. loss: the KL divergence is added to the loss. null: no "
        "distillation."
    )
    kl: Literal["sampled", "full"] = key(
        "How mode=loss computes the KL divergence. sampled: an estimate from the answer's tokens. full: the exact KL "
        "over the vocabulary, for teachers on the training ranks."
    )
    coef: float = key("Coefficient of the distillation term.", above=0)
    outcome_coef: float = key(
        "Factor for the advantages that are computed from rewards. 0: the policy learns from the teachers alone, and "
        "rewards only appear in the metrics.",
        at_least=0,
    )
    timeout_s: float = key("Time limit of one request to an endpoint.", unit="seconds", above=0, changeable=True)
    retries: int = key(
        "Maximum number of times that a failed request to an endpoint is sent again, with increasing delays. An "
        "answer whose requests all fail gets no distillation term.",
        at_least=0,
        changeable=True,
    )
    max_concurrent: int = key("Maximum number of simultaneous requests to an endpoint.", at_least=1, changeable=True)

    def __post_init__(self) -> None:
        names = [teacher.name for teacher in self.teachers]
        require(
            self.mode is None or bool(names),
            f"mode={self.mode} without teachers: nothing could be distilled; name a teacher, as in "
            "algorithm.distillation.teachers=[DIR]",
        )
        require(
            self.mode is not None or not names,
            f"teachers=[{', '.join(names)}] with mode=null: the teachers would not be used; set "
            "algorithm.distillation.mode=loss or reward, or use algorithm=distill",
        )
        require(
            self.mode is not None or (self.outcome_coef == 1 and self.teacher_column is None),
            f"outcome_coef={self.outcome_coef}, teacher_column={self.teacher_column} with mode=null: without "
            "distillation, the two keys have no effect; leave them out, or set algorithm.distillation.mode",
        )
        require(
            len(names) < 2 or self.teacher_column is not None,
            f"teachers=[{', '.join(names)}] without teacher_column: the data does not say which teacher each row "
            "has; name the column of the data that holds the name of each row's teacher",
        )
        require(
            self.mode != "reward" or self.kl == "sampled",
            "kl=full with mode=reward: the exact KL of a position does not depend on the token that was sampled, so "
            "as an advantage it would only add noise; use kl=sampled, or mode=loss",
        )
        for teacher in self.teachers:
            require(
                names.count(teacher.name) == 1,
                f"teachers: two teachers are named '{teacher.name}'; give each teacher its own name",
            )
            require(
                bool(re.fullmatch(r"[^\s/]+", teacher.name)),
                f"teachers: name {teacher.name!r}: the name is part of metric names, so it must not be empty or "
                "contain spaces or /; choose another name",
            )
            require(
                not (teacher.is_endpoint and self.kl == "full"),
                f"kl=full with the endpoint {teacher.path}: an endpoint gives the log-probs of sampled tokens only; "
                "use kl=sampled, or the directory of the model",
            )

    @property
    def in_reward(self) -> bool:
        """Whether log(pi_teacher / pi_old) of each token is added to the token's advantage."""
        return self.mode == "reward"

    @property
    def in_loss(self) -> bool:
        """Whether the KL divergence from the policy to the teacher is added to the loss."""
        return self.mode == "loss"

    @property
    def full(self) -> bool:
        """Whether the loss contains the exact KL divergence from the policy to the teacher over the vocabulary."""
        return self.in_loss and self.kl == "full"

    @property
    def alone(self) -> bool:
        """Whether the policy learns from the teachers alone, and not from the rewards."""
        return self.mode is not None and self.outcome_coef == 0

    @property
    def has_reference(self) -> bool:
        """Whether a teacher is the run's reference model."""
        return any(teacher.path == REFERENCE for teacher in self.teachers)

    @property
    def models(self) -> list[TeacherConfig]:
        """The teachers that are separate models on the training ranks."""
        return [teacher for teacher in self.teachers if teacher.is_model]
