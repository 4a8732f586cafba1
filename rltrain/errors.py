"""The project's exceptions: each message gives the value, the rule and the way out; all of them pickle (Ray)."""

from typing import Any


class RLTrainError(Exception):
    """Base of every error that rltrain raises on purpose."""


class ConfigError(RLTrainError, ValueError):
    """What the user asked for cannot run; raised before any worker starts. The program exits with status 2."""


class WorkerError(RLTrainError, RuntimeError):
    """A worker died, hung or answered with an error while the run went on."""


class WorkerLost(WorkerError):
    """A worker's process died or hung: another can take its place, unlike one that answered with an error."""


class SyncError(RLTrainError, RuntimeError):
    """After a weight sync an engine does not compute with the weights that the trainer sent (invariant E5)."""


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
    """The engine's log-probs are not those of the trainer for the same tokens (invariants E1 and D1)."""


class NumericsError(RLTrainError, ArithmeticError):
    """A loss or gradient is not finite, so an optimizer step would destroy the weights."""


class RewardError(RLTrainError, RuntimeError):
    """Too many reward calls failed for the run to go on.

    Attributes:
        batch: the samples, where they are all there.
    """

    batch: Any = None


def one_line(text: str, limit: int = 200) -> str:
    """The text as a terminal may get it: on one line, its middle left out if it is long."""
    # A control character could move the cursor or recolour the terminal: shown as \n, \x1b, ...
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit // 2] + " ... " + text[-limit // 2 :]
