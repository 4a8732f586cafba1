"""What goes to a rollout engine and what comes back."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One answer to sample.

    Attributes:
        key: (prompt group uid, number of the sample in its group).
        prompt_ids: token ids of the prompt, sent as they are.
        temperature: 0 decodes greedily.
        max_tokens: answers are cut after so many tokens, with `finish_reason` "length".
        seed: of this answer's random stream.
    """

    key: tuple[int, int]
    prompt_ids: list[int]
    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        key: that of its request.
        token_ids: as the engine returned them, the end token included where it was sampled.
        log_probs: nats, one a token, of the distribution that was sampled from.
        finish_reason: "stop", "length" or "abort", as the engine said.
        versions: weight version of each token.
        text: the answer decoded without special tokens.
    """

    key: tuple[int, int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    versions: list[int]
    text: str = ""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"sample {self.key}: {len(self.token_ids)} tokens, {len(self.log_probs)} log-probs, "
                f"{len(self.versions)} versions; an engine must return one of each"
            )
