"""Tests of the Weights & Biases tracker in offline mode.

The tests decode the offline files with wandb's own protocol buffer classes.
"""

import json
import struct
import time
from collections import defaultdict

import pytest

wandb = pytest.importorskip("wandb")
from wandb.proto import wandb_internal_pb2  # noqa: E402

from rltrain.base.errors import ConfigError  # noqa: E402
from rltrain.monitoring.trackers.wandb_tracker import SERVICE, WandbTracker  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Warnings that the library wandb emits must not make a test fail.
# The block size and the header size belong to the LevelDB log format, in which wandb writes offline files.
BLOCK, HEADER = 32768, 7
ROWS = [{"uid": 0, "prompt": "2+2=", "response": "4", "score": 1.0}]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()


def records(path):
    """Yield the records of an offline file, oldest first."""
    content, place, parts = path.read_bytes(), HEADER, b""
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # The chunk holds a complete record or the last part of a record.
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def read(output_dir):
    """Return a pair (run record, {step: {metric name: value}}) for each offline file in a folder, oldest file first."""
    wandb.teardown()  # `teardown` waits until the background process of wandb has finished writing the files.
    found = []
    for path in sorted(output_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        run, rows = None, defaultdict(dict)
        for record in records(path):
            if record.HasField("run"):
                run = record.run
            if record.HasField("history"):
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                          for item in record.history.item}  # fmt: skip
                rows[int(values.pop("_step"))] |= {k: v for k, v in values.items() if not k.startswith("_")}
        found.append((run, dict(rows)))
    return found


def config_of(run):
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def started(output_dir):
    tracker = WandbTracker(output_dir)
    tracker.log_config({"trainer": {"seed": 3}})
    return tracker


def test_an_offline_file_has_the_run_and_one_row_for_each_step(tmp_path):
    output_dir = tmp_path / "my_run"
    output_dir.mkdir()
    tracker = started(output_dir)
    tracker.restore(0, [], [])
    tracker.log_eval(0, {"eval/greedy_reward": 0.5})
    tracker.log_step(1, {"reward/mean": 0.25})
    tracker.log_samples(1, ROWS)
    tracker.log_step(2, {"reward/mean": 0.75})
    tracker.log_eval(2, {"eval/greedy_reward": 1.0})
    tracker.close()
    ((run, rows),) = read(output_dir)
    assert (run.project, run.display_name) == ("rltrain", "my_run")
    assert config_of(run)["trainer"] == {"seed": 3}
    assert json.loads((output_dir / "trackers.json").read_text()) == {"wandb": run.run_id}
    assert rows[0] == {"eval/greedy_reward": 0.5}
    assert rows[1]["reward/mean"] == 0.25
    assert rows[2] == {"reward/mean": 0.75, "eval/greedy_reward": 1.0}
    (table,) = output_dir.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text()) == {"columns": [*ROWS[0]], "data": [[*ROWS[0].values()]]}


def test_a_resumed_run_is_the_same_run_taken_back_to_the_step_of_the_checkpoint(tmp_path):
    first = started(tmp_path)
    first.restore(0, [], [])
    for step in (1, 2, 3):
        first.log_step(step, {"reward/mean": step / 4})
    first.close()
    time.sleep(1.1)
    second = started(tmp_path)
    second.restore(2, [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}], [])
    second.log_step(3, {"reward/mean": 9.0})
    time.sleep(1.1)  # The library wandb names offline files by their start time, with a resolution of one second.
    second.restore(2, [], [])  # The trainer calls `restore` after the loss of a training rank.
    second.log_step(3, {"reward/mean": 10.0})
    second.close()
    files = read(tmp_path)
    assert len({run.run_id for run, _ in files}) == 1
    points = [(run.branch_point.run, run.branch_point.metric, run.branch_point.value) for run, _ in files]
    assert points == [("", "", 0.0), *[(files[0][0].run_id, "_step", 2.0)] * 2]
    assert [{step: row["reward/mean"] for step, row in rows.items()} for _, rows in files] == [
        {1: 0.25, 2: 0.5, 3: 0.75}, {3: 9.0}, {3: 10.0},
    ]  # fmt: skip


def test_a_run_that_goes_on_in_another_folder_starts_with_the_kept_rows(tmp_path):
    tracker = started(tmp_path)
    tracker.restore(1, [{"step": 1, "reward/mean": 0.25}], [{"step": 0, "eval/greedy_reward": 0.5}])
    tracker.close()
    ((_, rows),) = read(tmp_path)
    assert rows == {0: {"eval/greedy_reward": 0.5}, 1: {"reward/mean": 0.25}}


def test_the_librarys_own_variables_name_project_run_and_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "named")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "there"))
    (tmp_path / "there").mkdir()
    tracker = started(tmp_path)
    tracker.restore(0, [], [])
    tracker.close()
    ((run, _),) = read(tmp_path / "there")
    assert (run.project, run.display_name) == ("mine", "named")


def test_a_server_that_cannot_take_a_run_back_gets_the_steps_after_its_last_one(tmp_path, monkeypatch):
    first = started(tmp_path)
    first.restore(0, [], [])
    run_id = first.run.id
    first.close()
    real, asked = wandb.init, []

    def refusing(**arguments):
        asked.append((arguments["id"], arguments.get("resume"), arguments.get("resume_from")))
        if "resume_from" in arguments:
            raise wandb.errors.CommError("failed to rewind run")
        return real(**arguments)

    monkeypatch.setattr(wandb, "init", refusing)
    second = started(tmp_path)
    second.restore(2, [], [])
    assert second.run.id == run_id
    second.close()
    assert asked == [(None, None, f"{run_id}?_step=2"), (run_id, "allow", None)]


def test_a_login_that_is_missing_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    with pytest.raises(ConfigError, match=r"^trainer.trackers=\[wandb\]: .*set WANDB_API_KEY, or WANDB_MODE=offline"):
        WandbTracker.check()


def test_giving_up_kills_the_service_of_wandb_and_raises_nothing(tmp_path):
    import psutil

    tracker = WandbTracker(tmp_path)
    tracker.restore(0, [], [])
    (service,) = [child for child in psutil.Process().children() if child.name() == SERVICE]
    tracker.give_up()
    assert not service.is_running() or service.status() == psutil.STATUS_ZOMBIE


def test_the_exit_status_of_wandbs_service_does_not_end_the_run(tmp_path, monkeypatch):
    def exits():
        raise SystemExit(-9)

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "teardown", exits)
        WandbTracker(tmp_path).give_up()
