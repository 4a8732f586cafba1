"""The type that a reward function may return instead of a number."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardResult:
    """A score, or the reason why there is no score.

    Attributes:
        score: a finite number; None if the function does not apply to the sample.
        failed: True if the function could not judge the sample, which is then excluded from training and counted as a
            failure.
        message: the reason for a failure, in one line, which is stored with the sample.
    """

    score: float | None = None
    failed: bool = False
    message: str = ""
