"""Messages to and from reward workers; the messages contain only plain data, so that pickling is fast."""

from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int]  # A key is (uid of the prompt group, number of the sample in the group).


@dataclass(frozen=True)
class RewardRequest:
    """One sample to score.

    Attributes:
        key: (uid of the prompt group, number of the sample in the group). No two pending requests have the same key.
        prompt: Text of the prompt, without special tokens.
        response: Text of the response, without special tokens.
        columns: Mapping from column name to value for the sample's data columns. Besides the data columns, the mapping
            `columns` has the keys `finish_reason`, `prompt_messages` (the prompt's chat messages, or None if the prompt
            is text) and `response_ids` (the sampled token ids).
    """

    key: Key
    prompt: str
    response: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class SampleScores:
    """The scores of one sample.

    Attributes:
        key: Key of the `RewardRequest` to which the scores belong.
        scores: One score per reward function, in the config's order. A score is None if the reward function does not
            apply to the sample. All scores of a failed sample are None.
        failed: Whether a reward function raised an exception, returned an invalid score, took too long or ended its
            process. A failed sample must never count as a sample with score 0.
        error: One line that says which reward function failed and how, or "" if no function failed.
        failed_function: Index of the reward function that failed, or -1 if no reward function failed.
        success: Whether the answer is correct according to the values of `RewardResult.success` that the reward
            functions returned. `success` is False if any reward function returned False. If no reward function returned
            False, `success` is True if any reward function returned True, and None otherwise.
        printed: One pair (name of the reward function, first line that the function printed) for each reward function
            that has printed something in the process that scored the sample. The field `printed` is ignored when two
            `SampleScores` are compared.
    """

    key: Key
    scores: tuple[float | None, ...]
    failed: bool = False
    error: str = ""
    failed_function: int = -1
    success: bool | None = None
    printed: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
