"""Tests that engines and training ranks take turns on one device.

The fakes raise an error if engines and training ranks use the device at the same time.
"""

from types import MappingProxyType

import pytest
import torch

from rltrain.base.errors import SyncError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.trainer import Trainer
from rltrain.trajectories.collector import Finished
from tests.fakes import FakeCheckpoints
from workers.cluster.processes import Pending, Role
from workers.rollout.messages import Completion, Request
from workers.rollout.pool import RolloutPool
from workers.rollout.replica import Building, Replica
from workers.sync.buckets import Bucket, Piece, Place
from workers.sync.receiver import Receiver
from workers.sync.sender import Offer

REQUEST = Request((0, 0), [1], 1.0, 4, 0)


class Device:
    """A fake device that raises an error if the actor computes while the engine holds memory, or vice versa.

    The list `log` records the events on the device in order.
    """

    def __init__(self):
        self.log, self.engine_holds, self.sleeps = [], True, True

    def train(self, what):
        assert not self.engine_holds, f"the actor's {what} runs while the engine is awake"
        self.log.append(what)


class Engine:
    """A fake engine that refuses to load weights or to answer requests while its memory is released."""

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
        assert self.weights, "the memory of the weights is released"
        assert not self.cache or not self.device.sleeps or bucket.version == 0, "the cache woke before the weights"
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


class Process:
    """A fake process that implements the methods of its role itself, and runs each call at once."""

    concurrent, how_lost = True, ""

    def start(self, role, method, *args):
        return Pending(self, getattr(self, method)(*args))

    async def unless_lost(self, awaitable):
        return await awaitable


class OneReplica(Process):
    """A fake rollout worker with a real receiver and a fake engine."""

    def __init__(self, engine):
        self.engine, self.receiver, self.answers = engine, Receiver(), []

    def sleep(self):
        return self.receiver.sleep(self.engine)

    def submit(self, requests):
        assert self.receiver.whole
        for request in requests:
            self.engine.answer()
            self.answers.append(Completion(request.key, [2], [-1.0], "stop", [0]))

    def poll(self, patience_s):
        answers, self.answers = self.answers, []
        return answers

    def close(self):
        """Do nothing, because the fake engine has no processes."""

    def start_load(self, sync, version):
        return self.receiver.start(self.engine, sync, version) and None

    def load_bucket(self, sync, _before, *parts):
        self.receiver.bucket(self.engine, sync, parts)

    def finish_load(self, sync, _before):
        self.receiver.finish(self.engine, sync)

    def give_up_load(self, sync, reason):
        self.receiver.give_up(sync, reason)


class Actor(Process):
    """A fake training rank that uses the fake device and also serves as its own worker group."""

    def __init__(self, device):
        self.device, self.version, self.ranks = device, 0, [Role(self, "actor")]

    async def rows(self, method, batch, columns, *, max_tokens, only=None, keep=None):
        self.device.train("log-probs")
        batch = batch if only is None else batch[only]
        return batch.with_values("responses", old_log_probs=torch.full((len(batch),), -1.0)).select(["old_log_probs"])

    async def drop_kept(self):
        """Free nothing, because this group keeps no columns."""

    async def update(self, method, batch, columns, plan, max_tokens, *arguments):
        self.device.train("update")
        return {"loss": 0.5}

    def start_export(self, path, version, check):
        self.version = version
        return Offer([True], None)

    def export(self, number, path, *loaded):
        return Bucket(
            self.version,
            "float32",
            [Place("w", (1,), 0, 4)],
            {},
            [Piece("w", 0, 4)],
            data=torch.zeros(4, dtype=torch.uint8),
        )

    def end_export(self):
        pass


class Collector:
    """A fake collector that sends requests to the rollout pool, and returns a made-up batch."""

    def __init__(self, pool):
        self.rollout, self.state_dict = pool, dict

    def drop_turns_after(self, version):
        pass

    async def answers(self, version):
        self.rollout.submit([[REQUEST]])
        assert [answer.key for answer in await self.rollout.poll()] == [REQUEST.key]
        return DataProto.from_dict(
            {"prompts": jagged([[1]] * 4, torch.int64), "responses": jagged([[2]] * 4, torch.int64),
             "rollout_log_probs": jagged([[-1.0]] * 4, torch.float32),
             "policy_version": jagged([[version]] * 4, torch.int64), "uid": torch.tensor([0, 0, 1, 1]),
             "valid": torch.ones(4, dtype=torch.bool), "failed": torch.zeros(4, dtype=torch.bool),
             "failed_function": torch.full((4,), -1), "scores": torch.tensor([1.0, 0, 1, 0]),
             "successes": torch.tensor([1.0, 0, 1, 0]),
             "response_mask": jagged([[True]] * 4, torch.bool),
             "reward_components": torch.tensor([[1.0], [0.0], [1.0], [0.0]])},
            {"finish_reason": ["stop"] * 4},
        )  # fmt: skip

    async def scored(self, batch):
        return batch, {}

    def take(self):
        return Finished(dropped=[], reused=[])

    async def evaluate(self, prompts, *, greedy, samples=1):
        return await self.answers(0)


class Silent:
    """A fake tracker that ignores all calls."""

    def __getattr__(self, name):
        return lambda *args, **named: None


async def pool_of(engine, tasks, *, sleeps):
    pool = RolloutPool(
        [Replica(0, lambda: Building(Role(OneReplica(engine), "rollout")))],
        tasks,
        sleeps=sleeps,
        transport="object_store",
    )
    await pool.start()
    return pool


async def trainer(tasks, device, *overrides, engine=None, val=MappingProxyType({})):
    config, _ = compose(
        ["trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=1", "rollout.samples_per_prompt=2",
         "trainer.total_steps=2", *overrides]
    )  # fmt: skip
    pool = await pool_of(engine or Engine(device), tasks, sleeps=config.takes_turns)
    return Trainer(
        config, collector=Collector(pool), actor=Actor(device), reference=None, critic=None, tracker=Silent(),
        checkpoints=FakeCheckpoints([]), val_prompts=val, tasks=tasks,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def one_part(monkeypatch):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])


async def test_E6_a_run_answers_awake_trains_while_the_engine_sleeps_and_wakes_it_in_stages_around_the_sync(tasks):
    device = Device()
    await (await trainer(tasks, device, val={"": ["a prompt"]})).fit()
    step = ["answer", "sleep", "log-probs", "update", "wake the weights"]
    evaluation = ["answer", "answer"]
    assert device.log == [
        "wake the weights", "wake the cache with 0", *evaluation,
        *step, "wake the cache with 1", *step, "wake the cache with 2", *evaluation,
    ]  # fmt: skip


async def test_an_evaluation_while_the_engine_sleeps_wakes_it_with_the_actors_weights(tasks):
    device = Device()
    made = await trainer(tasks, device, val={"": ["a prompt"]})
    await made.sync_weights()
    await made.collector.rollout.sleep()
    await made.evaluate()
    assert device.log[-5:] == ["sleep", "wake the weights", "wake the cache with 0", "answer", "answer"]
    assert not made.collector.rollout.asleep


async def test_a_sync_that_fails_leaves_the_engine_to_be_woken_by_the_next(tasks):
    device = Device()
    made = await trainer(tasks, device, engine=Engine(device, fails_once=True))
    with pytest.raises(SyncError, match="not the sender's"):
        await made.sync_weights()
    await made.sync_weights()
    made.collector.rollout.submit([[REQUEST]])
    assert device.log == ["wake the weights", "wake the weights", "wake the cache with 0", "answer"]


async def test_engines_that_sleep_are_asked_for_nothing_and_those_that_answer_do_not_sleep(tasks):
    device = Device()
    made = await trainer(tasks, device)
    await made.sync_weights()
    pool = made.collector.rollout
    pool.submit([[REQUEST]])
    with pytest.raises(AssertionError, match="unfinished answers must not sleep"):
        await pool.sleep()
    assert [answer.key for answer in await pool.poll()] == [REQUEST.key]
    await pool.sleep()
    await pool.sleep()
    with pytest.raises(AssertionError, match="have no weights, so they cannot answer requests"):
        pool.submit([[REQUEST]])
    assert device.log == ["wake the weights", "wake the cache with 0", "answer", "sleep"]


async def test_an_engine_that_keeps_its_memory_is_asked_once_to_sleep(tasks):
    device = Device()
    device.sleeps = False
    engine, asked = Engine(device), []
    pool = await pool_of(engine, tasks, sleeps=True)
    await pool.load([Role(Actor(device), "actor")], 0, check=True)
    engine.sleep = lambda: asked.append("sleep") or False
    await pool.sleep()
    await pool.sleep()
    pool.submit([[REQUEST]])
    assert (asked, pool.asleep) == (["sleep"], False)


@pytest.mark.parametrize(
    "overrides", [["trainer.max_staleness=1"], ["placement=inprocess", "rollout=hf"], ["placement.share_ranks=false"]]
)
async def test_engines_that_have_devices_of_their_own_or_never_stop_are_not_asked_to_sleep(tasks, overrides):
    device = Device()
    made = await trainer(tasks, device, *overrides)
    await made.collector.rollout.sleep()
    assert device.log == []
    assert compose([])[0].takes_turns


async def test_the_fakes_refuse_to_train_beside_an_engine_that_is_awake(tasks):
    made = await trainer(tasks, Device(), "trainer.max_staleness=1")
    await made.sync_weights()
    with pytest.raises(AssertionError, match="while the engine is awake"):
        await made.train_step()
