"""Tests of the timeline of a whole run with Ray, and of a run that is killed and resumed."""

import json
import os
import signal
import time

import pytest
from runs import SMALL, finish, start, train

from tests.traces import by_row, drawn, require_nested

pytestmark = pytest.mark.slow
COMMON = [*SMALL, "rollout=hf", "trainer.trace=true"]


def tracks(events):
    """Return the event names of each track, keyed by (process label, track name)."""
    found: dict[tuple[str, str], set[str]] = {}
    for (process, row), own in by_row(events).items():
        label, track = process.partition(" (pid")[0], row.rstrip("0123456789 ")
        found.setdefault((label, track), set()).update(event.name for event in own)
    return found


@pytest.mark.timeout(600)
@pytest.mark.broad
def test_driver_rank_engine_and_reward_process_all_have_their_events_in_the_timeline(tmp_path):
    done = train(tmp_path / "run", *COMMON, "placement=local", "trainer.total_steps=2", "trainer.save_every=1")
    assert (done.status, done.survivors) == (0, []), done.stderr
    events = drawn(done.output / "trace.json.gz")
    require_nested(events)
    found = tracks(events)
    assert {
        "sync_weights", "evaluate", "step 1", "step 2", "generate", "update_actor", "wait: actor.update",
        "wait: answers or scores",
    } <= found["driver", "steps"]  # fmt: skip
    assert {"checkpoint of step 1", "checkpoint of step 2"} <= found["driver", "checkpoint"]
    assert {
        "build actor",
        "actor.compute_log_probs",
        "actor.update",
        "micro-batch",
        "optimizer step",
        "actor.export",
    } <= (found["training rank 0", "calls"])
    assert found["training rank 0", "checkpoint"] == {"write actor"}
    assert {"build", "generate", "load weights", "finish loading weights"} <= found["rollout replica 0", "engine"]
    assert found["rollout replica 0", "requests"] == {"answer"}
    assert found["reward worker 0", "process"] == {"score"}
    assert found["reward worker 0", "reward functions"] == {"final_answer"}
    require_right_places(events, json.loads((done.output / "metrics.jsonl").read_text().splitlines()[-1]))


def require_right_places(events, metrics):
    """Check that the events of all processes in the last step lie within the driver's phases that wait for them."""
    step = next(event for event in events if event.name == "step 2")
    assert (step.end - step.start) / 1e9 == pytest.approx(metrics["timing/step"], rel=0.05)
    last = {event.name: event for event in events if event.inside(step) and event.process.startswith("driver")}
    for name, phase in (("actor.update", "update_actor"), ("actor.export", "sync_weights"), ("answer", "generate")):
        inside = [event for event in events if event.name == name and event.inside(step)]
        assert inside
        assert all(event.inside(last[phase]) for event in inside)
    samples = [
        {(event.args["uid"], event.args["sample"]) for event in events if event.name == name and event.inside(step)}
        for name in ("answer", "final_answer")
    ]
    assert len(samples[0]) == 32
    assert samples[0] == samples[1]


@pytest.mark.timeout(600)
@pytest.mark.broad
def test_a_killed_run_leaves_a_timeline_of_its_steps_and_the_resumed_run_writes_another_file(tmp_path):
    output, common = tmp_path / "run", [*COMMON, "placement=inprocess", "trainer.eval_every=0", "trainer.save_every=1"]
    process = start(output, *common, "trainer.total_steps=500")
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    finish(process, output)
    steps = {event.name for event in drawn(output / "trace.json.gz") if event.name.startswith("step ")}
    assert {"step 1", "step 2"} <= steps
    total = len(metrics.read_text().splitlines()) + 1
    resumed = train(output, *common, f"trainer.total_steps={total}", "trainer.resume=auto")
    assert resumed.status == 0, resumed.stderr
    assert f"step {total}" in {event.name for event in drawn(output / "trace.2.json.gz")}
    assert steps == {event.name for event in drawn(output / "trace.json.gz") if event.name.startswith("step ")}
