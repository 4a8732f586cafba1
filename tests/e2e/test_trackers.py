"""Whole runs with experiment trackers: runs that stop, resume, or cannot reach the tracking service."""

import json
import signal
import subprocess
import sys
import time

import pytest
from runs import SMALL, finish, start, train

for library in ("wandb", "mlflow", "trackio"):
    pytest.importorskip(library)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # The libraries of the trackers emit warnings.
COMMON = [*SMALL, "placement=inprocess", "rollout=hf", "data.val_size=4", "trainer.total_steps=5"]
ALL = "trainer.trackers=[tensorboard,wandb,mlflow,trackio]"


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Make every experiment tracker write to the local disk instead of sending data to a service."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import mlflow

    # The MLflow experiment is created in advance with a folder for artifacts. Otherwise, MLflow would write artifacts
    # into the working directory.
    mlflow.MlflowClient().create_experiment("rltrain", artifact_location=str(tmp_path / "artifacts"))


def step_count(output):
    file = output / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def ids_in(output):
    file = output / "trackers.json"
    return json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.usefixtures("local")
@pytest.mark.timeout(600)  # The test runs two programs one after the other.
def test_a_run_that_is_terminated_and_resumed_is_one_run_with_every_step_in_each_tracker(tmp_path):
    output = tmp_path / "run"
    process = start(output, *COMMON, ALL, "trainer.total_steps=500")
    while process.poll() is None and (step_count(output) < 2 or len(ids_in(output)) < 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, output)
    assert (stopped.status, stopped.survivors) == (143, []), stopped.stderr
    ids, last = ids_in(output), step_count(output) + 2
    resumed = train(output, *COMMON, ALL, f"trainer.total_steps={last}", "trainer.resume=auto")
    assert (resumed.status, resumed.survivors) == (0, []), resumed.stderr
    assert ids_in(output) == ids
    assert resumed.lines("alarms.jsonl") == []
    expected = [(row["step"], row["reward/mean"]) for row in resumed.metrics()]
    assert [step for step, _ in expected] == list(range(1, last + 1))
    assert mlflow_history(ids["mlflow"], "reward/mean") == expected
    assert trackio_history(ids["trackio"], "reward/mean") == expected
    assert len(list(output.glob(f"wandb/offline-run-*-{ids['wandb']}/*.wandb"))) == 2


def mlflow_history(run_id, name):
    import mlflow

    client = mlflow.MlflowClient()
    assert client.get_run(run_id).info.status == "FINISHED"
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def trackio_history(name, metric):
    """Read the values of a metric in a new process, because trackio reads `TRACKIO_DIR` when it is imported."""
    read = "import json; from trackio.sqlite_storage import SQLiteStorage as storage; "
    show = f"print(json.dumps(storage.get_logs('rltrain', {name!r})))"
    printed = subprocess.run([sys.executable, "-c", read + show], capture_output=True, text=True, check=True).stdout
    return [(row["step"], row[metric]) for row in json.loads(printed) if metric in row]


@pytest.mark.timeout(600)
def test_a_run_whose_services_are_away_trains_to_its_end_and_says_so(tmp_path, monkeypatch):
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_BASE_URL", nowhere)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nowhere)
    output = tmp_path / "run"
    run = train(output, *COMMON, "trainer.trackers=[wandb,mlflow]")
    assert (run.status, run.survivors) == (0, []), run.stderr
    assert len(run.metrics()) == 5
    alarms = [line["alarm"] for line in run.lines("alarms.jsonl")]
    assert [any(f"trainer.trackers: {name} " in alarm for alarm in alarms) for name in ("wandb", "mlflow")] == [
        True
    ] * 2
    assert not (output / "trackers.json").exists()
