"""The exceptions of rltrain.

All exceptions of rltrain can be pickled, because Ray sends exceptions between processes. Each error message states the
invalid value, the rule that the value breaks, and how to fix the value.
"""

from typing import Any

from rltrain.base.secret_values import redacted

_READ = 100_000  # Only the first 100,000 characters of an exception's text are processed.


class RLTrainError(Exception):
    """Base class of every error that rltrain raises deliberately."""


class ConfigError(RLTrainError, ValueError):
    """Raised if a run cannot start with the user's configuration, for example because a value or a file is invalid.

    A ConfigError is raised before any worker starts, and makes the program exit with status 2.
    """


class WorkerError(RLTrainError, RuntimeError):
    """Raised if a worker died, stopped responding or answered with an error during the run."""


class WorkerLost(WorkerError):
    """Raised if a worker's process died or stopped responding.

    A lost worker can be replaced by another process, whereas a worker that answered with an error cannot be replaced.

    Attributes:
        process: the lost process, a `workers.cluster.progress.Process`; None if the lost process is not known.
    """

    process: Any = None


class ClusterLost(RLTrainError, RuntimeError):
    """Raised if a Ray daemon died, so that the run cannot continue.

    Attributes:
        can_save: True if the run can still save a checkpoint, that is, if the run was between two steps and the
            training ranks still respond.
    """

    can_save = False


class SyncError(RLTrainError, RuntimeError):
    """Raised if a rollout engine does not use the weights that the trainer sent in a weight sync."""


class SyncStopped(SyncError):
    """Raised in one process of a weight sync if the sync stops because another process failed or died."""


class CheckpointError(RLTrainError, RuntimeError):
    """Raised if a checkpoint is damaged, cannot be written, or cannot be read."""


class Stopped(RLTrainError):
    """Raised if a signal, such as SIGTERM or the SIGINT of Ctrl-C, asked the program to stop.

    The first signal during training stops the run at a point where no data is lost.

    Attributes:
        status: the exit status of the program.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class LogProbError(RLTrainError, RuntimeError):
    """Raised if the log-probs that the inference engine and the trainer compute for the same tokens differ too much."""


class NumericsError(RLTrainError, ArithmeticError):
    """Raised if a loss or gradient is not finite, so that an optimizer step would destroy the weights."""


class RewardError(RLTrainError, RuntimeError):
    """Raised if the rewards cannot be computed: too many reward calls failed, or the aggregation of scores failed.

    Attributes:
        batch: the batch of samples whose rewards could not be computed; None if not all samples of the step are
            available.
        repairable: name of the user's file that must be repaired before the run can be resumed, as returned by
            `source_name`; "" if no file has to be repaired.
    """

    batch: Any = None
    repairable: str = ""


class EstimatorError(RLTrainError, RuntimeError):
    """Raised if an advantage estimator fails with an exception."""


def one_line(text: str, limit: int = 200) -> str:
    """Return `text` on one line, without secrets and safe to print on a terminal.

    The middle of a text with more than `limit` characters is replaced by " ... ".
    """
    # Control characters are escaped (as \n, \x1b, ...), because a control character could move the cursor or change the
    # terminal's colors.
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in redacted(text))
    return text if len(text) <= limit else text[: limit // 2] + " ... " + text[-limit // 2 :]


def described(error: BaseException, limit: int = 300) -> str:
    """Return an exception's type and text on one line, without secrets.

    The exception's text is cut after `limit` characters. Unpaired surrogates in the exception's text are escaped, so
    that the text can be encoded and stored. If the exception's `__str__` raises a second exception, `described` names
    the type of the second exception in place of the text.
    """
    try:
        text = str(error)[:_READ]
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        text = f"no text, because __str__ raised {type(second).__name__}"
    return f"{_clean(type(error).__name__)}: {_clean(text)[:limit]}".rstrip(": ")


def _clean(text: str) -> str:
    return " ".join(redacted(text).encode("utf-8", "backslashreplace").decode().split())
