import json
import math

import matplotlib.image
import pyarrow.parquet as pq
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.monitoring import tracking
from rltrain.monitoring.learning_curve import CURVES, StepHistory, draw_learning_curve
from rltrain.monitoring.ledger import ledger_line
from rltrain.monitoring.sample_files import sample_rows, sample_table
from rltrain.monitoring.sinks import JsonLines
from rltrain.monitoring.trackers.background import BackgroundSink
from rltrain.monitoring.tracking import Tracker

NAN = math.nan
# Only some training steps compute these columns of the batch.
PASSES = ["old_log_probs", "ref_log_probs", "teacher_log_probs", "entropies"]
PARTS = ["right", "short"]


def batch() -> DataProto:
    """Return a batch of three samples: a good one, a failed one without tokens, and one with control characters."""
    made = DataProto.from_dict(
        {"prompts": jagged([[1], [1, 2], [3]], torch.int64), "responses": jagged([[4, 5], [], [6]], torch.int64),
         "uid": torch.tensor([0, 0, 1]), "scores": torch.tensor([1.0, 0.0, 0.5]),
         "valid": torch.tensor([True, False, True]), "failed": torch.tensor([False, True, False]),
         "reward_components": torch.tensor([[1.0, NAN], [NAN, NAN], [0.5, 0.0]])},
        {"prompt_text": ["a", "b", "c"], "response_text": ["good", "", "\x00 [bold] \U0001f600\n"],
         "finish_reason": ["stop", "abort", "length"], "reward_error": ["", "it broke", ""]},
    )  # fmt: skip
    return made.with_values(
        "responses", rollout_log_probs=torch.tensor([-1.0, -2.0, -3.0]), policy_version=torch.tensor([7, 7, 8]),
        advantages=torch.tensor([0.5, 0.5, -1.0]), response_mask=torch.tensor([True, False, True]),
    )  # fmt: skip


class FakeDisplay:
    def __init__(self):
        self.shown = []

    def step(self, step, metrics, batch):
        self.shown.append(("step", step, metrics))

    def restore(self, step):
        self.shown.append(("restore", step))

    def evaluation(self, step, metrics):
        self.shown.append(("evaluation", step, metrics))

    def warning(self, text):
        self.shown.append(("warning", text))


def metrics(reward: float) -> dict[str, float]:
    return {"reward/mean": reward, "rollout/length_mean": 3.0}


EVALUATION = {"eval/sampled_reward": 0.25, "eval/greedy_reward": 0.5}


@pytest.fixture
def run(tmp_path):
    """Return (output folder, tracker, display, learning curve) of a finished run with two steps and one evaluation."""
    display = FakeDisplay()
    tracker = Tracker(tmp_path, display, PARTS)
    tracker.log_eval(0, EVALUATION, {})
    tracker.log_step(1, metrics(0.25), batch())
    tracker.log_step(2, metrics(0.75), batch())
    return tmp_path, tracker, display, tracker.close()


def test_every_step_and_every_evaluation_is_one_json_object_a_line_of_its_file(run):
    def lines(name):
        return [json.loads(line) for line in (run[0] / name).read_text().splitlines()]

    assert (
        lines("metrics.jsonl") == run[1].history.rows() == [{"step": 1, **metrics(0.25)}, {"step": 2, **metrics(0.75)}]
    )
    assert lines("evaluations.jsonl") == run[1].evaluations == [{"step": 0, **EVALUATION}]


def test_the_ledger_says_of_each_group_what_became_of_it_and_which_samples_failed(run):
    lines = [json.loads(line) for line in (run[0] / "ledger.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "used": [0, 1], "reused": [], "dropped": [], "failed": [[0, 1]]} for step in (1, 2)]
    assert ledger_line(3, batch(), [2, 5])["dropped"] == [2, 5]
    again = ledger_line(3, batch(), [], [0])
    assert (again["used"], again["reused"], again["failed"]) == ([1], [0], [[0, 1]])


@pytest.mark.parametrize("other", [False, True])
def test_a_run_put_back_has_the_lines_samples_and_curves_of_that_step_and_goes_on_from_there(tmp_path, other):
    (tmp_path / "first").mkdir()
    tracker = Tracker(tmp_path / "first", FakeDisplay(), PARTS)
    tracker.log_eval(0, EVALUATION, {})
    tracker.log_step(1, {**metrics(0.25), "odd": NAN}, batch())
    starts, history = tracker.state(), tracker.history.rows()
    kept = {name: start.path.read_bytes()[: start.size] for name, start in starts.items()}
    tracker.log_step(2, metrics(9.0), batch())
    tracker.log_failed(3, batch())
    if other:
        tracker.close()
        (tmp_path / "second").mkdir()
        tracker = Tracker(tmp_path / "second", FakeDisplay(), PARTS)
        (tmp_path / "second/tensorboard").rename(tmp_path / "unused")
    tracker.restore(1, kept)
    assert {name: start.path.read_bytes() for name, start in tracker.state().items()} == kept
    assert {name: start.size for name, start in tracker.state().items()} == {
        n: start.size for n, start in starts.items()
    }
    # The histories are compared as strings, because NaN does not equal NaN.
    assert str(tracker.history.rows()) == str(history)
    assert tracker.evaluated(0)
    assert tracker.metrics_of(1).items() >= metrics(0.25).items()
    assert [file.name for file in (tracker.output_dir / "rollouts").iterdir()] == ["step_000001.parquet"] * (not other)
    tracker.log_step(2, metrics(0.75), batch())
    tracker.close()
    events = EventAccumulator(str(tracker.output_dir / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


def test_the_history_keeps_all_metrics_of_the_first_and_last_step_and_the_curves_of_the_others():
    steps = [{"step": step, **metrics(step / 4)} for step in (1, 2, 3, 4)]
    history, again = StepHistory(), StepHistory(steps)
    for row in steps:
        history.append(row)
    curves = [{name: row[name] for name in CURVES} for row in steps]
    assert len(history) == 4
    assert history.last() == steps[-1:]
    assert history.rows() == again.rows() == [steps[0], *curves[1:3], steps[-1]]
    assert StepHistory().rows() == StepHistory().last() == []
    assert StepHistory(steps[:1]).rows() == steps[:1]


def test_a_line_is_on_disk_as_soon_as_its_step_is_logged(tmp_path):
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS)
    tracker.log_step(1, metrics(0.25), batch())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    tracker.close()


def test_a_metric_that_is_not_finite_is_null_and_the_line_stays_json(tmp_path):
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS)
    tracker.log_step(1, {**metrics(0.0), "actor/grad_norm": NAN, "actor/loss": -math.inf}, batch())
    tracker.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["actor/grad_norm"] is None
    assert math.isnan(tracker.history.rows()[0]["actor/grad_norm"])


def test_the_display_is_told_each_step_and_evaluation(run):
    assert [shown[:2] for shown in run[2].shown] == [("evaluation", 0), ("step", 1), ("step", 2)]


class FakeSink:
    def __init__(self):
        self.told = []

    def log_step(self, step, metrics):
        self.told.append(("step", step, metrics))

    def log_eval(self, step, metrics):
        self.told.append(("eval", step, metrics))

    def restore(self, step, steps, evaluations):
        self.told.append(("restore", step, steps, evaluations))

    def close(self):
        self.told.append(("close",))


def test_every_sink_is_told_each_step_evaluation_and_restore_and_the_end(tmp_path, monkeypatch):
    sinks = [FakeSink(), FakeSink()]
    monkeypatch.setattr(tracking, "make_sinks", lambda folder, names: [JsonLines(folder), *sinks])
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS)
    tracker.log_eval(0, EVALUATION, {})
    tracker.log_step(1, metrics(0.25), batch())
    kept = {name: start.path.read_bytes() for name, start in tracker.state().items()}
    tracker.log_step(2, metrics(9.0), batch())
    tracker.restore(1, kept)
    tracker.close()
    assert sinks[0].told == sinks[1].told
    assert sinks[0].told == [
        ("eval", 0, EVALUATION),
        ("step", 1, metrics(0.25)),
        ("step", 2, metrics(9.0)),
        ("restore", 1, [{"step": 1, **metrics(0.25)}], [{"step": 0, **EVALUATION}]),
        ("close",),
    ]


class SampleSink(FakeSink):
    def log_config(self, config):
        self.told.append(("config", config))

    def log_samples(self, step, rows):
        self.told.append(("samples", step, rows))


def test_a_sink_that_takes_them_gets_the_config_and_samples_of_the_first_and_each_nth_step(tmp_path, monkeypatch):
    sink = SampleSink()
    monkeypatch.setattr(tracking, "make_sinks", lambda folder, names: [JsonLines(folder), FakeSink(), sink])
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS, sample_every=3, config={"trainer": {"seed": 3}})
    for step in range(1, 7):
        tracker.log_step(step, metrics(0.5), batch())
    tracker.close()
    assert sink.told[0] == ("config", {"trainer": {"seed": 3}})
    assert [told[1] for told in sink.told if told[0] == "samples"] == [1, 3, 6]
    rows = next(told[2] for told in sink.told if told[0] == "samples")
    assert rows == [
        {"uid": 0, "prompt": "a", "response": "good", "score": 1.0, "finish_reason": "stop", "reward_error": "",
         "reward/right": 1.0, "reward/short": None},
        {"uid": 0, "prompt": "b", "response": "", "score": 0.0, "finish_reason": "abort", "reward_error": "it broke",
         "reward/right": None, "reward/short": None},
        {"uid": 1, "prompt": "c", "response": "\x00 [bold] \U0001f600\n", "score": 0.5, "finish_reason": "length",
         "reward_error": "", "reward/right": 0.5, "reward/short": 0.0},
    ]  # fmt: skip


def test_the_samples_of_a_large_batch_are_a_few_evenly_spaced_ones():
    large = DataProto.concat([batch() for _ in range(40)])[:100]
    rows = sample_rows(large, PARTS)
    assert [row["prompt"] for row in rows] == ["abc"[row % 3] for row in (0, 12, 25, 37, 50, 62, 75, 87)]


class Unreachable(FakeSink):
    def log_step(self, step, metrics):
        raise ConnectionError("no route to the service")


def test_a_tracker_that_fails_is_one_alarm_and_the_run_and_the_other_sinks_go_on(tmp_path, monkeypatch):
    failing, other = BackgroundSink("failing", Unreachable()), FakeSink()
    monkeypatch.setattr(tracking, "make_sinks", lambda folder, names: [JsonLines(folder), failing, other])
    display = FakeDisplay()
    tracker = Tracker(tmp_path, display, PARTS)
    tracker.restore(0, {})
    tracker.log_step(1, metrics(0.25), batch())
    tracker.log_step(2, metrics(0.75), batch())
    tracker.close()
    (alarm,) = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert alarm["alarm"] == (
        f"step {alarm['step']}: trainer.trackers: failing failed and lacks some data of the run "
        "(ConnectionError: no route to the service); the run continues, and metrics.jsonl has all metrics"
    )
    assert [shown[1] for shown in display.shown if shown[0] == "warning"] == [alarm["alarm"]]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [told[0] for told in other.told] == ["restore", "step", "step", "close"]
    assert failing.sink.told == [("restore", 0, [], []), ("close",)]


def test_every_sample_is_in_the_parquet_file_of_its_step(run):
    assert sorted(path.name for path in (run[0] / "rollouts").iterdir()) == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    rows = pq.read_table(run[0] / "rollouts" / "step_000002.parquet").to_pylist()
    assert len(rows) == 3
    assert rows[0] == {
        "uid": 0, "prompt": "a", "response": "good", "score": 1.0, "valid": True, "finish_reason": "stop",
        "reward_error": "", "reward_components": {"right": 1.0, "short": None}, "response_ids": [4, 5],
        "rollout_log_probs": [-1.0, -2.0], "policy_version": [7, 7], "advantages": [0.5, 0.5], "prompt_ids": [1],
        "response_mask": [True, False],
    }  # fmt: skip
    assert (rows[1]["response_ids"], rows[1]["valid"], rows[1]["reward_error"]) == ([], False, "it broke")
    assert rows[1]["prompt_ids"] == [1, 2]
    assert rows[2]["response"] == "\x00 [bold] \U0001f600\n"
    assert (rows[2]["response_ids"], rows[2]["policy_version"], rows[2]["advantages"]) == ([6], [8], [-1.0])


def test_a_table_of_samples_in_another_order_moves_their_tokens_along():
    rows = sample_table(batch().reorder([2, 0, 1]), PARTS).to_pylist()
    assert [row["response_ids"] for row in rows] == [[6], [4, 5], []]
    assert [row["prompt_ids"] for row in rows] == [[3], [1], [1, 2]]


def test_a_table_of_samples_of_a_run_without_rewards_can_be_written_and_read(tmp_path):
    made = batch()
    columns = {**made.batch, "reward_components": torch.zeros(3, 0)}
    made = DataProto.from_dict(columns, made.non_tensor_batch)
    pq.write_table(sample_table(made, []), tmp_path / "samples.parquet")
    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert [row["reward_components"] for row in rows] == [None] * 3
    assert [row["prompt"] for row in sample_rows(made, [])] == ["a", "b", "c"]


def test_a_table_of_samples_has_the_log_probs_and_entropies_that_the_step_computed():
    columns = {name: torch.tensor([-0.5, -1.5, -2.5]) - place for place, name in enumerate(PASSES)}
    for names in ([], PASSES[:1], PASSES):
        made = batch().with_values("responses", **{name: columns[name] for name in names})
        rows = sample_table(made, PARTS).to_pylist()
        assert [name for name in PASSES if name in rows[0]] == names
        assert {name: [value for row in rows for value in row[name]] for name in names} == {
            name: columns[name].tolist() for name in names
        }


def test_tensorboard_has_every_metric(run):
    events = EventAccumulator(str(run[0] / "tensorboard"))
    events.Reload()
    assert {*events.Tags()["scalars"]} == {*metrics(0.0), *EVALUATION}
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


def test_the_learning_curve_is_an_image_with_something_drawn_on_it(run):
    path = run[3]
    assert path == run[0] / "learning_curve.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (540, 960)
    # The image of the learning curve contains several colours.
    assert len({tuple(pixel) for pixel in image[::3, ::3, :3].reshape(-1, 3).round(2).tolist()}) > 10


def test_the_learning_curve_changes_with_the_rewards(tmp_path):
    images = []
    for reward in (0.1, 0.9):
        path = tmp_path / f"{reward}.png"
        draw_learning_curve([{"step": 1, **metrics(0.5)}, {"step": 2, **metrics(reward)}], [], path)
        images.append(matplotlib.image.imread(path))
    assert (images[0] != images[1]).any()


def test_a_run_without_a_step_has_no_curve(tmp_path):
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS)
    tracker.log_eval(0, EVALUATION, {})
    assert tracker.close() is None
    assert not (tmp_path / "learning_curve.png").exists()


def test_a_batch_that_is_kept_can_be_loaded_and_one_that_cannot_be_kept_says_why(tmp_path):
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS)
    made = batch()
    path = tracker.save_batch(3, made)
    assert path == str(tmp_path / "failed" / "step_000003.pt")
    back = DataProto.load(path)
    assert back.values("rollout_log_probs").tolist() == made.values("rollout_log_probs").tolist()
    assert back.non_tensor_batch["reward_error"].tolist() == made.non_tensor_batch["reward_error"].tolist()
    (tmp_path / "failed" / "step_000004.pt").mkdir()
    assert tracker.save_batch(4, made).startswith("the batch could not be saved (")
    tracker.warn("look out")
    assert tracker.display.shown == [("warning", "look out")]
    tracker.close()


def test_an_alarm_is_recorded_without_the_keys_that_its_text_repeats(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPLOY_KEY", "first-line-of-it\nsecond-line-of-it\n")
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS)
    tracker.log_alarm(3, "step 3: refused 'first-line-of-it\\nsecond-line-of-it\\n'")
    tracker.close()
    assert json.loads((tmp_path / "alarms.jsonl").read_text()) == {"step": 3, "alarm": "step 3: refused '[hidden]\\n'"}


def test_the_answers_of_evaluations_are_tables_that_a_run_put_back_keeps_up_to_its_step(tmp_path):
    tracker = Tracker(tmp_path, FakeDisplay(), PARTS)
    for step in (0, 10, 20):
        tracker.log_eval(step, EVALUATION, {"eval/greedy": batch(), "eval/aime/sampled": batch()})
    names = {path.name for path in (tmp_path / "evaluations").iterdir()}
    assert names == {f"step_{step:06d}_{kind}.parquet" for step in (0, 10, 20) for kind in ("greedy", "aime_sampled")}
    table = pq.read_table(tmp_path / "evaluations" / "step_000010_greedy.parquet").to_pylist()
    assert [row["response"] for row in table] == batch().non_tensor_batch["response_text"].tolist()
    tracker.restore(10, {})
    assert {path.name for path in (tmp_path / "evaluations").iterdir()} == {
        name for name in names if not name.startswith("step_000020")
    }
    tracker.close()
