"""Tests of the benchmark of monitoring: one side records everything, the other nothing, and all parts are measured."""

from collections import Counter

import pytest

from tests.benchmarks.monitoring import KINDS, OFF, ON, WORKLOADS, WRITES, Meter, Run, instruments, parts_per_step
from tests.made_runs import batch, made_run

DEMO = WORKLOADS["demo"]


def measured(folder, side) -> Meter:
    meter = Meter(DEMO)
    with instruments(meter, side):
        made_run(folder, [batch()] * DEMO.steps)
    return meter


def test_everything_is_recorded_and_measured_on_one_side_and_nothing_on_the_other(tmp_path):
    on, off = (measured(tmp_path / side, side) for side in (ON, OFF))
    assert len((tmp_path / ON / "metrics.jsonl").read_text().splitlines()) == DEMO.steps
    assert (tmp_path / ON / "report.html").exists()
    assert (tmp_path / OFF / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / OFF / "report.html").exists()
    assert list((tmp_path / OFF / "rollouts").iterdir()) == []
    assert list(on.marks) == list(off.marks) == ["warm", "last", "closed"]
    assert all(on.seconds[name] > 0 for name in (*WRITES, "last report", "learning curve", "tracker"))
    assert set(off.seconds) == {"tracker"}
    assert on.seconds["tracker"] > 10 * off.seconds["tracker"]


def test_the_parts_of_a_step_add_up_to_the_time_of_the_tracker_the_threads_and_the_processes():
    names = (*WRITES, "console", "learning curve", "last report", "starting report processes")

    def made(seconds, *closed) -> Run:
        marks = {"warm": Counter(dict.fromkeys(KINDS, 1.0)), "closed": Counter(dict(zip(KINDS, closed, strict=True)))}
        return Run(Counter(seconds), marks, [])

    on = made(dict.fromkeys(names, 1.0) | {"tracker": 20.0}, 99.0, 4.0, 3.0, 2.0)
    off = made({}, 81.0, 1.5, 1.0, 1.0)
    totals = {name: 10 * seconds for name, seconds in parts_per_step(on, off, 10).items()}
    assert sum(totals.values()) == pytest.approx(20 - 1 - 1 + 2.5 + 2 + 1)  # Without console and learning curve.
    assert totals["report during the run"] == pytest.approx(1 + 2)
    assert totals["threads of trackers and TensorBoard"] == pytest.approx(2.5)
