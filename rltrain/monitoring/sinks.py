"""Sinks: the places to which the metrics of a run are sent.

The sink `JsonLines` is always present, and the config key `trainer.trackers` names further sinks.
`docs/reading-a-run.md` explains how to add a sink.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rltrain.monitoring.json_lines import JsonLinesFile, line_of, lines_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"

Metrics = Mapping[str, float]  # value of each metric by its name
Rows = Sequence[Mapping[str, Any]]  # rows of a table; all have the same columns


class Sink(Protocol):
    """Interface of a place that metrics are sent to.

    A sink is made when the process of a run starts. Making it must not erase what an earlier process of the same run
    sent, because `restore` decides what is kept. A sink may also have the methods of `TakesConfig` and `TakesSamples`.

    The sinks that write the files of the output folder are called by the trainer, and their exceptions end the run. All
    other sinks are called in a thread of their own (`BackgroundSink`), and an exception is reported as an alarm.
    """

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a training step. Called once after each step; the first step is 1.

        Args:
            step: number of the training step.
            metrics: value of each metric by its name. The names may differ between steps. A value may be NaN or
                infinite.
        """

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of an evaluation.

        Args:
            step: number of training steps before the evaluation. It is 0 for the weights that the run starts with.
            metrics: value of each metric by its name, as in `log_step`.
        """

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Forget everything after `step`, because the run continues from there.

        Called before the first step, and again whenever lost training ranks make the run go back to a checkpoint. The
        sink may lack earlier steps: the run may have begun in another output folder.

        Args:
            step: last training step that is kept; 0 at the start of a run.
            steps: metrics of each kept training step, oldest first. The key `step` has the number of the step. Infinite
                values have become NaN.
            evaluations: the same for each kept evaluation.
        """

    def close(self) -> None:
        """Send what is still to be sent, and release files and connections. Called last, also when training fails."""


@runtime_checkable
class TakesConfig(Protocol):
    """Optional part of the interface: a sink that records the config of the run."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Take the resolved config, as nested plain values. Called once, before the first `restore`.

        The config holds no secret: a config that holds one is refused before the run starts.
        """


@runtime_checkable
class TakesSamples(Protocol):
    """Optional part of the interface: a sink that shows answers of the model."""

    def log_samples(self, step: int, rows: Rows) -> None:
        """Take some samples of a training step. Called after `log_step`, as often as `trainer.sample_every` says.

        Args:
            step: number of the training step.
            rows: one row for each sample, with the columns `uid`, `prompt`, `response`, `score`, `finish_reason`,
                `reward_error`, and `reward/NAME` for each reward component.
        """


class JsonLines:
    """Writes one JSON object per line: training steps to `metrics.jsonl`, and evaluations to `evaluations.jsonl`.

    Args:
        output_dir: folder of the two files; must exist.
    """

    def __init__(self, output_dir: Path) -> None:
        self.steps, self.evaluations = (JsonLinesFile(output_dir / name) for name in (METRICS, EVALUATIONS))

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of a training step to `metrics.jsonl`."""
        self.steps.append(line_of({"step": step, **metrics}))

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of an evaluation to `evaluations.jsonl`."""
        self.evaluations.append(line_of({"step": step, **metrics}))

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Replace both files by the kept lines."""
        self.steps.replace(lines_of(steps))
        self.evaluations.replace(lines_of(evaluations))

    def close(self) -> None:
        """Close both files."""
        self.steps.close()
        self.evaluations.close()


class TensorBoard:
    """Writes TensorBoard events, one curve for each metric of training steps and of evaluations.

    Args:
        output_dir: folder in which the folder `tensorboard` is made.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / "tensorboard"
        self.has_events = any(self.folder.glob("events.*"))  # the writer below creates a file at once
        self.writer = self._open(None)

    def _open(self, purge_step: int | None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=purge_step)

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Add a point to the curve of each metric of a training step."""
        self.has_events = True
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Add a point to the curve of each metric of an evaluation."""
        self.log_step(step, metrics)

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Hide the events after `step`. If the folder has no events, write the kept steps and evaluations."""
        self.writer.close()
        if self.has_events:
            self.writer = self._open(step + 1)
            return
        self.writer = self._open(None)
        for row in (*steps, *evaluations):
            self.log_step(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def close(self) -> None:
        """Write the remaining events and close the file."""
        self.writer.close()
