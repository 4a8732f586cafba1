"""Tests of failing rewards in the training loop: the run reports the reason, and saves the steps already trained."""

import asyncio

import pytest

from rltrain.base.errors import EstimatorError, NumericsError, RewardError
from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.trajectories.collector import Collector
from rltrain.trajectories.token_rewards import estimate_advantages
from tests.fakes import Immortal
from tests.unit.test_trainer import BASE, FakeCollector, answered, trainer
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion


class Engines(Immortal):
    pending = 0

    def submit(self, groups):
        self.requests = [request for group in groups for request in group]
        self.pending = len(self.requests)

    async def poll(self):
        await asyncio.sleep(0)
        self.pending = 0
        return [Completion(request.key, [2], [-1.0], "stop", [0]) for request in self.requests]


class BrokenJudges:
    pending = 0

    def submit(self, requests):
        self.keys = [request.key for request in requests]
        self.pending = len(self.keys)

    async def poll(self):
        await asyncio.sleep(0)
        self.pending = 0
        return [SampleScores(key, (None,), failed=True, error="TypeError: no answer") for key in self.keys]


async def test_failed_rewards_past_the_limit_stop_the_run_and_the_first_are_named(tasks):
    config, _ = compose([*BASE, "reward.max_failed_fraction=0.5"])
    prompts = [Prompt(n, "1+1=", [1], {}) for n in range(4)]
    collector = Collector(config, rollout=Engines(), rewards=BrokenJudges(), prompts=prompts, tasks=tasks)
    collector.start()
    made, log = trainer(collector=collector)
    with pytest.raises(RewardError) as caught:
        await made.fit()
    assert "100% of the rewards failed, 4 of 4, above reward.max_failed_fraction=0.5" in str(caught.value)
    assert "TypeError: no answer (4 x, first in prompt group 0, sample 0); all samples: /run/1" in str(caught.value)
    assert "actor update 1111" not in log


@pytest.mark.parametrize(("failing", "saved"), [(0, []), (2, ["save actor 2"])])
async def test_an_evaluation_whose_rewards_fail_loses_nothing_that_was_trained(failing, saved):
    class Fails(FakeCollector):
        async def evaluate(self, prompts, *, greedy, samples=1):
            if made.step == failing:
                error = RewardError("all of them failed")
                error.batch = answered(0)
                raise error
            return answered(0)

    made, log = trainer(collector=Fails([]), val={"": [Prompt(0, "", [1], {})]})
    made.log = log
    with pytest.raises(RewardError, match=rf"^all of them failed; all samples: /run/{failing + 1}") as caught:
        await made.fit()
    assert [line for line in log if line.startswith("save ")] == saved
    assert ("step 2 is saved, and trainer.resume=auto continues from it" in str(caught.value)) == bool(saved)


@pytest.mark.parametrize("error", [EstimatorError("it raised KeyError"), NumericsError("3 of 4 are not finite")])
async def test_what_fails_between_the_scores_and_the_update_loses_nothing_that_was_trained(monkeypatch, error):
    def fails(batch, algorithm, **options):
        if made.step:
            raise error
        return estimate_advantages(batch, algorithm, **options)

    made, log = trainer()
    monkeypatch.setattr("rltrain.trainer.estimate_advantages", fails)
    with pytest.raises(type(error), match=f"^{error}; step 1 is saved, and trainer.resume=auto continues from it$"):
        await made.fit()
    assert [line for line in log if line.startswith("save ")] == ["save actor 1"]
    assert log.count("actor update 1111") == 1
