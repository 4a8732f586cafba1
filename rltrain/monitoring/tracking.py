"""The class `Tracker`, which passes the results of a run from the trainer to sinks, files and the display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rltrain.base.secret_values import redacted
from rltrain.base.storage import FileStart
from rltrain.batch.data_proto import DataProto
from rltrain.monitoring.json_lines import JsonLinesFile, rows_of
from rltrain.monitoring.learning_curve import StepHistory, draw_learning_curve
from rltrain.monitoring.ledger import LEDGER, ledger_line
from rltrain.monitoring.report.refresh import ReportFile
from rltrain.monitoring.sample_files import SampleFiles, sample_rows
from rltrain.monitoring.sinks import EVALUATIONS, METRICS, TakesConfig, TakesSamples
from rltrain.monitoring.trackers.background import BackgroundSink
from rltrain.monitoring.trackers.loading import TENSORBOARD, make_sinks

ALARMS = "alarms.jsonl"
IN_CHECKPOINTS = (METRICS, EVALUATIONS, LEDGER, ALARMS)  # Files of which each checkpoint stores a copy.


class Display(Protocol):
    """Interface of a display that shows the results of a run to the user."""

    def restore(self, step: int) -> None:
        """Show that training continues after the training step `step`."""

    def step(self, step: int, metrics: dict[str, float], batch: DataProto) -> None:
        """Show the metrics and a sample of a training step. The tracker calls `step` after each training step."""

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of an evaluation. The tracker calls `evaluation` after each evaluation."""

    def warning(self, text: str) -> None:
        """Show a one-line warning to the user."""


class Tracker:
    """Recorder of the results of a run, to which the trainer passes each result as soon as the result is available.

    The tracker sends metrics to all sinks, and writes samples, alarms and the ledger to files.

    Args:
        output_dir: output folder of the run; must exist.
        display: display that shows the results to the user.
        components: names of the reward functions and reward models.
        trackers: value of the config key `trainer.trackers`, which names all sinks except `JsonLines`.
        sample_every: samples are sent to the sinks that implement `TakesSamples` once every `sample_every` training
            steps; 0 sends no samples.
        config: the resolved config as nested dicts and lists of plain values, without secrets.
    """

    def __init__(
        self,
        output_dir: Path,
        display: Display,
        components: Sequence[str],
        *,
        trackers: Sequence[str] = (TENSORBOARD,),
        sample_every: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.output_dir, self.display, self.sample_every = output_dir, display, sample_every
        self.history = StepHistory()
        self.evaluations: list[dict[str, float]] = []
        self.samples = SampleFiles(output_dir, components)
        self.sinks = make_sinks(output_dir, trackers)
        for sink in self.sinks:
            if isinstance(sink, TakesConfig):
                sink.log_config(config or {})
        self.report = ReportFile(output_dir)
        self.ledger, self.alarms = (JsonLinesFile(output_dir / name) for name in (LEDGER, ALARMS))

    def restore(self, step: int, kept: Mapping[str, bytes]) -> list[dict[str, float]]:
        """Restore the contents that all files and sinks had after the training step `step`.

        Args:
            step: last training step whose results are kept.
            kept: maps the name of each file in `IN_CHECKPOINTS` to the content that the file had after the training
                step `step`; {} at the start of a run.

        Returns:
            The metrics of all training steps up to `step`.
        """
        steps, self.evaluations = (rows_of(kept.get(name, b"")) for name in (METRICS, EVALUATIONS))
        for sink in self.sinks:
            sink.restore(step, steps, self.evaluations)
        self.ledger.replace(kept.get(LEDGER, b""))
        self.alarms.replace(kept.get(ALARMS, b""))
        self.samples.restore(step)
        self.history = StepHistory(steps)
        self.display.restore(step)
        return steps

    def state(self) -> dict[str, FileStart]:
        """Return a dict that maps the name of each file in `IN_CHECKPOINTS` to the part that a checkpoint copies.

        A checkpoint copies only the bytes that a file already contains when `state` is called.
        """
        paths = {name: self.output_dir / name for name in IN_CHECKPOINTS}
        return {name: FileStart(path, path.stat().st_size) for name, path in paths.items()}

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return the metrics of the training step `step` and of the evaluation after the training step `step`.

        `metrics_of` returns an empty dict unless `step` is the number of the most recent training step or of the most
        recent evaluation.
        """
        rows = [row for row in (*self.history.last(), *self.evaluations[-1:]) if row["step"] == step]
        return {name: value for row in rows for name, value in row.items()}

    def names(self) -> set[str]:
        """Return the names of all metrics of the most recent training step and of the most recent evaluation."""
        return {name for row in (*self.history.last(), *self.evaluations[-1:]) for name in row}

    def evaluated(self, step: int) -> bool:
        """Return whether the most recent evaluation evaluated the weights after the training step `step`."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == step

    def log_step(
        self,
        step: int,
        metrics: dict[str, float],
        batch: DataProto,
        dropped: Sequence[int] = (),
        reused: Sequence[int] = (),
    ) -> None:
        """Record the metrics and samples of a training step, add a line to the ledger, and show the metrics.

        Args:
            step: number of the training step.
            metrics: mapping from the name of each metric to the metric's value.
            batch: the batch that was trained on.
            dropped: uids of the prompt groups that the step dropped.
            reused: uids of the prompt groups of earlier training steps on which this training step trained again.
        """
        self.samples.write_trained(step, batch)
        self.ledger.append(ledger_line(step, batch, dropped, reused))
        self.history.append({"step": step, **metrics})
        for sink in self.sinks:
            sink.log_step(step, metrics)
        if self.sample_every and (step == 1 or step % self.sample_every == 0):
            self._log_samples(step, batch)
        self.report.refresh()
        self.display.step(step, metrics, batch)
        self._report_failed_sinks(step)

    def _log_samples(self, step: int, batch: DataProto) -> None:
        takers = [sink for sink in self.sinks if isinstance(sink, TakesSamples)]
        if takers and len(batch):
            rows = sample_rows(batch, self.samples.components)
            for sink in takers:
                sink.log_samples(step, rows)

    def _report_failed_sinks(self, step: int) -> None:
        for sink in self.sinks:
            for text in sink.alarms() if isinstance(sink, BackgroundSink) else ():
                self.log_alarm(step, f"step {step}: {text}")

    def log_failed(self, step: int, batch: DataProto) -> Path:
        """Write the samples of a failed training step to a file, and return the path of the file."""
        return self.samples.write_failed(step, batch)

    def save_batch(self, step: int, batch: DataProto) -> str:
        """Save the whole batch of a step in the folder `failed`, as a file that `DataProto.load` can read.

        Returns:
            The path of the file with the saved batch, or the reason why the batch could not be saved.
        """
        return self.samples.save_batch(step, batch)

    def warn(self, text: str) -> None:
        """Show a warning about the run to the user immediately."""
        self.display.warning(text)

    def log_alarm(self, step: int, text: str) -> None:
        """Show an alarm to the user and record it. The text of the alarm must contain the number of the step."""
        self.warn(text)
        self.alarms.append({"step": step, "alarm": redacted(text)})

    def log_eval(self, step: int, metrics: dict[str, float], batches: Mapping[str, DataProto]) -> None:
        """Record and show the results of an evaluation of the weights after `step` training steps.

        Args:
            step: number of training steps before the evaluation.
            metrics: mapping from the name of each metric to the metric's value.
            batches: maps each prefix of metric names, such as `eval/greedy`, to the answers that the metrics with the
                prefix describe.
        """
        self.samples.write_evaluated(step, batches)
        self.evaluations.append({"step": step, **metrics})
        for sink in self.sinks:
            sink.log_eval(step, metrics)
        self.report.refresh()
        self.display.evaluation(step, metrics)
        self._report_failed_sinks(step)

    def close(self) -> Path | None:
        """Close all sinks and files, draw the learning curve and write the report.

        Sinks that are called in separate threads are closed concurrently.

        Returns:
            The path of the image of the learning curve, or None if the run took no training step.
        """
        for sink in self.sinks:
            if isinstance(sink, BackgroundSink):
                sink.finish()
        for sink in self.sinks:
            sink.close()
        self._report_failed_sinks(max((int(row["step"]) for row in self.history.last()), default=0))
        self.ledger.close()
        self.alarms.close()
        if self.history or any(self.samples.tables.iterdir()):
            self.report.close()
        if not self.history:
            return None
        path = self.output_dir / "learning_curve.png"
        draw_learning_curve(self.history.rows(), self.evaluations, path)
        return path
