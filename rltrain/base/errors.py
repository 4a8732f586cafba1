"""The project's exceptions: each message gives the value, the rule and the way out; all of them pickle (Ray)."""

from typing import Any

from rltrain.base.secret_values import redacted

_READ = 100_000  # characters of an exception's text that are looked at


class RLTrainError(Exception):
    """Base of every error that rltrain raises on purpose."""


class ConfigError(RLTrainError, ValueError):
    """What the user asked for cannot run; raised before any worker starts. The program exits with status 2."""


class WorkerError(RLTrainError, RuntimeError):
    """A worker died, hung or answered with an error while the run went on."""


class WorkerLost(WorkerError):
    """A worker's process died or hung: another can take its place, unlike one that answered with an error.

    Attributes:
        process: the worker itself (`workers.cluster.progress.Process`), where it is the one that says so.
    """

    process: Any = None


class ClusterLost(RLTrainError, RuntimeError):
    """A daemon of Ray died, which no run survives.

    Attributes:
        can_save: whether the run was between two steps and its training ranks still answer: a checkpoint can be saved.
    """

    can_save = False


class SyncError(RLTrainError, RuntimeError):
    """After a weight sync an engine does not compute with the weights that the trainer sent."""


class CheckpointError(RLTrainError, RuntimeError):
    """A checkpoint is damaged, or could not be written or read."""


class Stopped(RLTrainError):
    """The user, or the machine's owner, asked the run to stop: it does so where nothing is lost.

    Attributes:
        status: the program's exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class LogProbError(RLTrainError, RuntimeError):
    """The engine's log-probs are not those of the trainer for the same tokens."""


class NumericsError(RLTrainError, ArithmeticError):
    """A loss or gradient is not finite, so an optimizer step would destroy the weights."""


class RewardError(RLTrainError, RuntimeError):
    """Scores cannot be had: too many reward calls failed, or what combines them did.

    Attributes:
        batch: the samples, where they are all there.
        repairable: the source, as `source_name` calls it, that has to change before the run can go on; "" for none.
    """

    batch: Any = None
    repairable: str = ""


class EstimatorError(RLTrainError, RuntimeError):
    """An advantage estimator raised an exception."""


def one_line(text: str, limit: int = 200) -> str:
    """Return the text as a terminal may get it: on one line, without secrets, its middle left out if it is long."""
    # A control character could move the cursor or recolour the terminal: shown as \n, \x1b, ...
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in redacted(text))
    return text if len(text) <= limit else text[: limit // 2] + " ... " + text[-limit // 2 :]


def described(error: BaseException, limit: int = 300) -> str:
    """Return type and text of an exception on one line, without secrets and cut after `limit` characters of text.

    Whatever the exception is, the result can be encoded, stored and shown: its `__str__` may raise, and its text may
    hold half a surrogate pair.
    """
    try:
        text = str(error)[:_READ]
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        text = f"its text cannot be had: __str__ raised {type(second).__name__}"
    return f"{_clean(type(error).__name__)}: {_clean(text)[:limit]}".rstrip(": ")


def _clean(text: str) -> str:
    return " ".join(redacted(text).encode("utf-8", "backslashreplace").decode().split())
