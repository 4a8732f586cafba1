"""Tests of a rollout worker: the thread in which its engine runs, and the calls that are allowed in each state."""

import sys
import time
from types import SimpleNamespace

import pytest

from rltrain.settings.compose import compose
from rltrain.settings.engine_description import EngineDescription
from rltrain.tasks.tokenizer import char_tokenizer
from workers.rollout import worker as module
from workers.rollout.messages import Completion
from workers.rollout.worker import RolloutWorker


class BusyEngine:
    """A fake engine that always has work, and counts its steps between the beginning and the end of a weight sync."""

    busy = True

    def __init__(self, *_):
        self.loading, self.steps, self.steps_while_loading = False, 0, 0

    def step(self):
        self.steps += 1
        self.steps_while_loading += self.loading
        time.sleep(0.001)
        return []

    def start_load(self):
        self.loading = True

    def finish_load(self, version):
        self.loading = False

    def close(self):
        self.busy = False


class DyingEngine(BusyEngine):
    """A fake engine whose first step fails."""

    def step(self):
        raise ArithmeticError("no such kernel")


@pytest.fixture
def worker(tmp_path, monkeypatch, request):
    char_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "make", request.param, raising=False)
    fake = EngineDescription(title="fake", make=f"{__name__}:make")
    monkeypatch.setattr("rltrain.settings.schema.engine_description", lambda name: fake)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    config, _ = compose(["rollout=hf"])
    return RolloutWorker(config, str(tmp_path), [3], threaded=True)


@pytest.mark.parametrize("worker", [BusyEngine], indirect=True)
def test_an_engine_with_answers_under_way_makes_no_step_while_its_weights_are_replaced(worker):
    for version in range(1, 20):
        worker.start_load(f"sync {version}", version)
        time.sleep(0.01)
        worker.finish_load(f"sync {version}", None)
        time.sleep(0.01)
    assert worker.engine.steps > 20
    assert worker.engine.steps_while_loading == 0
    worker.close()


@pytest.mark.parametrize("worker", [DyingEngine], indirect=True)
def test_an_engine_whose_step_failed_says_why_to_whoever_asks_next(worker):
    deadline = time.monotonic() + 30
    while worker.thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ArithmeticError, match="no such kernel"):
        worker.start_load("sync 1", 1)
    with pytest.raises(ArithmeticError, match="no such kernel"):
        worker.poll(0.0)


class AnsweringEngine(BusyEngine):
    """A fake engine that finishes one answer in each step of 2 ms, until `left` is 0."""

    left = 40

    def add(self, requests):
        self.left = 40

    def step(self):
        time.sleep(0.002)
        self.left -= 1
        self.busy = self.left > 0
        return [Completion((0, self.left), [5], [-1.0], "stop", [1])]


@pytest.mark.parametrize("worker", [AnsweringEngine], indirect=True)
def test_answers_of_an_engine_that_goes_on_come_together_and_its_last_ones_at_once(worker, monkeypatch):
    monkeypatch.setattr(module, "LINGER_S", 1000.0)
    assert [one.key[1] for one in worker.poll(1000.0)] == list(range(39, -1, -1))
    worker.close()


@pytest.mark.parametrize("worker", [AnsweringEngine], indirect=True)
def test_how_long_they_are_gathered_counts_from_the_last_requests(worker, monkeypatch):
    began, linger_s = [], worker._linger_s
    monkeypatch.setattr(worker, "_linger_s", lambda: began.append(worker.began) or linger_s())
    before = time.monotonic()
    worker.submit([])
    worker.poll(1000.0)
    assert began
    assert all(before <= since <= time.monotonic() for since in began)
    worker.close()


@pytest.mark.parametrize("worker", [AnsweringEngine], indirect=True)
@pytest.mark.parametrize(("age_s", "linger_s"), [(0, 0.02), (1, 0.02), (3, 0.06), (5, 0.1), (100, 0.1)])
def test_they_are_gathered_for_a_fiftieth_of_that_time_within_bounds(worker, monkeypatch, age_s, linger_s):
    worker.close()
    worker.began = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0 + age_s))
    assert worker._linger_s() == pytest.approx(linger_s)


class SpeakingEngine(AnsweringEngine):
    """A fake engine that returns one answer, whose text contains two stop strings."""

    def step(self):
        self.busy = False
        return [Completion((0, 0), [ord(one) for one in "12##3#\x03"], [-1.0] * 7, "stop", [1] * 7)]


@pytest.mark.parametrize("worker", [SpeakingEngine], indirect=True)
@pytest.mark.parametrize(("stops", "text"), [([], "12##3#"), (["#"], "12"), (["3", "##"], "12"), (["9"], "12##3#")])
def test_the_text_of_an_answer_is_what_precedes_its_stop_string_and_all_its_tokens_stay(worker, stops, text):
    worker.stops, worker.finished = stops, []
    worker._deliver(worker.engine.step())
    (answer,) = worker.finished
    assert (answer.text, len(answer.token_ids)) == (text, 7)
    worker.close()
