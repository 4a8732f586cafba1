"""Tests of the timeline file that a whole run in one process writes."""

import itertools
import time

import pytest

from rltrain.base import trace
from rltrain.base.storage import Folder
from rltrain.monitoring.timeline import timeline
from rltrain.monitoring.tracking import Tracker
from rltrain.run.checkpoints import Checkpoints
from rltrain.settings.compose import compose
from tests.in_process_trainer import in_process_trainer, train_prompts
from tests.traces import drawn, require_nested
from tests.unit.test_resume_in_process import Silent
from tests.unit.test_trainer_in_process import BASE

STEPS, ROWS = 2, 16  # ROWS is prompts_per_step * samples_per_prompt


async def run(model, folder, tasks, *, wanted):
    """Train for two steps with an evaluation, and return the trainer."""
    config = compose([*BASE, "trainer.prompts_per_minibatch=2", f"trainer.total_steps={STEPS}"])[0]
    with timeline(folder, wanted=wanted) as events:
        made = await in_process_trainer(
            config, model, tasks, prompts=8, timeline=events, val_prompts={"": train_prompts(config, 8)[:4]},
            tracker=Tracker(folder, Silent(), config.reward.names),
            checkpoints=Checkpoints(Folder(str(folder / "checkpoints")), "", keep=0, best=None),
        )  # fmt: skip
        made.tracker.restore(0, {})
        await made.fit()
    made.tracker.close()
    return made


@pytest.fixture
async def traced(start, tmp_path, tasks):
    """Return the trainer of a run with a timeline, and the events in the timeline's file."""
    made = await run(start, tmp_path, tasks, wanted=True)
    return made, drawn(tmp_path / "trace.json.gz")


def of_row(events, row):
    return [event for event in events if event.row == row]


async def test_phases_lie_in_their_step_take_nearly_all_of_it_and_are_as_long_as_the_metrics_say(traced):
    made, events = traced
    require_nested(events)
    rows = of_row(events, "steps")
    for number, metrics in zip(range(1, STEPS + 1), made.tracker.history.rows(), strict=True):
        (step,) = [event for event in rows if event.name == f"step {number}"]
        inside = [event for event in rows if event is not step and event.inside(step)]
        phases = [event for event in inside if not event.name.startswith("wait: ")]
        names = {name.removeprefix("timing/") for name in metrics if name.startswith("timing/")} - {"step"}
        assert {event.name for event in phases} == names
        assert all(one.end <= other.start for one, other in itertools.pairwise(phases))
        total = sum(event.end - event.start for event in phases)
        assert 0.9 * (step.end - step.start) <= total <= step.end - step.start
        if number == STEPS:  # the trainer's history keeps all metrics of the last step
            assert (step.end - step.start) / 1e9 == pytest.approx(metrics["timing/step"], rel=0.05)


async def test_the_work_of_the_roles_lies_in_the_phases_that_ask_for_it(traced):
    _, events = traced
    calls = of_row(events, trace.CALLS)
    updates = [event for event in calls if event.name == "actor.update"]
    phases = [event for event in of_row(events, "steps") if event.name == "update_actor"]
    assert [update.inside(phase) for update, phase in zip(updates, phases, strict=True)] == [True] * STEPS
    optimizer_steps = [event for event in calls if event.name == "optimizer step"]
    assert [sum(one.inside(update) for one in optimizer_steps) for update in updates] == [2, 2]
    phases = [event for event in of_row(events, "steps") if event.name == "generate"]
    generating = [event for event in of_row(events, "engine") if event.name == "generate"]
    assert all(any(one.inside(phase) for one in generating) for phase in phases)
    checkpoints = {event.name for event in events if event.row.startswith("checkpoint")}
    assert checkpoints == {f"checkpoint of step {STEPS}", "write actor"}


async def test_each_answer_and_each_call_of_a_reward_function_is_an_event_with_its_sample(traced):
    _, events = traced
    trained = next(event for event in events if event.name == f"step {STEPS}")
    answers = [event for event in events if event.row.startswith("requests") and event.inside(trained)]
    scored = [event for event in events if event.row == "reward functions" and event.inside(trained)]
    samples = {(event.args["uid"], event.args["sample"]) for event in answers}
    assert len(answers) == len(samples) == ROWS
    assert {(event.args["uid"], event.args["sample"]) for event in scored} == samples
    assert {event.name for event in scored} == {"final_answer"}
    assert all(
        0 < event.args["tokens"] <= 12 and event.args["finish_reason"] in ("stop", "length") for event in answers
    )


async def test_a_run_without_a_timeline_writes_none_and_leaves_the_recorder_off(start, tmp_path, tasks):
    await run(start, tmp_path, tasks, wanted=False)
    assert not list(tmp_path.glob("trace*"))
    assert not trace.on()


async def test_a_file_that_can_no_longer_be_written_ends_the_timeline_and_not_the_run(tmp_path, caplog):
    with timeline(tmp_path, wanted=True) as events:
        with trace.span("a"):
            time.sleep(0)
        await events.update()

        def full(_):
            raise OSError(28, "No space left on device")

        events.file.write, write = full, events.file.write
        await events.update()
        assert not trace.on()
        events.file.write = write
        await events.update()
    assert "No space left on device" in caplog.text
    assert [event.name for event in drawn(tmp_path / "trace.json.gz")] == ["a"]
