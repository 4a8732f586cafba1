import json
import math
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rltrain.monitoring.sinks import JsonLines, TensorBoard
from rltrain.monitoring.trackers.loading import check_trackers, make_sinks

ROOT = Path(__file__).parents[3]
PAGE = "docs/reading-a-run.md"
SECTION = (ROOT / PAGE).read_text().partition("## Send metrics somewhere else\n")[2].partition("\n## ")[0]
STEPS = [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.75}, {"step": 3, "reward/mean": 1e-7}]
EVALUATIONS = [{"step": 0, "eval/greedy_reward": 0.5}]


def filled(sink):
    """Log one evaluation and three training steps to the sink, and return the sink."""
    sink.restore(0, [], [])
    sink.log_eval(0, {"eval/greedy_reward": 0.5})
    for row in STEPS:
        sink.log_step(row["step"], {"reward/mean": row["reward/mean"]})
    return sink


def taken_back(sink):
    """Restore the sink to step 2, log step 3 again with different metrics, and close the sink."""
    sink.restore(2, STEPS[:2], EVALUATIONS)
    sink.log_step(3, {"reward/mean": 9.0})
    sink.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("other", [False, True])
def test_json_lines_put_back_are_those_of_the_kept_steps_whatever_the_folder_had(tmp_path, other):
    (tmp_path / "other").mkdir()
    taken_back(JsonLines(tmp_path / "other") if other else filled(JsonLines(tmp_path)))
    folder = tmp_path / "other" if other else tmp_path
    assert lines(folder / "metrics.jsonl") == [*STEPS[:2], {"step": 3, "reward/mean": 9.0}]
    assert lines(folder / "evaluations.jsonl") == EVALUATIONS
    assert not [*folder.glob("*.partial")]


def test_json_lines_put_back_are_the_same_bytes(tmp_path):
    sink, kept = filled(JsonLines(tmp_path)), {"a": 1e-320, "b": 0.1 + 0.2, "c": math.nan, "d": math.inf, "e": 3}
    sink.log_step(4, kept)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    sink.restore(4, [*STEPS, {"step": 4, **kept}], EVALUATIONS)
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert lines(tmp_path / "metrics.jsonl")[-1] == {"step": 4, **kept, "c": None, "d": None}


def test_tensorboard_put_back_shows_the_kept_steps_and_the_new_one(tmp_path):
    taken_back(filled(TensorBoard(tmp_path)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found == {"reward/mean": [(1, 0.25), (2, 0.75), (3, 9.0)], "eval/greedy_reward": [(0, 0.5)]}


def test_a_run_that_goes_on_in_another_folder_has_its_earlier_curves_in_tensorboard_too(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.restore(3, STEPS, EVALUATIONS)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("eval/greedy_reward")] == [0]


def sink_of_the_page():
    """Return the sink class from the example file on the documentation page."""
    ((path, code),) = re.findall(r"^`([\w/.]+)`\n\n```python\n(.*?)^```$", SECTION, re.S | re.M)
    assert not (ROOT / path).exists(), f"{path} exists in the project, so the page must show another sink"
    names = {"__name__": "sink_of_the_page"}
    exec(compile(code, PAGE, "exec"), names)
    return names["CsvFile"]


def test_the_sink_of_the_page_writes_each_metric_and_forgets_what_comes_after_a_restore(tmp_path):
    sink = filled(sink_of_the_page()(tmp_path))
    start = "0,eval/greedy_reward,0.5\n1,reward/mean,0.25\n2,reward/mean,0.75\n"
    assert (tmp_path / "metrics.csv").read_text() == start + "3,reward/mean,1e-07\n"
    taken_back(sink)
    assert (tmp_path / "metrics.csv").read_text() == start + "3,reward/mean,9.0\n"


def test_the_sink_of_the_page_is_named_by_the_path_of_its_file(tmp_path, monkeypatch):
    ((path, code),) = re.findall(r"^`([\w/.]+)`\n\n```python\n(.*?)^```$", SECTION, re.S | re.M)
    (tmp_path / path).write_text(code)
    monkeypatch.chdir(tmp_path)
    (named,) = re.findall(r"trainer\.trackers=\[tensorboard,(.*?)\]", SECTION)
    check_trackers([named])
    sinks = make_sinks(tmp_path, [named])
    for sink in sinks:
        sink.restore(0, [], [])
        sink.log_step(1, {"reward/mean": 0.25})
        sink.close()
    assert (tmp_path / "metrics.csv").read_text() == "1,reward/mean,0.25\n"
