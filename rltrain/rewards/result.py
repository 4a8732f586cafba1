"""`RewardResult`, which a reward function may return instead of a number, and `Verdict`, a validated result."""

from dataclasses import dataclass
from typing import NamedTuple

from rltrain.base.errors import RLTrainError


class ScoreError(RLTrainError, ValueError):
    """Raised if a reward function returned an invalid score, reported a failure or needs a column that is missing."""


@dataclass(frozen=True)
class RewardResult:
    """The score of a sample, or the reason why a reward function gives no score.

    Attributes:
        score: a finite number; None if the function does not apply to the sample.
        failed: True if the function could not judge the sample, which is then excluded from training and counted as a
            failure.
        message: the reason for a failure, in one line, which is stored with the sample.
        success: whether the answer is correct, for the accuracy metrics; None if the function does not decide whether
            the answer is correct.
    """

    score: float | None = None
    failed: bool = False
    message: str = ""
    success: bool | None = None


class Verdict(NamedTuple):
    """The result of a reward function for one sample, after validation.

    Attributes:
        score: a finite number in float32's range; None if the function does not apply to the sample.
        success: whether the answer is correct; None if the function makes no decision about correctness.
    """

    score: float | None
    success: bool | None = None


def both(first: bool | None, second: bool | None) -> bool | None:
    """Return False if either of two decisions on correctness is False, None if both are None, and True otherwise."""
    decided = [success for success in (first, second) if success is not None]
    return all(decided) if decided else None
