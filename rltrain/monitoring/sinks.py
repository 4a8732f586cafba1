"""Sinks: objects that write the metrics of a run to files or send the metrics to services.

The sink `JsonLines` is always present, and the config key `trainer.trackers` names the other sinks of a run.
`docs/reading-a-run.md` explains how to add a sink.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rltrain.monitoring.json_lines import JsonLinesFile, line_of, lines_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"

Metrics = Mapping[str, float]  # A mapping from the name of each metric to the value of the metric.
TableRows = Sequence[Mapping[str, Any]]  # The rows of a table; all rows have the same columns.


class Sink(Protocol):
    """Interface of a sink, which receives the metrics of a run and writes them to a file or sends them to a service.

    A sink is created when the process of a run starts. The constructor of a sink must not erase metrics of an earlier
    process of the same run, because only the method `restore` decides which metrics are kept. Besides the interface
    `Sink`, a sink may implement the interfaces `TakesConfig` and `TakesSamples`.

    The trainer calls the methods of `JsonLines` and `TensorBoard` in the trainer's thread, so an exception in
    `JsonLines` or `TensorBoard` ends the run. Every sink except `JsonLines` and `TensorBoard` is called in a separate
    thread (`BackgroundSink`), and an exception in the thread is reported as an alarm.
    """

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Receive the metrics of a training step.

        The trainer calls `log_step` once after each training step; the first training step has the number 1.

        Args:
            step: number of the training step.
            metrics: mapping from the name of each metric to the metric's value. Different steps may have different
                metrics. The value of a metric may be NaN or infinite.
        """

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Receive the metrics of an evaluation.

        Args:
            step: number of training steps that the run took before the evaluation; 0 for an evaluation of the run's
                initial weights.
            metrics: mapping from the name of each metric to the metric's value, which may be NaN or infinite.
        """

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Discard the metrics and samples of all training steps after `step`.

        After `restore`, the run continues with the training step `step` + 1. The trainer calls `restore` before the
        first step, and again whenever the run goes back to a checkpoint because training ranks have failed. A sink must
        not rely on having received the metrics of all earlier steps, because a run can begin in one output folder and
        continue in another output folder.

        Args:
            step: last training step whose metrics and samples are kept; 0 at the start of a run.
            steps: one mapping with the metrics of each training step up to `step`, oldest first. Besides the metrics,
                each mapping in `steps` has the key `step`, whose value is the number of the training step. In `steps`
                and `evaluations`, infinite metric values are replaced by NaN.
            evaluations: metrics of each evaluation up to the training step `step`, in the same form as `steps`.
        """

    def close(self) -> None:
        """Send all metrics that are not sent yet, then close files and connections.

        The trainer calls `close` after all other methods of the sink, even if training fails.
        """


@runtime_checkable
class TakesConfig(Protocol):
    """Optional interface of a sink that records the config of the run."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Receive the resolved config of the run, as nested dicts and lists of plain values.

        The trainer calls `log_config` once, before the first call of `restore`. The config contains no secret, because
        rltrain refuses a config with a secret before the run starts.
        """


@runtime_checkable
class TakesSamples(Protocol):
    """Optional interface of a sink that shows samples. A sample is an answer of the model."""

    def log_samples(self, step: int, rows: TableRows) -> None:
        """Receive some samples of a training step.

        The trainer calls `log_samples` after `log_step`, in the steps that the config key `trainer.sample_every`
        selects.

        Args:
            step: number of the training step.
            rows: one row per sample, with columns `uid`, `prompt`, `response`, `score`, `finish_reason`, `reward_error`
                and a column `reward/NAME` for each reward function and reward model.
        """


def replay(sink: Sink, rows: Iterable[Metrics]) -> None:
    """Send the metrics of earlier steps to a sink that has not received those metrics.

    Args:
        sink: the sink that receives the metrics. `replay` calls the sink's method `log_step` once for each row.
        rows: one row of metrics for each training step or evaluation. In each row, the key `step` gives the number of
            the training step.
    """
    for row in rows:
        sink.log_step(int(row["step"]), {name: value for name, value in row.items() if name != "step"})


def table_of(rows: TableRows) -> dict[str, list[Any]]:
    """Convert samples to a dict: `columns` lists the column names, and `data` has one list of values per sample."""
    columns = list(rows[0])
    return {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}


class JsonLines:
    """Sink that writes one JSON object per line: training steps to `metrics.jsonl`, evaluations to `evaluations.jsonl`.

    Args:
        output_dir: output folder of the run, for the files `metrics.jsonl` and `evaluations.jsonl`; must exist.
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
        """Replace the content of `metrics.jsonl` by `steps`, and that of `evaluations.jsonl` by `evaluations`."""
        self.steps.replace(lines_of(steps))
        self.evaluations.replace(lines_of(evaluations))

    def close(self) -> None:
        """Close `metrics.jsonl` and `evaluations.jsonl`."""
        self.steps.close()
        self.evaluations.close()


class TensorBoard:
    """Sink that writes TensorBoard events, with one curve for each metric of training steps and of evaluations.

    Args:
        output_dir: folder in which the subfolder `tensorboard` is created.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / "tensorboard"
        # `has_events` is set before `SummaryWriter` is created, because `SummaryWriter` creates an event file
        # immediately.
        self.has_events = any(self.folder.glob("events.*"))
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
        """Make TensorBoard hide all events after the training step `step`.

        If the run's TensorBoard folder has no events, write events for all metrics in the arguments `steps` and
        `evaluations`.
        """
        self.writer.close()
        if self.has_events:
            self.writer = self._open(step + 1)
            return
        self.writer = self._open(None)
        replay(self, (*steps, *evaluations))

    def close(self) -> None:
        """Write the events that are not written yet, and close the event file."""
        self.writer.close()
