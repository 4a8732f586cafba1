"""What goes to and comes from reward workers. Plain data that pickles fast."""

from dataclasses import dataclass
from typing import Any

Key = tuple[int, int]  # (uid of the prompt group, number of the sample in it)


@dataclass(frozen=True)
class RewardRequest:
    """One sample to score.

    Attributes:
        key: (uid of its group, number of the sample in it); no two requests in flight share one.
        prompt: text without special tokens.
        response: text without special tokens.
        columns: the data's columns by name, and `finish_reason`.
    """

    key: Key
    prompt: str
    response: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """The scores of one sample.

    Attributes:
        key: that of the request.
        scores: one per function, in the config's order; None where a function does not apply, and everywhere if failed.
        failed: a function raised, returned no score, took too long or ended its process. Never to be read as 0.
        error: one line that says which function failed and how; empty if none did.
        failed_function: its number, -1 if none did.
    """

    key: Key
    scores: tuple[float | None, ...]
    failed: bool = False
    error: str = ""
    failed_function: int = -1
