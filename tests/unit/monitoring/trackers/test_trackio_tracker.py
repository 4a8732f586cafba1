"""Tests of the trackio tracker with a local database, which the tests read through trackio's own API."""

import importlib
import json
import sys

import pytest

pytest.importorskip("trackio")

from rltrain.monitoring.trackers.trackio_tracker import TrackioTracker

pytestmark = pytest.mark.filterwarnings("default")  # Warnings that the library trackio emits must not make a test fail.
ROWS = [{"uid": 0, "prompt": "2+2=", "response": "4", "score": 1.0}]


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """Import trackio again and return the module, because trackio reads `TRACKIO_DIR` only when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("trackio")


def started(output_dir):
    output_dir.mkdir(exist_ok=True)
    tracker = TrackioTracker(output_dir)
    tracker.log_config({"trainer": {"seed": 3}})
    return tracker


def rows_of(trackio, run):
    """Return the logged rows of a run as pairs (step, metrics), in the order of logging."""
    rows = trackio.sqlite_storage.SQLiteStorage.get_logs("rltrain", run.name, run_id=run.id)
    return [(row.pop("step"), {k: v for k, v in row.items() if k != "timestamp"}) for row in rows]


def test_the_database_has_the_run_its_config_its_metrics_and_its_samples(tmp_path, trackio):
    tracker = started(tmp_path / "my_run")
    tracker.restore(0, [], [])
    tracker.log_eval(0, {"eval/greedy_reward": 0.5})
    tracker.log_step(1, {"reward/mean": 0.25})
    tracker.log_samples(1, ROWS)
    tracker.close()
    (run,) = trackio.Api().runs("rltrain")
    assert run.name == "my_run"
    assert run.config["trainer"] == {"seed": 3}
    first, second, (step, samples) = rows_of(trackio, run)
    assert (first, second, step) == ((0, {"eval/greedy_reward": 0.5}), (1, {"reward/mean": 0.25}), 1)
    assert samples["samples"]["_value"] == ROWS
    assert json.loads((tmp_path / "my_run/trackers.json").read_text()) == {"trackio": "my_run"}


def test_a_resumed_run_is_the_same_run_and_a_repeated_step_comes_last(tmp_path, trackio):
    first = started(tmp_path / "run")
    first.restore(0, [], [])
    for step in (1, 2, 3):
        first.log_step(step, {"reward/mean": step / 4})
    first.close()
    second = started(tmp_path / "run")
    second.restore(2, [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}], [])
    second.log_step(3, {"reward/mean": 9.0})
    second.restore(2, [], [])  # The trainer calls `restore` after the loss of a training rank.
    second.log_step(3, {"reward/mean": 10.0})
    second.close()
    (run,) = trackio.Api().runs("rltrain")
    assert [(step, row["reward/mean"]) for step, row in rows_of(trackio, run)] == [
        (1, 0.25), (2, 0.5), (3, 0.75), (3, 9.0), (3, 10.0),
    ]  # fmt: skip


def test_a_run_that_goes_on_in_another_folder_starts_with_the_kept_rows(tmp_path, trackio):
    tracker = started(tmp_path / "run")
    tracker.restore(1, [{"step": 1, "reward/mean": 0.25}], [{"step": 0, "eval/greedy_reward": 0.5}])
    tracker.close()
    (run,) = trackio.Api().runs("rltrain")
    assert rows_of(trackio, run) == [(0, {"eval/greedy_reward": 0.5}), (1, {"reward/mean": 0.25})]


def test_two_output_folders_of_one_name_are_two_runs_and_each_resumes_its_own(tmp_path, trackio):
    for parent, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        (tmp_path / parent).mkdir(exist_ok=True)
        tracker = started(tmp_path / parent / "run")
        tracker.restore(0, [], [])
        tracker.log_step(int(value), {"x": value})
        tracker.close()
    found = {run.name: [row["x"] for _, row in rows_of(trackio, run)] for run in trackio.Api().runs("rltrain")}
    assert found == {"run": [1.0, 3.0], "run-2": [2.0]}
