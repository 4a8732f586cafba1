"""Tracker that sends a run to MLflow, through MLflow's own client.

`docs/reading-a-run.md` describes the environment variables of MLflow.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.monitoring.sinks import Metrics, TableRows, replay, table_of
from rltrain.monitoring.trackers.run_ids import RunIds

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

EXPERIMENT = "rltrain"
# MLflow's REST API accepts at most 1000 metric values and 100 parameters in one request.
METRICS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100
# Minimum time in seconds between two requests with metric values, unless METRICS_AT_ONCE values wait or the run ends.
# Sending one request after each short training step would take three times as much CPU time as sending one request
# every 5 seconds.
INTERVAL_S = 5.0
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")


class MlflowTracker:
    """Sink that sends a run to an MLflow server, or to the store that `MLFLOW_TRACKING_URI` names.

    MLflow cannot remove logged values. When a run goes back to a checkpoint and repeats steps, MLflow keeps two values
    for each repeated step and shows the value with the later time stamp.

    Args:
        output_dir: output folder of the run; must exist.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir, self.ids = output_dir, RunIds(output_dir, "mlflow")
        self.config: dict[str, Any] = {}
        self.client: MlflowClient | None = None
        self.run_id = ""
        self.waiting: list[Metric] = []
        self.sent_at = 0.0

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Store the config of the run until `restore` passes the config to MLflow."""
        self.config = dict(config)

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Add one value to the MLflow history of each metric in `metrics`.

        Metric values wait until `INTERVAL_S` seconds have passed since the last request to MLflow, or until
        `METRICS_AT_ONCE` values are waiting. All waiting values are then sent together.
        """
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        self.waiting += [Metric(_name(name), value, now, step) for name, value in metrics.items()]
        if len(self.waiting) >= METRICS_AT_ONCE or time.monotonic() - self.sent_at >= INTERVAL_S:
            self._send()

    def _send(self) -> None:
        assert self.client is not None, "`restore` must be called before metrics are sent"
        values, self.waiting, self.sent_at = self.waiting, [], time.monotonic()
        for start in range(0, len(values), METRICS_AT_ONCE):
            self.client.log_batch(self.run_id, metrics=values[start : start + METRICS_AT_ONCE])

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Add one value to the MLflow history of each metric in `metrics`."""
        self.log_step(step, metrics)

    def log_samples(self, step: int, rows: TableRows) -> None:
        """Log the samples as the MLflow artifact `samples/step_N.json`, in the `split` format of pandas tables."""
        assert self.client is not None, "`restore` must be called before `log_samples`"
        self.client.log_dict(self.run_id, table_of(rows), f"samples/step_{step:06d}.json")

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Start an MLflow run, or continue the run that belongs to the output folder or that `MLFLOW_RUN_ID` names.

        If a new MLflow run is started, it receives the metrics in `steps` and `evaluations`.
        """
        from mlflow import MlflowClient

        if self.client is not None:
            self._send()
        self.client = MlflowClient()
        known = self.ids.read() or os.environ.get("MLFLOW_RUN_ID")
        if known is not None:
            self.run_id = known
            self.ids.write(known)
            self.client.update_run(known, status="RUNNING")
        else:
            self.run_id = self._start(self.client)
            replay(self, (*steps, *evaluations))
        self.client.log_dict(self.run_id, self.config, "config.yaml")

    def close(self) -> None:
        """Send all metric values that are not sent yet, and mark the MLflow run as finished."""
        if self.client is not None:
            self._send()
            self.client.set_terminated(self.run_id)
            self.client = None

    def _start(self, client: "MlflowClient") -> str:
        """Start an MLflow run and return its id.

        The config is logged as the parameters of the MLflow run, and MLflow does not allow later changes to parameters.
        """
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_RUN_NAME") or self.output_dir.name
        run_id: str = client.create_run(_experiment(client), run_name=name).info.run_id
        # The id of the MLflow run is stored immediately, so that the MLflow run can be continued even if the process is
        # killed.
        self.ids.write(run_id)
        values = [Param(_name(key), str(value)) for key, value in _flat(self.config)]
        for start in range(0, len(values), PARAMETERS_AT_ONCE):
            client.log_batch(run_id, params=values[start : start + PARAMETERS_AT_ONCE])
        return run_id


def _experiment(client: "MlflowClient") -> str:
    """Return the id of the MLflow experiment that the environment variables name.

    If MLflow has no experiment with the name from `MLFLOW_EXPERIMENT_NAME`, or with the default name `EXPERIMENT`, the
    experiment is created.
    """
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return given
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _name(name: str) -> str:
    """Replace with an underscore each character that MLflow does not allow in the name of a metric or parameter.

    Metric names may contain any character, because metric names include the names of reward functions.
    """
    return _NOT_IN_A_NAME.sub("_", name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
