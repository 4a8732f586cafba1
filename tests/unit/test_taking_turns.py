"""Engines and training ranks that take turns on one device (invariant E6): fakes that refuse every other order."""

from types import SimpleNamespace

import pytest
import torch

from rltrain.base.errors import SyncError, WorkerError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.trainer import Trainer
from workers.cluster.host_groups import Hosts
from workers.rollout.messages import Request
from workers.rollout.pool import RolloutPool
from workers.sync.buckets import Bucket, Piece, Place
from workers.sync.receiver import Receiver
from workers.sync.sender import Offer

REQUEST = Request((0, 0), [1], 1.0, 4, 0)


class Device:
    """One device: who computes on it while the other holds its memory fails. `log` is what happened."""

    def __init__(self):
        self.log, self.engine_holds, self.sleeps = [], True, True

    def train(self, what):
        assert not self.engine_holds, f"the actor's {what} beside an engine that is awake"
        self.log.append(what)


class Engine:
    """Refuses to load or to answer with memory that it does not hold."""

    def __init__(self, device, fails_once=False):
        self.device, self.weights, self.cache, self.fails = device, True, True, fails_once

    def sleep(self):
        if self.device.sleeps:
            self.weights = self.cache = self.device.engine_holds = False
            self.device.log.append("sleep")
        return self.device.sleeps

    def start_load(self):
        self.weights = self.device.engine_holds = True
        self.device.log.append("wake the weights")

    def load_bucket(self, bucket):
        assert self.weights, "there is no room for weights"
        assert not self.cache or not self.device.sleeps or bucket.version == 0, "the cache woke before the weights came"
        if self.fails:
            self.fails = False
            raise SyncError("the bytes are not the sender's")

    def finish_load(self, version):
        self.cache = True
        self.device.log.append(f"wake the cache with {version}")

    def answer(self):
        assert self.weights, "answers without weights"
        assert self.cache, "answers without a cache"
        self.device.log.append("answer")


class OneReplica(Hosts):
    """A rollout worker that is its receiver and its engine, called at once."""

    def __init__(self, engine):
        self.size, self.concurrent, self.meanwhile = 1, True, None
        self.engine, self.receiver = engine, Receiver()

    def start(self, role, method, arguments, *, ranks=None):
        return [getattr(self, method)(*own) for own in arguments]

    def wait(self, pending, **_):
        return pending

    def sleep(self):
        return self.receiver.sleep(self.engine)

    def submit(self, requests):
        assert self.receiver.whole
        for _ in requests:
            self.engine.answer()

    def start_load(self, sync, version):
        return self.receiver.start(self.engine, sync, version) and None

    def load_bucket(self, sync, _before, *parts):
        self.receiver.bucket(self.engine, sync, parts)

    def finish_load(self, sync, _before):
        self.receiver.finish(self.engine, sync)

    def give_up_load(self, sync, reason):
        self.receiver.give_up(sync, reason)


class Actor:
    """A training rank on the device; also the group of it."""

    role, hosts = "actor", SimpleNamespace(dead=dict)

    def __init__(self, device):
        self.device, self.version = device, 0

    def meanwhile(self, function):
        pass

    def rows(self, method, batch, *, max_tokens):
        self.device.train("log-probs")
        return batch.with_values("responses", old_log_probs=torch.full((4,), -1.0)).select(["old_log_probs"])

    def update(self, batch, plan, *arguments, max_tokens):
        self.device.train("update")
        return {"loss": 0.5}

    def start(self, method, *args):
        return [getattr(self, method)(*args)]

    def wait(self, pending, **_):
        return pending

    def start_export(self, path, version, check):
        self.version = version
        return Offer(1, None)

    def export(self, number, path, *loaded):
        return Bucket(self.version, "float32", [Place("w", (1,), 0, 4)], {}, [Piece("w", 0, 4)], data=b"1234")

    def end_export(self):
        pass


class Collector:
    """Asks the pool, and makes up the answers."""

    def __init__(self, pool):
        self.rollout, self.advance, self.state_dict, self.models = pool, lambda: None, dict, []

    def answers(self, version):
        self.rollout.submit([[REQUEST]])
        self.rollout.running[0].clear()
        return DataProto.from_dict(
            {"prompts": jagged([[1]] * 4, torch.int64), "responses": jagged([[2]] * 4, torch.int64),
             "rollout_log_probs": jagged([[-1.0]] * 4, torch.float32),
             "policy_version": jagged([[version]] * 4, torch.int64), "uid": torch.tensor([0, 0, 1, 1]),
             "valid": torch.ones(4, dtype=torch.bool), "failed": torch.zeros(4, dtype=torch.bool),
             "failed_function": torch.full((4,), -1), "scores": torch.tensor([1.0, 0, 1, 0]),
             "outcomes": torch.tensor([1.0, 0, 1, 0]),
             "response_mask": jagged([[True]] * 4, torch.bool),
             "reward_components": torch.tensor([[1.0], [0.0], [1.0], [0.0]])},
            {"finish_reason": ["stop"] * 4},
        )  # fmt: skip

    def scored(self, batch):
        return batch

    def take(self):
        """It has no groups."""

    def evaluate(self, prompts, *, greedy):
        return self.answers(0)


class Silent:
    """A tracker and checkpoints that say nothing."""

    def __getattr__(self, name):
        return lambda *args, **named: None


def trainer(device, *overrides, engine=None, val=()):
    config, _ = compose(
        ["trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=1", "rollout.samples_per_prompt=2",
         "trainer.total_steps=2", *overrides]
    )  # fmt: skip
    pool = RolloutPool(OneReplica(engine or Engine(device)), sleeps=config.takes_turns)
    return Trainer(
        config, collector=Collector(pool), actor=Actor(device), reference=None, critic=None, tracker=Silent(),
        checkpoints=Silent(), val_prompts=val,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def one_part(monkeypatch):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])


def test_E6_a_run_answers_awake_trains_while_the_engine_sleeps_and_wakes_it_in_stages_around_the_sync():
    device = Device()
    trainer(device, val=["a prompt"]).fit()
    step = ["answer", "sleep", "log-probs", "update", "wake the weights"]
    evaluation = ["answer", "answer"]
    assert device.log == [
        "wake the weights", "wake the cache with 0", *evaluation,
        *step, "wake the cache with 1", *step, "wake the cache with 2", *evaluation,
    ]  # fmt: skip


def test_an_evaluation_while_the_engine_sleeps_wakes_it_with_the_actors_weights():
    device = Device()
    made = trainer(device, val=["a prompt"])
    made.sync_weights()
    made.collector.rollout.sleep()
    made.evaluate()
    assert device.log[-5:] == ["sleep", "wake the weights", "wake the cache with 0", "answer", "answer"]
    assert not made.collector.rollout.asleep


def test_a_sync_that_fails_leaves_the_engine_to_be_woken_by_the_next():
    device = Device()
    made = trainer(device, engine=Engine(device, fails_once=True))
    with pytest.raises(SyncError, match="not the sender's"):
        made.sync_weights()
    made.sync_weights()
    made.collector.rollout.submit([[REQUEST]])
    assert device.log == ["wake the weights", "wake the weights", "wake the cache with 0", "answer"]


def test_engines_that_sleep_are_asked_for_nothing_and_those_that_answer_do_not_sleep():
    device = Device()
    pool = trainer(device).collector.rollout
    pool.submit([[REQUEST]])
    with pytest.raises(AssertionError, match="unfinished answers must not sleep"):
        pool.sleep()
    pool.running[0].clear()
    pool.sleep()
    pool.sleep()
    with pytest.raises(AssertionError, match="no weights to answer with"):
        pool.submit([[REQUEST]])
    assert device.log == ["answer", "sleep"]


def test_an_engine_that_keeps_its_memory_is_asked_once_to_sleep():
    device = Device()
    device.sleeps = False
    engine, asked = Engine(device), []
    pool = RolloutPool(OneReplica(engine), sleeps=True)
    engine.sleep = lambda: asked.append("sleep") or False
    pool.sleep()
    pool.sleep()
    pool.submit([[REQUEST]])
    assert (asked, pool.asleep) == (["sleep"], False)


@pytest.mark.parametrize(
    "overrides", [["trainer.max_staleness=1"], ["placement=inprocess", "rollout=hf"], ["placement.share_ranks=false"]]
)
def test_engines_that_have_devices_of_their_own_or_never_stop_are_not_asked_to_sleep(overrides):
    device = Device()
    made = trainer(device, *overrides)
    made.collector.rollout.sleep()
    assert device.log == []
    assert compose([])[0].takes_turns


def test_the_fakes_refuse_to_train_beside_an_engine_that_is_awake():
    with pytest.raises((AssertionError, WorkerError), match="beside an engine that is awake"):
        trainer(Device(), "trainer.max_staleness=1").train_step()
