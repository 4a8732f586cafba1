"""Tests of the order of the calls that put vLLM to sleep and wake vLLM up.

In these tests, a fake vLLM core records the calls.
"""

import asyncio
import time
from types import SimpleNamespace

import pytest

from rltrain.settings.compose import compose
from workers.rollout.messages import Completion, Request

vllm_engine = pytest.importorskip("workers.rollout.engines.vllm.engine", reason="needs vLLM", exc_type=ImportError)

LOAD = [
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "rltrain_check",
]


class Core:
    """A fake vLLM core that tracks memory by tag, and refuses calls that need released memory."""

    def __init__(self, log):
        self.log, self.asleep, self.paused, self.arguments = log, set(), False, {}

    def note(self, what):
        self.log.append(what)
        if what in LOAD:
            assert "weights" not in self.asleep, f"{what} while the memory of the weights is released"
        if what == "resume":
            assert not self.asleep, "resumes while some memory is released"
            self.paused = False

    def sleep(self, level):
        self.note(f"sleep {level}")
        self.asleep, self.paused = {"weights", "kv_cache"}, True

    def wake_up(self, tags):
        assert set(tags) <= self.asleep, "wakes memory that is awake"
        self.note(f"wake {tags[0]}")
        self.asleep -= set(tags)
        self.paused = bool(self.asleep)

    def collective_rpc(self, method, kwargs=None, args=()):
        method = args[0] if method == "rltrain_call" else method
        if method != "rltrain_reset":
            self.note(method)
        return [None]

    def reset_prefix_cache(self, reset_running_requests):
        self.note("reset_prefix_cache")

    def reset_encoder_cache(self):
        self.note("reset_encoder_cache")

    def set_weight_version(self, version):
        assert not self.paused


class AsyncCore:
    """The methods of `Core` as coroutines, and the additional methods of AsyncLLM."""

    def __init__(self, core):
        self.core = core

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            return getattr(self.core, name)(*args, **kwargs)

        return call

    async def init_weight_transfer_engine(self, request):
        self.core.note("init_weight_transfer_engine")

    async def pause_generation(self, mode, clear_cache):
        self.core.paused = True

    async def resume_generation(self):
        self.core.note("resume")

    async def update_weight_version(self, version):
        """Do nothing. Like AsyncLLM, this fake accepts a new version while generation is paused."""

    def shutdown(self):
        self.core.note("shutdown")


@pytest.fixture(params=["inprocess", "async"])
def made(request, monkeypatch, start):
    """Return a function that makes an engine on a fake GPU: (engine, the engine's fake core, log of calls)."""
    log: list[str] = []
    core = Core(log)

    def with_arguments(arguments, **_):
        core.arguments = arguments
        return core if request.param == "inprocess" else AsyncCore(core)

    monkeypatch.setattr(vllm_engine.torch.cuda, "is_available", lambda: True)
    for name in ("EngineArgs", "AsyncEngineArgs"):
        monkeypatch.setattr(vllm_engine, name, lambda **arguments: arguments)
    monkeypatch.setattr(vllm_engine.LLMEngine, "from_engine_args", with_arguments)
    monkeypatch.setattr(vllm_engine.AsyncLLM, "from_engine_args", with_arguments)
    monkeypatch.setattr(vllm_engine, "readable_elsewhere", lambda bucket: __import__("contextlib").nullcontext(bucket))

    def make(*overrides):
        config, _ = compose([f"rollout.vllm.process={request.param}", *overrides])
        engine = vllm_engine.make(config, start, [1])
        log.clear()
        return engine, core, log

    return make


def load(engine):
    engine.start_load()
    engine.load_bucket(None)
    engine.finish_load(7)


def test_E6_weights_wake_before_the_sync_and_the_cache_after_its_checks(made):
    engine, core, log = made()
    assert engine.sleep()
    load(engine)
    assert [line for line in log if line != "resume"] == ["sleep 2", "wake weights", *LOAD, "wake kv_cache"]
    assert (core.asleep, core.paused, core.arguments["enable_sleep_mode"]) == (set(), False, True)


def test_an_engine_that_is_awake_is_not_woken(made):
    engine, _, log = made()
    load(engine)
    assert [line for line in log if line != "resume"] == LOAD


def test_E6_after_a_sync_that_broke_off_the_next_wakes_only_what_still_sleeps(made):
    engine, core, log = made()
    engine.sleep()
    engine.start_load()
    assert core.asleep == {"kv_cache"}
    log.clear()
    load(engine)
    assert [line for line in log if line != "resume"] == [*LOAD, "wake kv_cache"]


def test_where_a_sync_brings_adapters_only_the_weights_wait_in_the_hosts_memory(made):
    engine, _, log = made("model.lora={rank:4,alpha:8,targets:[all-linear]}")
    assert engine.sleep()
    assert log == ["sleep 1"]


@pytest.mark.parametrize("overrides", [["trainer.max_staleness=1"], ["placement.share_ranks=false"]])
def test_an_engine_with_a_device_of_its_own_or_without_idle_time_never_sleeps(made, overrides):
    engine, core, log = made(*overrides)
    assert not engine.sleep()
    assert (log, core.arguments["enable_sleep_mode"]) == ([], False)


def test_an_engine_with_unfinished_answers_does_not_sleep(made):
    engine, _, _ = made()
    engine.requests["0-0"] = Request((0, 0), [1], 1.0, 4, 0)
    with pytest.raises(AssertionError, match="unfinished answers must not sleep"):
        engine.sleep()


def test_on_a_cpu_nothing_sleeps(made, monkeypatch):
    monkeypatch.setattr(vllm_engine.torch.cuda, "is_available", lambda: False)
    engine, core, log = made()
    assert not engine.sleep()
    assert (log, "enable_sleep_mode" in core.arguments) == ([], False)


@pytest.mark.parametrize("made", ["async"], indirect=True)
def test_what_was_aborted_never_answers_for_a_request_of_the_same_key(made, monkeypatch):
    """vLLM may answer an aborted request at any later time, and the engine never fetches some of these answers."""
    engine, _, _ = made()
    queues, requests = {}, [Request((0, number), [1], 1.0, 4, 0) for number in range(2)]

    async def generate(prompt, params, name, lora_request=None):
        queues[name] = asyncio.Queue()
        yield SimpleNamespace(finished=True, ids=await queues[name].get())

    async def nothing(*_):
        return False

    def say(name, ids):
        while name not in queues:
            time.sleep(0.01)
        engine.loop.call_soon_threadsafe(queues[name].put_nowait, ids)

    def completion(output, request, **options):
        return Completion(request.key, output.ids, [-1.0], "stop", [0])

    engine.engine.generate, engine.engine.abort, engine.engine.is_sleeping = generate, nothing, nothing
    monkeypatch.setattr(vllm_engine, "completion_of", completion)
    engine.add(requests)
    untaken, aborted = engine.requests
    say(untaken, [1])
    engine.abort()
    engine.add(requests)
    say(aborted, [2])
    for name in list(engine.requests):
        say(name, [3])
    found = []
    while engine.busy:
        found += engine.step()
    assert {answer.key: list(answer.token_ids) for answer in found} == {(0, 0): [3], (0, 1): [3]}
