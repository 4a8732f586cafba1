import threading
import time

import pytest

from rltrain.monitoring.trackers import background
from rltrain.monitoring.trackers.background import BackgroundSink


class Recorder:
    """A sink that records the calls of its methods, and runs the action that a test sets for a step."""

    def __init__(self, **of_steps):
        self.calls, self.threads, self.of_steps = [], set(), of_steps

    def _take(self, *call):
        self.calls.append(call)
        self.threads.add(threading.current_thread())

    def log_step(self, step, metrics):
        self.of_steps.get(f"step_{step}", lambda: None)()
        self._take("step", step, metrics)

    def log_eval(self, step, metrics):
        self._take("eval", step, metrics)

    def restore(self, step, steps, evaluations):
        self.of_steps.get("restore", lambda: None)()
        self._take("restore", step, steps, evaluations)

    def close(self):
        self.of_steps.get("close", lambda: None)()
        self._take("close")


class Complete(Recorder):
    def log_config(self, config):
        self._take("config", config)

    def log_samples(self, step, rows):
        self._take("samples", step, rows)


def broken():
    raise OSError("the service is away")


def all_calls(sink):
    sink.log_config({"seed": 3})
    sink.restore(0, [], [])
    sink.log_eval(0, {"a": 0.5})
    sink.log_step(1, {"b": 1.0})
    sink.log_samples(1, [{"prompt": "p"}])
    sink.log_step(2, {"b": 2.0})
    sink.restore(1, [{"step": 1, "b": 1.0}], [])
    sink.close()


ALL = [
    ("config", {"seed": 3}), ("restore", 0, [], []), ("eval", 0, {"a": 0.5}), ("step", 1, {"b": 1.0}),
    ("samples", 1, [{"prompt": "p"}]), ("step", 2, {"b": 2.0}), ("restore", 1, [{"step": 1, "b": 1.0}], []),
    ("close",),
]  # fmt: skip


def test_the_sink_gets_every_call_in_its_order_in_one_other_thread():
    inner = Complete()
    sink = BackgroundSink("mine", inner)
    all_calls(sink)
    assert inner.calls == ALL
    (thread,) = inner.threads
    assert thread not in (threading.main_thread(), threading.current_thread())
    assert sink.alarms() == []


def test_a_sink_without_the_optional_methods_gets_the_other_calls():
    inner = Recorder()
    all_calls(BackgroundSink("mine", inner))
    assert inner.calls == [call for call in ALL if call[0] not in ("config", "samples")]


def test_metrics_that_change_after_a_call_arrive_as_they_were():
    inner, held = Recorder(), threading.Event()
    inner.of_steps["restore"] = held.wait
    sink, values = BackgroundSink("mine", inner), {"a": 1.0}
    sink.restore(0, [], [])
    sink.log_step(1, values)
    values["a"] = 2.0
    held.set()
    sink.close()
    assert inner.calls[1] == ("step", 1, {"a": 1.0})


@pytest.mark.parametrize("error", [OSError("the service is away"), SystemExit(1)])
def test_a_call_that_fails_is_one_alarm_and_the_later_calls_are_made(error):
    def fail():
        raise error

    inner = Recorder(step_1=fail, step_2=fail)
    sink = BackgroundSink("mine", inner)
    sink.restore(0, [], [])
    for step in (1, 2, 3):
        sink.log_step(step, {})
    sink.close()
    assert [call[:2] for call in inner.calls] == [("restore", 0), ("step", 3), ("close",)]
    (alarm,) = sink.alarms()
    assert alarm.startswith("trainer.trackers: mine failed and lacks some data of the run (")
    assert type(error).__name__ in alarm
    assert sink.alarms() == []


def test_a_sink_whose_run_could_not_start_gets_nothing_until_it_is_restored():
    inner = Recorder(restore=broken)
    sink = BackgroundSink("mine", inner)
    sink.restore(0, [], [])
    sink.log_step(1, {})
    while not (found := sink.alarms()):
        time.sleep(0.01)
    assert "OSError: the service is away" in found[0]
    inner.of_steps.clear()
    sink.log_step(2, {})
    sink.restore(1, [], [])
    sink.log_step(2, {})
    sink.close()
    assert [call[:2] for call in inner.calls] == [("restore", 1), ("step", 2), ("close",)]


def test_a_sink_that_never_started_is_not_closed():
    inner = Recorder()
    BackgroundSink("mine", inner).close()
    assert inner.calls == []


def test_a_slow_sink_delays_no_call_and_what_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(background, "MAX_WAITING", 5)
    begun, held = threading.Event(), threading.Event()

    def wait_in_the_sink():
        begun.set()
        held.wait()

    inner = Recorder(step_1=wait_in_the_sink)
    sink = BackgroundSink("slow", inner)
    sink.restore(0, [], [])
    sink.log_step(1, {})
    begun.wait()
    for step in range(2, 21):
        sink.log_step(step, {})  # A call that waited for the sink would wait for ever.
    (alarm,) = sink.alarms()
    assert alarm.startswith("trainer.trackers: slow is slower than the run: 5 calls are waiting")
    sink.restore(20, [], [])  # Calls of `restore` are never dropped.
    held.set()
    sink.close()
    # Step 1 is in the sink, so the queue holds the next five calls.
    assert [call[1] for call in inner.calls if call[0] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [call[:2] for call in inner.calls[-2:]] == [("restore", 20), ("close",)]
    assert sink.alarms() == []


def test_closing_has_a_time_limit_that_sinks_share_and_what_a_library_still_does_is_ended(monkeypatch):
    monkeypatch.setattr(background, "CLOSE_TIMEOUT_S", 2.0)
    held = threading.Event()

    class Stubborn(Recorder):
        def give_up(self):
            self.gave_up = threading.current_thread()

    inners = [Stubborn(close=held.wait) for _ in range(2)]
    sinks = [BackgroundSink(f"stuck{number}", inner) for number, inner in enumerate(inners)]
    for sink in sinks:
        sink.restore(0, [], [])
    began = time.monotonic()
    for sink in sinks:
        sink.finish()
    for sink in sinks:
        sink.close()
    assert 2.0 <= time.monotonic() - began < 3.9
    assert [inner.gave_up for inner in inners] == [threading.current_thread()] * 2
    assert [text for sink in sinks for text in sink.alarms()] == [
        f"trainer.trackers: stuck{number} did not finish within 2 s, and 0 of its calls are still waiting; the run "
        "ends without waiting any longer, and metrics.jsonl has all metrics"
        for number in range(2)
    ]
    held.set()
