"""Engines die under the collector, training ranks under the trainer: what is trained on stays the same."""

import random

import pytest
from test_async_loop import PROMPTS, Busy, G, Judges, P, collector, facts, settings, step, varied
from test_async_loop import Engines as Dawdling

from rltrain.base.errors import WorkerError, WorkerLost
from rltrain.trainer import Trainer
from tests.fakes import FakeCheckpoints


class Mortal(Dawdling):
    """Loses, now and then, all that it has of some groups; says so when it is asked."""

    def __init__(self, seed=0, deaths=0.0):
        super().__init__(seed)
        self.deaths, self.fate, self.lost, self.mended, self.keys = deaths, random.Random(seed + 1), set(), 0, []

    @property
    def pending(self):
        return len(self.waiting) + len(self.lost)

    def submit(self, groups):
        self.keys.append([[request.key for request in group] for group in groups])
        super().submit(groups)

    def mend(self):
        self.mended += 1

    def poll(self, timeout_s):
        if self.waiting and self.fate.random() < self.deaths:
            gone = {request.key[0] for request in self.waiting if self.fate.random() < 0.5}
            self.lost |= gone
            self.waiting = [request for request in self.waiting if request.key[0] not in gone]
        return super().poll(timeout_s)

    def take_lost(self):
        taken, self.lost = self.lost, set()
        return taken


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_what_dies_with_an_engine_is_asked_for_again_and_trained_on_once(staleness, seed):
    def run(deaths):
        made = collector(settings(staleness=staleness, steps=5), engines=Mortal(seed, deaths), seed=seed)
        seen = []
        for version in range(5):
            seen.append(facts(step(made, version)))
            if version == 2:
                seen.append(facts(made.evaluate(PROMPTS[:4], greedy=False)))
        assert made.in_flight == [made.training]
        return seen, made.rollout

    (calm, quiet), (troubled, dying) = run(0.0), run(0.4)
    assert troubled == calm
    assert len(dying.asked) > len(quiet.asked)


@pytest.mark.parametrize(("deterministic", "again"), [("false", [(0, 1)]), ("true", [(0, 0), (0, 1)])])
def test_only_what_is_missing_is_asked_for_again_or_a_whole_batch_where_rounding_depends_on_it(deterministic, again):
    made = collector(settings(f"trainer.deterministic={deterministic}", staleness=0), engines=Mortal())
    made._draw(0)
    made.rollout.waiting = [one for one in made.rollout.waiting if one.key != (0, 1)]
    made.rollout.poll = lambda timeout_s: [made.rollout.answer((0, 0))]
    made._pump()
    made.rollout.lost = {0}
    made._pump()
    assert made.rollout.keys[-1] == [again]


def test_replicas_get_weights_only_while_the_training_ranks_have_nothing_to_do():
    made = collector(settings(), engines=Mortal())
    made.answers(0)
    mended = made.rollout.mended
    assert mended
    for _ in range(10):
        made.advance()
    assert made.rollout.mended == mended


class Doomed(Busy):
    """A training rank that dies in some of its updates."""

    def __init__(self, log, deaths):
        super().__init__("actor", log, 3, old_log_probs=-1.0)
        self.deaths, self.tries = deaths, 0

    def start(self, method, *args):
        assert method == "load_state"
        return []

    def wait(self, pending):
        return pending

    def update(self, batch, plan, *arguments, max_tokens):
        self.tries += 1
        if self.tries in self.deaths:
            raise WorkerLost("actor.update: training rank 0 is gone")
        return super().update(batch, plan, *arguments, max_tokens=max_tokens)


class Notes:
    """A tracker."""

    def __init__(self):
        self.steps = []

    def log_step(self, step, metrics, batch):
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


def fitted(deaths, limit=3):
    """What a run of three steps trained on, and how often its ranks were restarted."""
    config, restarts, notes = settings(f"trainer.max_restarts={limit}", steps=3), [], Notes()
    made = collector(config, engines=Aborting(), judges=AbortingJudges(varied))
    Trainer(
        config, collector=made, actor=Doomed([], deaths), reference=None, critic=None, tracker=notes,
        checkpoints=FakeCheckpoints([]), val_prompts=[], restart=lambda: restarts.append(1),
    ).fit()  # fmt: skip
    return notes.steps, len(restarts)


class Aborting(Mortal):
    def abort(self):
        self.waiting, self.lost = [], set()


class AbortingJudges(Judges):
    def abort(self):
        self.waiting = []


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr("rltrain.run.recovery.time.sleep", lambda seconds: None)


@pytest.mark.parametrize("deaths", [(1,), (2,), (3,), (2, 3, 5)])
def test_after_a_training_ranks_death_each_step_is_trained_on_once_and_with_the_same_groups(at_once, deaths):
    calm, _ = fitted(())
    troubled, restarts = fitted(deaths)
    assert troubled == calm
    assert [step for step, _ in calm] == [1, 2, 3]
    assert len({uid for _, rows in calm for uid, *_ in rows}) == 3 * P
    assert all(len(rows) == P * G for _, rows in calm)
    assert restarts == len(deaths)


def test_after_too_many_deaths_the_run_ends(at_once):
    with pytest.raises(WorkerError, match=r"restarted 2 times, and trainer\.max_restarts=2"):
        fitted((1, 2, 3, 4), limit=2)
