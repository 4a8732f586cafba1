"""Tests of the MLflow tracker with a SQLite store, and with a folder as the store.

The tests read the logged runs through MLflow's own client.
"""

import json
import math

import pytest
import yaml

mlflow = pytest.importorskip("mlflow")

from rltrain.monitoring.trackers import mlflow_tracker  # noqa: E402
from rltrain.monitoring.trackers.mlflow_tracker import MlflowTracker  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Warnings that the library MLflow emits must not make a test fail.
ROWS = [{"uid": 0, "prompt": "2+2=", "response": "4", "score": 1.0}]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)  # MLflow writes artifacts into the working directory.


def started(output_dir, **config):
    output_dir.mkdir(exist_ok=True)
    tracker = MlflowTracker(output_dir)
    tracker.log_config({"trainer": {"seed": 3} | config})
    return tracker


def only_run(experiment="rltrain"):
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def history(client, run, name):
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def test_the_client_finds_the_run_its_config_its_metrics_and_its_samples(tmp_path):
    tracker = started(tmp_path / "my_run")
    tracker.restore(0, [], [])
    tracker.log_eval(0, {"eval/greedy_reward": 0.5})
    tracker.log_step(1, {"reward/mean": 0.25, "actor/grad_norm": math.inf, "reward/a,b/mean": 1.0})
    tracker.log_samples(1, ROWS)
    tracker.log_step(2, {"reward/mean": 0.75})
    tracker.close()
    client, run = only_run()
    assert (run.info.run_name, run.info.status) == ("my_run", "FINISHED")
    assert run.data.params == {"trainer.seed": "3"}
    assert history(client, run, "reward/mean") == [(1, 0.25), (2, 0.75)]
    assert history(client, run, "eval/greedy_reward") == [(0, 0.5)]
    assert history(client, run, "reward/a_b/mean") == [(1, 1.0)]
    assert run.data.metrics["reward/mean"] == 0.75
    assert run.data.metrics["actor/grad_norm"] > 1e300
    samples = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/samples/step_000001.json")
    assert samples == {"columns": [*ROWS[0]], "data": [[*ROWS[0].values()]]}
    assert json.loads((tmp_path / "my_run/trackers.json").read_text()) == {"mlflow": run.info.run_id}


def test_a_file_store_that_mlflow_was_told_to_allow_has_the_metrics_and_samples(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = started(tmp_path / "run")
    tracker.restore(0, [], [])
    tracker.log_step(1, {"reward/mean": 0.25})
    tracker.log_samples(1, ROWS)
    tracker.log_step(2, {"reward/mean": 0.75})
    tracker.close()
    client, run = only_run()
    assert (run.info.run_name, run.info.status, run.data.params) == ("run", "FINISHED", {"trainer.seed": "3"})
    assert history(client, run, "reward/mean") == [(1, 0.25), (2, 0.75)]
    assert (tmp_path / "store" / run.info.experiment_id / run.info.run_id / "metrics/reward/mean").exists()
    samples = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/samples/step_000001.json")
    assert samples["data"] == [[*ROWS[0].values()]]


def test_a_resumed_run_is_the_same_run_and_the_last_value_of_a_repeated_step_counts(tmp_path):
    first = started(tmp_path / "run", total_steps=2)
    first.restore(0, [], [])
    for step in (1, 2, 3):
        first.log_step(step, {"reward/mean": step / 4})
    first.close()
    second = started(tmp_path / "run", total_steps=3)
    second.restore(2, [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}], [])
    assert only_run()[1].info.status == "RUNNING"
    second.log_step(3, {"reward/mean": 9.0})
    second.close()
    client, run = only_run()
    assert history(client, run, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 9.0)]
    assert (run.data.metrics["reward/mean"], run.info.status) == (9.0, "FINISHED")
    # MLflow does not let a client change a parameter that is already logged.
    assert run.data.params["trainer.total_steps"] == "2"
    config = yaml.safe_load(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/config.yaml"))
    assert config == {"trainer": {"seed": 3, "total_steps": 3}}


def test_a_run_that_goes_on_in_another_folder_starts_with_the_kept_values(tmp_path):
    tracker = started(tmp_path / "run")
    tracker.restore(1, [{"step": 1, "reward/mean": 0.25}], [{"step": 0, "eval/greedy_reward": 0.5}])
    tracker.close()
    client, run = only_run()
    assert history(client, run, "reward/mean") == [(1, 0.25)]
    assert history(client, run, "eval/greedy_reward") == [(0, 0.5)]
    assert "step" not in run.data.metrics


def test_more_metrics_than_fit_into_one_request_all_arrive(tmp_path):
    tracker = started(tmp_path / "run")
    tracker.restore(0, [], [])
    tracker.log_step(1, {f"m{number}": float(number) for number in range(2500)})
    tracker.close()
    assert only_run()[1].data.metrics == {f"m{number}": float(number) for number in range(2500)}


def test_short_steps_are_sent_together_and_long_ones_at_once(tmp_path, monkeypatch):
    tracker = started(tmp_path / "run")
    tracker.restore(0, [], [])
    for step in (1, 2, 3):
        tracker.log_step(step, {"reward/mean": step / 4})
    client, run = only_run()
    assert history(client, run, "reward/mean") == [(1, 0.25)]
    monkeypatch.setattr(mlflow_tracker, "INTERVAL_S", 0.0)
    tracker.log_step(4, {"reward/mean": 1.0})
    assert history(client, run, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    tracker.close()


def test_the_librarys_own_variables_name_experiment_and_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setenv("MLFLOW_RUN_NAME", "named")
    for folder in ("first", "second"):
        tracker = started(tmp_path / folder)
        tracker.restore(0, [], [])
        tracker.close()
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert [run.info.run_name for run in runs] == ["named", "named"]
