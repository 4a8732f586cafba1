import asyncio
import pickle
import subprocess
import sys
import threading
import time

import pytest

from rltrain.base import trace


@pytest.fixture
def recording():
    trace.start("driver")
    yield
    trace.stop()


def names(recorded):
    return [(event.track, event.name) for event in recorded.events]


def test_nothing_is_recorded_and_nothing_is_to_be_taken_while_the_recorder_is_off():
    with trace.span("a"):
        trace.add("b", "requests", time.time_ns())
    assert trace.take() is None
    assert not trace.on()
    assert trace.environment("training rank 0") == {}


def test_a_span_that_is_off_costs_less_than_two_microseconds():
    count = 20_000
    took = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(count):
            with trace.span("micro-batch", trace.CALLS, rows=8):
                pass
        took.append((time.process_time() - began) / count)
    assert min(took) < 2e-6


@pytest.mark.usefixtures("recording")
def test_a_span_has_the_wall_clock_times_of_its_block_and_taken_events_are_forgotten():
    before = time.time_ns()
    with trace.span("outer", "steps"), trace.span("inner", "steps", rows=3):
        time.sleep(0.01)
    after = time.time_ns()
    recorded = trace.take()
    inner, outer = recorded.events
    assert (outer.track, outer.name, inner.args) == ("steps", "outer", {"rows": 3})
    assert before <= outer.start_ns <= inner.start_ns < inner.end_ns <= outer.end_ns <= after
    assert inner.duration_ns >= 10_000_000
    assert recorded.process == "driver"
    assert trace.take().events == []


@pytest.mark.usefixtures("recording")
def test_a_block_that_raises_an_exception_is_recorded_with_the_name_of_the_exception():
    with pytest.raises(ZeroDivisionError), trace.span("a", "steps"):
        _ = 1 / 0
    (event,) = trace.take().events
    assert event.args == {"error": "ZeroDivisionError"}


@pytest.mark.usefixtures("recording")
def test_steps_that_follow_each_other_become_one_event_until_something_else_happens_or_time_passes():
    def generate():
        with trace.span("generate", "engine", merged=True, steps=1):
            pass

    for _ in range(3):
        generate()
    with trace.span("load weights", "engine"):
        pass
    generate()
    time.sleep(0.02)
    generate()
    found = [(event.name, event.args) for event in trace.take().events]
    assert found == [
        ("generate", {"steps": 3}), ("load weights", {}), ("generate", {"steps": 1}), ("generate", {"steps": 1}),
    ]  # fmt: skip
    generate()
    assert [event.args for event in trace.take().events] == [{"steps": 1}]


@pytest.mark.usefixtures("recording")
async def test_a_span_without_a_track_is_drawn_on_the_track_of_its_asyncio_task():
    async def work():
        with trace.span("write"):
            await asyncio.sleep(0)

    await asyncio.create_task(work(), name="checkpoint of step 12")
    await asyncio.create_task(work(), name="answers")
    await asyncio.create_task(work())
    assert [track for track, _ in names(trace.take())] == ["checkpoint", "answers", trace.OTHER_TASKS]


@pytest.mark.usefixtures("recording")
def test_a_span_without_a_track_outside_asyncio_is_drawn_on_the_track_of_its_thread():
    def work():
        with trace.span("write"):
            pass

    thread = threading.Thread(target=work, name="save-actor")
    thread.start()
    thread.join()
    assert names(trace.take()) == [("save-actor", "write")]


@pytest.mark.usefixtures("recording")
def test_threads_add_events_at_the_same_time_and_none_is_lost():
    def work():
        for _ in range(2_000):
            with trace.span("a", "steps"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    count = 0
    while any(thread.is_alive() for thread in threads):
        count += len(trace.take().events)
    assert count + len(trace.take().events) == 8_000


@pytest.mark.usefixtures("recording")
def test_a_process_that_nobody_asks_keeps_a_limited_number_of_events_and_counts_the_others(monkeypatch):
    monkeypatch.setattr(trace, "MOST_EVENTS", 3)
    for _ in range(5):
        with trace.span("generate", "engine", merged=True), trace.span("b", "engine"):
            pass
    recorded = trace.take()
    assert (len(recorded.events), recorded.lost) == (3, 7)


@pytest.mark.usefixtures("recording")
def test_events_cross_processes_and_a_process_whose_environment_says_so_records_its_own():
    code = (
        "import os, pickle, sys; from rltrain.base import trace; trace.start_from(os.environ)\n"
        "with trace.span('score', 'calls', uid=7): pass\n"
        "sys.stdout.buffer.write(pickle.dumps(trace.take()))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], env=trace.environment("reward functions"), capture_output=True, check=True
    )
    recorded = pickle.loads(child.stdout)
    assert (recorded.process, names(recorded)) == ("reward functions", [("calls", "score")])
    trace.adopt(recorded.events)
    assert trace.take().events == recorded.events


def test_the_recorder_imports_nothing_heavy():
    code = "import sys, rltrain.base.trace; print([name for name in ('torch', 'ray', 'numpy') if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
