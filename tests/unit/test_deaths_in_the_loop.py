"""Tests that the training data stays the same when engines or training ranks die."""

import asyncio
import random

import pytest
import test_async_loop
from test_async_loop import PROMPTS, Busy, G, Judges, P, facts, settings, step, varied
from test_async_loop import Engines as Dawdling

from rltrain.base.errors import WorkerError, WorkerLost
from rltrain.trainer import Trainer
from tests.fakes import FakeCheckpoints

collector = test_async_loop.collector  # the fixture


class Mortal(Dawdling):
    """Fake engines that sometimes lose all answers of some groups, and report the lost groups when asked."""

    def __init__(self, seed=0, deaths=0.0):
        super().__init__(seed)
        self.deaths, self.fate, self.keys = deaths, random.Random(seed + 1), []

    def submit(self, groups):
        self.keys.append([[request.key for request in group] for group in groups])
        super().submit(groups)

    async def poll(self):
        if self.waiting and self.fate.random() < self.deaths:
            self.lose({request.key[0] for request in self.waiting if self.fate.random() < 0.5})
        return await super().poll()


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(5))
async def test_what_dies_with_an_engine_is_asked_for_again_and_trained_on_once(staleness, seed, collector):
    async def run(deaths):
        made = collector(settings(staleness=staleness, steps=5), engines=Mortal(seed, deaths), seed=seed)
        seen = []
        for version in range(5):
            seen.append(facts(await step(made, version)))
            if version == 2:
                seen.append(facts(await made.evaluate(PROMPTS[:4], greedy=False)))
        assert made.in_flight == [made.training]
        return seen, made.rollout

    (calm, quiet), (troubled, dying) = await run(0.0), await run(0.4)
    assert troubled == calm
    assert len(dying.asked) > len(quiet.asked)


class Told(Mortal):
    """Fake engines that return exactly the answers that a test puts into the queue `answers`."""

    def __init__(self):
        super().__init__()
        self.answers = asyncio.Queue()

    async def poll(self):
        return await self.answers.get()


@pytest.mark.parametrize(("deterministic", "again"), [("false", [(0, 1)]), ("true", [(0, 0), (0, 1)])])
async def test_only_what_is_missing_is_asked_for_again_or_a_whole_batch_where_rounding_depends_on_it(
    deterministic, again, collector
):
    made = collector(settings(f"trainer.deterministic={deterministic}", staleness=0), engines=Told())
    engines = made.rollout
    made._draw(0)
    async with asyncio.timeout(20):
        engines.answers.put_nowait([engines.answer((0, 0))])
        while not made.groups.groups[0].trajectories:
            await asyncio.sleep(0)
        assert len(engines.keys) == 1
        engines.lose({0})
        engines.answers.put_nowait([])
        while len(engines.keys) == 1:
            await asyncio.sleep(0)
    assert engines.keys[1:] == [[again]]


class Doomed(Busy):
    """A fake training rank that dies in some of its updates."""

    def __init__(self, log, deaths):
        super().__init__("actor", log, 3, old_log_probs=-1.0)
        self.deaths, self.tries = deaths, 0

    async def call(self, method, url):
        assert method.__name__ == "load_state"
        self.log.append("load_state")
        return []

    async def update(self, *arguments):
        self.tries += 1
        if self.tries in self.deaths:
            self.log.append("actor dies in the update")
            raise WorkerLost("actor.update: training rank 0 is gone")
        return await super().update(*arguments)


class Notes:
    """A fake tracker that records the rows of each step."""

    def __init__(self):
        self.steps = []

    def log_step(self, step, metrics, batch, dropped, reused):
        self.steps.append((step, facts(batch)))

    def restore(self, step, kept):
        self.steps = [one for one in self.steps if one[0] <= step]
        return []

    def state(self):
        return {}

    def metrics_of(self, step):
        return {}

    def names(self):
        return set()

    def evaluated(self, step):
        return False


class Aborting(Mortal):
    """Fake engines that log each call of `hold_weights` and `load`, and drop all requests on abort."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    async def hold_weights(self):
        self.log.append("hold weights")

    async def load(self, ranks, version, *, check):
        self.log.append(f"load {version}")
        await super().load(ranks, version, check=check)

    async def abort(self):
        self.waiting, self.lost = [], set()


class AbortingJudges(Judges):
    def abort(self):
        self.waiting = []


async def fitted(collector, deaths, limit=3, steps=3):
    """Train a run, and return its training data, the number of restarts of its ranks, and its event log."""
    log: list[str] = []
    config, notes = settings(f"trainer.max_restarts={limit}", steps=steps), Notes()
    made = collector(config, engines=Aborting(log), judges=AbortingJudges(varied))

    async def restart():
        log.append("restart")

    await Trainer(
        config, collector=made, actor=Doomed(log, deaths), reference=None, critic=None, tracker=notes,
        checkpoints=FakeCheckpoints([]), val_prompts={}, tasks=made.tasks, restart=restart,
    ).fit()  # fmt: skip
    return notes.steps, log.count("restart"), log


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr("rltrain.run.recovery.PAUSES_S", (0.0,))


@pytest.mark.parametrize("deaths", [(1,), (2,), (3,), (2, 3, 5)])
async def test_after_a_training_ranks_death_each_step_is_trained_on_once_and_with_the_same_groups(
    at_once, deaths, collector
):
    calm, _, _ = await fitted(collector, ())
    troubled, restarts, _ = await fitted(collector, deaths)
    assert troubled == calm
    assert [step for step, _ in calm] == [1, 2, 3]
    assert len({uid for _, rows in calm for uid, *_ in rows}) == 3 * P
    assert all(len(rows) == P * G for _, rows in calm)
    assert restarts == len(deaths)


async def test_after_too_many_deaths_the_run_ends(at_once, collector):
    with pytest.raises(WorkerError, match=r"restarted 2 times, and trainer\.max_restarts=2"):
        await fitted(collector, (1, 2, 3, 4), limit=2)


async def test_replicas_get_no_weights_from_the_beginning_of_an_update_or_restart_until_the_next_sync(
    at_once, collector
):
    _, _, log = await fitted(collector, (1,), steps=1)
    budget = settings().actor.max_tokens_per_microbatch
    passes = "compute_log_probs, scored: False"
    assert log == [
        "load 0", passes, "hold weights", "actor dies in the update",
        "hold weights", "restart", "load_state",
        "load 0", passes, "hold weights", f"actor update {budget}", "load 1",
    ]  # fmt: skip
