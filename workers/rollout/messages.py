"""Messages to and from a rollout engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rltrain.batch.token_arrays import float_array, int_array, short_array
from rltrain.batch.trajectory import Trajectory
from rltrain.data.prompt_images import PromptImages


class HasKey(Protocol):
    """A request to a rollout replica.

    Requests for single answers and requests for trajectories have keys of the same form.
    """

    @property
    def key(self) -> tuple[int, ...]:
        """Key of the request: (uid of the prompt group, index of the sample in its group)."""


@dataclass(frozen=True)
class Request:
    """Request to sample one answer.

    Attributes:
        key: (uid of the prompt group, index of the sample in its group). If the answer is a turn of a trajectory in an
            environment, the key has a third element: a count of requests, which makes the key unique.
        prompt_ids: Token ids of the prompt, which the engine uses unchanged.
        temperature: Sampling temperature. At temperature 0, the engine decodes greedily.
        max_tokens: Maximum number of tokens in the answer. If an answer is cut off at `max_tokens`, its `finish_reason`
            is "length".
        seed: Seed of the random numbers with which the answer is sampled.
        images: Images that the prompt shows; None if it shows none.
    """

    key: tuple[int, ...]
    prompt_ids: list[int]
    temperature: float
    max_tokens: int
    seed: int
    images: PromptImages | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    The values of the tokens (`token_ids`, `log_probs`, `versions`) may be given as any sequences and are stored as
    arrays.

    Attributes:
        key: Key of the `Request` that this completion answers.
        token_ids: Token ids that the engine sampled, including the final end token or the final tokens of a stop
            string.
        log_probs: Log-probability of each token in nats, under the distribution from which the token was sampled.
        finish_reason: "stop", "length" or "abort", as reported by the engine.
        versions: For each token, the version of the weights that sampled the token.
        text: Text of the answer up to the first stop string, without special tokens.
        experts: Numbers of the experts that the routers of a mixture-of-experts model chose, or empty if the engine
            does not record them. For each token of the prompt and of the answer except the last one, there are k
            numbers for each of the model's L layers: L * k numbers for a token, layer by layer. The numbers of dense
            layers have no meaning. No expert was chosen for the last token, because the engine does not run the model
            on it.
    """

    key: tuple[int, ...]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    versions: Sequence[int]
    text: str = ""
    experts: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"sample {self.key}: {len(self.token_ids)} tokens, {len(self.log_probs)} log-probs, "
                f"{len(self.versions)} versions; an engine must return one log-prob and one version per token"
            )
        object.__setattr__(self, "token_ids", int_array(self.token_ids))
        object.__setattr__(self, "log_probs", float_array(self.log_probs))
        object.__setattr__(self, "versions", int_array(self.versions))
        object.__setattr__(self, "experts", short_array(self.experts))


Answer = Completion | Trajectory  # Result of a request: a single answer, or a trajectory in an environment.
