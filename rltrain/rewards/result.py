"""What a reward function may return besides a number."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardResult:
    """A score with a reason to it.

    Attributes:
        score: finite; None where the function does not apply.
        failed: the function could not judge this sample, which is then left out of training and counted.
        message: one line, kept with the sample where it failed.
    """

    score: float | None = None
    failed: bool = False
    message: str = ""
