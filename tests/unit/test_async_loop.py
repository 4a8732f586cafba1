"""Tests of prompt groups that stay in flight across training steps.

The tests cover the staleness bound, dynamic sampling, evaluations and answers that were not requested.

The fake engines and reward workers answer slowly.
"""

import asyncio
import random

import pytest
from test_trainer import FakeGroup, FakeTracker

from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.trainer import Trainer
from rltrain.trajectories.collector import Collector
from tests.collecting import collect_with_metrics
from tests.fakes import Immortal, NoCheckpoints, turns
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion

PROMPTS = [Prompt(n, f"prompt {n}", [1, n], {}) for n in range(40)]
P, G = 3, 2


class Engines(Immortal):
    """Fake engines that return a few answers or none per poll, in random order.

    The attribute `version` is the version of the weights that sample the answers.
    """

    def __init__(self, seed=0, most=3):
        self.random, self.most = random.Random(seed), most
        self.waiting, self.lost, self.asked, self.polls, self.version = [], set(), [], 0, 0

    def submit(self, groups):
        new = [request for group in groups for request in group]
        self.waiting, self.asked = self.waiting + new, self.asked + [request.key for request in new]

    async def load(self, ranks, version, *, check):
        self.version = version

    @property
    def pending(self):
        return len(self.waiting) + len(self.lost)

    def lose(self, uids):
        """Lose the unfinished answers of the given groups, as a dying engine would."""
        self.waiting, self.lost = [one for one in self.waiting if one.key[0] not in uids], self.lost | uids

    def take_lost(self):
        taken, self.lost = self.lost, set()
        return taken

    async def poll(self):
        await asyncio.sleep(0)
        self.polls += 1
        self.random.shuffle(self.waiting)
        count = self.random.randint(0, self.most)
        done, self.waiting = self.waiting[:count], self.waiting[count:]
        return [self.answer(request.key) for request in done]

    def answer(self, key):
        return Completion(key, [key[0] % 50, key[1]], [-1.0, -1.0], "stop", [self.version] * 2, f"{key}")


class Judges:
    """Fake reward workers that return a few scores or none per poll, in random order.

    The function `score` maps (uid, number) to a score.
    """

    def __init__(self, score, seed=0, most=3):
        self.score, self.random, self.most = score, random.Random(seed), most
        self.waiting, self.asked = [], []

    def submit(self, requests):
        keys = [request.key for request in requests]
        self.waiting, self.asked = self.waiting + keys, self.asked + keys

    @property
    def pending(self):
        return len(self.waiting)

    async def poll(self):
        await asyncio.sleep(0)
        self.random.shuffle(self.waiting)
        count = self.random.randint(0, self.most)
        done, self.waiting = self.waiting[:count], self.waiting[count:]
        return [SampleScores(key, (self.score(*key),)) for key in done]


def varied(uid, number):
    return float(100 * uid + number)


def every_third_is_flat(uid, number):
    return 100.0 * uid + (0 if uid % 3 == 0 else number)


def settings(*overrides, staleness=1, steps=8):
    return compose(
        [f"trainer.prompts_per_step={P}", "trainer.prompts_per_minibatch=1", f"rollout.samples_per_prompt={G}",
         f"trainer.max_staleness={staleness}", f"trainer.total_steps={steps}", "data.shuffle=false",
         "rollout.max_log_prob_gap=1", *overrides]
    )[0]  # fmt: skip


@pytest.fixture
def collector(tasks):
    """Return a function that starts a collector, which records the weights' version when each group ships."""

    def make(config, *, seed=0, score=varied, engines=None, judges=None) -> Collector:
        engines, judges = engines or Engines(seed), judges or Judges(score, seed)
        made = Collector(config, rollout=engines, rewards=judges, prompts=PROMPTS, tasks=tasks)
        made.shipped = {}
        ship = made.groups.ship

        def recorded(version):
            """Ship groups, and check that each group will be fresh enough for the step that uses it.

            The position of a group in the queue determines the step.
            """
            fresh = ship(version)
            queue = sorted(made.groups.groups)
            for group in fresh:
                made.shipped.setdefault(group.uid, version)
                at_step = (made.groups.used + queue.index(group.uid)) // P
                assert at_step - made.shipped[group.uid] <= config.trainer.max_staleness
                assert at_step < config.trainer.total_steps, "no step would use this group"
            return fresh

        made.groups.ship = recorded
        made.start()
        return made

    return make


async def step(made, version, *, looks=4):
    """Take one step, let other tasks run for `looks` iterations of the event loop, and return the batch."""
    return (await step_with_metrics(made, version, looks=looks))[0]


async def step_with_metrics(made, version, *, looks):
    """Take one step, let other tasks run, and return the batch with the metrics of all generated groups."""
    made.rollout.version = version
    found = await collect_with_metrics(made, version)
    await turns(looks)
    return found


def facts(batch):
    """Return (uid, response text, prompt text, score) for each row of the batch."""
    return list(
        zip(batch.batch["uid"].tolist(), batch.non_tensor_batch["response_text"].tolist(),
            batch.non_tensor_batch["prompt_text"].tolist(), batch.batch["scores"].tolist(), strict=True)
    )  # fmt: skip


# Tests of the staleness bound


@pytest.mark.parametrize("batches", [0, 2])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
async def test_no_token_trained_on_is_older_than_allowed_whatever_dawdles_or_dies_and_nothing_is_left_over(
    staleness, batches, collector
):
    steps, ages = 5, set()
    config = settings(f"algorithm.dynamic_sampling={batches}", staleness=staleness, steps=steps)
    for seed in range(3 if not batches else 1):
        made, dice, order = collector(config, seed=seed, score=every_third_is_flat), random.Random(seed), []
        for version in range(steps):
            batch = await step(made, version, looks=dice.randint(0, 12))
            order += batch.batch["uid"].unique().tolist()
            ages |= {version - made.shipped[uid] for uid in batch.batch["uid"].tolist()}
            behind = version - batch.values("policy_version")
            assert 0 <= int(behind.min()) <= int(behind.max()) <= staleness
            made.rollout.lose({request.key[0] for request in made.rollout.waiting if dice.random() < 0.2})
        assert order == sorted(set(order))
        assert (made.groups.groups, made.rollout.pending, made.rewards.pending) == ({}, 0, 0)
        # every generated group was either used or dropped because its scores were equal
        assert len(order) + made.groups.dropped == len(made.shipped)
        if not batches:
            assert order == list(range(steps * P))
    if not batches:  # with dynamic sampling, later groups take the places of dropped groups
        assert max(ages) == min(staleness, steps - 1)  # the oldest group reaches the staleness bound


async def test_a_group_that_is_too_old_stops_the_run_instead_of_being_trained_on(collector):
    made = collector(settings(staleness=1))
    await step(made, 0)
    with pytest.raises(AssertionError, match="answers requested at weight version 0 are too old for training at"):
        await made.answers(2)


async def test_the_last_steps_ask_for_nothing_that_no_step_would_use(collector):
    made, asked = collector(settings(staleness=3, steps=5)), []
    for version in range(5):
        await step(made, version)
        asked.append(len(made.rollout.asked) // G)
    assert asked == [4 * P, 5 * P, 5 * P, 5 * P, 5 * P]


# Dynamic sampling


async def test_a_step_drops_and_replaces_groups_of_its_own_and_leaves_those_of_later_steps_to_them(collector):
    """All answers of groups 3 to 5, which belong to step 1, have equal scores.

    The groups of step 1 are complete long before the groups of step 0.
    """

    class LaterFirst(Engines):
        async def poll(self):
            await asyncio.sleep(0)
            last = max(self.waiting, key=lambda request: request.key)
            self.waiting.remove(last)
            return [self.answer(last.key)]

    config = settings("algorithm.dynamic_sampling=2")
    judges = Judges(lambda uid, n: 7.0 if uid in (3, 4, 5) else varied(uid, n), most=99)
    made = collector(config, engines=LaterFirst(), judges=judges)
    (first, metrics), (second, later) = [
        await step_with_metrics(made, version, looks=n) for version, n in ((0, 99), (1, 0))
    ]
    told = [[one[name] for name in ("rollout/groups_dropped", "rollout/groups_missing")] for one in (metrics, later)]
    assert told == [[0, 0], [3, 0]]
    assert [batch.batch["uid"].unique().tolist() for batch in (first, second)] == [[0, 1, 2], [6, 7, 8]]
    assert metrics["reward/mean_generated"] == pytest.approx(100.5)  # the mean score of groups 0, 1 and 2 is 100.5
    assert later["reward/mean_generated"] == pytest.approx((3 * 7.0 + 3 * 700.5) / 6)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("batches", [1, 2])
async def test_every_group_that_was_generated_counts_once_in_the_mean_over_all(staleness, batches, collector):
    for seed in range(2):
        config = settings(f"algorithm.dynamic_sampling={batches}", staleness=staleness, steps=5)
        made, total, count = collector(config, seed=seed, score=every_third_is_flat), 0.0, 0
        for version in range(5):
            batch, metrics = await step_with_metrics(made, version, looks=seed * 9)
            groups = len(batch) // G + int(metrics["rollout/groups_dropped"])
            total, count = total + groups * metrics["reward/mean_generated"], count + groups
        each = [(every_third_is_flat(uid, 0) + every_third_is_flat(uid, 1)) / 2 for uid in made.shipped]
        assert (count, total) == (len(each), pytest.approx(sum(each)))


@pytest.mark.parametrize("batches", [0, 1, 2])
async def test_which_groups_are_trained_on_does_not_depend_on_speeds_or_staleness(batches, collector):
    found = set()
    for seed, staleness in [(0, 0), (1, 1), (2, 2)]:
        config = settings(f"algorithm.dynamic_sampling={batches}", staleness=staleness, steps=3)
        made = collector(config, seed=seed, score=every_third_is_flat)
        batches_of_run = [await step(made, version, looks=6 * seed) for version in range(3)]
        found.add(tuple(tuple(facts(batch)) for batch in batches_of_run))
    assert len(found) == 1


# Tests of evaluations while training groups are in flight


@pytest.mark.parametrize("batches", [0, 2])
@pytest.mark.parametrize("staleness", [0, 2])
async def test_an_evaluation_beside_groups_in_flight_changes_neither(staleness, batches, collector):
    config = settings(f"algorithm.dynamic_sampling={batches}", staleness=staleness, steps=3)

    async def run(evaluations):
        made = collector(config, engines=Engines(most=1), score=every_third_is_flat)
        seen, answers, beside_some = [], [], False
        for version in range(3):
            seen.append(facts(await step(made, version, looks=0)))
            in_flight = set(made.groups.groups)
            beside_some |= bool(in_flight)
            for greedy in [False, True][:evaluations]:
                answers.append(facts(await made.evaluate(PROMPTS[30:35], greedy=greedy)))
            assert set(made.groups.groups) == in_flight
        assert made.in_flight == [made.training]
        return seen, answers, sorted(key for key in made.rollout.asked if key[0] >= 0), beside_some

    alone, beside = await run(0), await run(2)
    assert (beside[0], beside[2]) == (alone[0], alone[2])
    assert all(answers == beside[1][0] for answers in beside[1])
    assert [text for _, _, text, _ in beside[1][0]] == [f"prompt {n}" for n in range(30, 35)]
    assert beside[3] is bool(staleness)


# Strays


async def test_late_and_second_answers_and_scores_of_groups_that_are_gone_or_never_were_change_nothing(collector):
    class Stray(Engines):
        """Fake engines that repeat every earlier answer, and send answers that were never requested."""

        sent = ()

        async def poll(self):
            found = await super().poll()
            self.sent = [*self.sent, *found]
            again = [Completion(c.key, [49], [-9.0], "length", [0], "again") for c in self.sent if c.key[0] >= 0]
            return found + again + [self.answer((uid, 0)) for uid in (-99, 999)]

    class StrayJudges(Judges):
        sent = ()

        async def poll(self):
            found = await super().poll()
            self.sent = [*self.sent, *found]
            again = [result.key for result in self.sent if result.key[0] >= 0]
            return found + [SampleScores(key, (-77.0,)) for key in (*again, (-99, 0), (999, 0))]

    async def run(engines, judges):
        made = collector(settings(staleness=2, steps=4), engines=engines, judges=judges)
        seen = []
        for version in range(4):
            batch, evaluated = await step(made, version), await made.evaluate(PROMPTS[30:33], greedy=True)
            seen += [facts(batch), facts(evaluated)]
        return seen, sorted(judges.asked)

    clean, stray = await run(Engines(), Judges(varied)), await run(Stray(), StrayJudges(varied))
    assert stray == clean  # equal logs of calls also show that no answer is scored twice
    assert len(clean[1]) == 4 * P * G + 4 * 3


# Tests of steps through the trainer


class Busy(FakeGroup):
    """A fake role that computes for `looks` iterations of the event loop.

    Each method call also logs whether the batch had scores.
    """

    def __init__(self, role, log, looks, **columns):
        super().__init__(role, log, **columns)
        self.looks, self.computing = looks, asyncio.Event()

    async def rows(self, method, batch, columns, *, max_tokens, only=None, keep=None):
        self.log.append(f"{method.__name__}, scored: {'scores' in batch}")
        self.computing.set()
        await turns(self.looks)
        batch = batch if only is None else batch[only]
        columns = {name: batch.values("rollout_log_probs") for name in self.columns}
        return batch.with_values("responses", **columns).select(list(columns))

    async def update(self, *arguments):
        await turns(self.looks)
        return await super().update(*arguments)


def trainer(config, made, *, looks):
    log = []
    actor = Busy("actor", log, looks, old_log_probs=-1.0)
    return Trainer(
        config, collector=made, actor=actor, reference=None, critic=None, tracker=FakeTracker([]),
        checkpoints=NoCheckpoints(), val_prompts={}, tasks=made.tasks,
    ), log  # fmt: skip


async def test_slow_rewards_are_waited_for_only_when_all_else_is_computed(collector):
    """The fake reward workers score nothing until the actor computes log-probs.

    If the step waited for scores before it computed log-probs, the step would never end.
    """

    class Patient(Judges):
        async def poll(self):
            await trained.actor.computing.wait()
            return await super().poll()

    config = settings()
    made = collector(config, judges=Patient(varied))
    trained, log = trainer(config, made, looks=0)
    _, batch = await asyncio.wait_for(trained.train_step(), 10.0)
    assert log[0] == "compute_log_probs, scored: False"
    assert batch.batch["scores"].tolist() == [varied(uid, n) for uid in range(P) for n in range(G)]


async def test_the_next_steps_answers_are_sampled_and_scored_while_the_actor_trains(collector):
    config = settings(steps=3)
    made = collector(config, engines=Engines(most=1))
    trained, _ = trainer(config, made, looks=60)
    await trained.train_step()
    assert (made.rollout.pending, made.rewards.pending) == (0, 0)
    with pytest.raises(StopIteration) as end:
        made.answers(1).send(None)  # the coroutine returns at the first `send`, because it has nothing to wait for
    batch = end.value.value
    assert batch.batch["uid"].unique().tolist() == [3, 4, 5]
    assert set(batch.values("policy_version").tolist()) == {0}


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_the_age_of_the_tokens_is_among_the_metrics_and_each_group_is_trained_on_once(staleness, collector):
    config, seen = settings(staleness=staleness, steps=4), []
    trained, _ = trainer(config, collector(config), looks=40)
    for version in range(4):
        metrics, batch = await trained.train_step()
        seen += batch.batch["uid"].unique().tolist()
        behind = [version - sampled for sampled in batch.values("policy_version").tolist()]
        assert metrics["rollout/staleness_max"] == max(behind) <= staleness
        assert metrics["rollout/staleness_mean"] == pytest.approx(sum(behind) / len(behind))
    assert seen == list(range(4 * P))


class Dying(Engines):
    """Fake engines that answer the groups of the first step, and then fail while the actor computes."""

    def __init__(self):
        super().__init__()
        self.computing = asyncio.Event()

    async def poll(self):
        await asyncio.sleep(0)
        if self.waiting[0].key[0] < P:
            return [self.answer(self.waiting.pop(0).key)]
        await self.computing.wait()
        raise RuntimeError("an engine died")


async def test_what_breaks_while_the_actor_computes_ends_the_wait_for_scores(collector):
    class Silent(Judges):
        async def poll(self):
            await asyncio.Event().wait()

    config, engines = settings(), Dying()
    trained, log = trainer(config, collector(config, engines=engines, judges=Silent(varied)), looks=4)
    trained.actor.computing = engines.computing
    with pytest.raises(RuntimeError, match="an engine died"):
        await asyncio.wait_for(trained.train_step(), 10.0)
    assert log == ["compute_log_probs, scored: False"]


async def test_what_breaks_while_the_actor_computes_ends_the_run_after_a_step_that_has_all_it_needs(collector):
    config, engines = settings(), Dying()
    trained, log = trainer(config, collector(config, engines=engines), looks=20)
    trained.actor.computing = engines.computing
    with pytest.raises(RuntimeError, match="an engine died"):
        await asyncio.wait_for(trained.fit(), 10.0)
    assert (trained.step, len(trained.tracker.steps), len(log)) == (1, 1, 2)
