"""Tests of truncated answers and failed rewards through the real trainer.

Engines and reward workers are fakes, and in all tests but one, models are fakes too. The collector, the credit
assignment and the trainer are real.
"""

import asyncio
import dataclasses
import itertools

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, columns_of
from rltrain.base.background_tasks import BackgroundTasks
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.data.prompts import Prompt
from rltrain.settings.algorithm_config import NormalizationConfig
from rltrain.settings.compose import compose
from rltrain.trainer import Trainer
from rltrain.trajectories.collector import Collector
from tests.fakes import Immortal, NoCheckpoints
from tests.policy_weights import weights_of
from workers.cluster.processes import LocalProcess, Role
from workers.cluster.worker_process import Host
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion
from workers.training.worker_group import WorkerGroup

PROMPTS = [Prompt(n, f"prompt {n}", [50, 51 + n], {}) for n in range(4)]
LENGTHS = [2, 4, 3]  # lengths of the answers to one prompt, of which answer 1 is truncated in most tests


class Engines(Immortal):
    """Fake engines whose answer number n to every prompt has LENGTHS[n] tokens.

    An answer whose (group, answer) key is in `cut` ends at the length limit. With `conversations`, each answer is a
    conversation of one turn.
    """

    def __init__(self, cut, *, conversations=False):
        self.cut, self.conversations, self.waiting = cut, conversations, []

    def submit(self, groups):
        self.waiting += [request for group in groups for request in group]

    @property
    def pending(self):
        return len(self.waiting)

    async def poll(self):
        await asyncio.sleep(0)
        requests, self.waiting = self.waiting, []
        return [self.answer(request.key) for request in requests]

    def answer(self, key):
        length = LENGTHS[key[1] % len(LENGTHS)]
        reason = "length" if key in self.cut else "stop"
        tokens, log_probs, versions = [48 + key[1]] * length, [-1.0] * length, [0] * length
        if self.conversations:
            turn = Turn([1], tokens, log_probs, versions, reason)
            return Trajectory(*key, [turn], "max_response_length" if key in self.cut else "answer")
        return Completion(key, tokens, log_probs, reason, versions, "")


class Judges:
    """Fake reward workers that look up each score in the mapping `scores`.

    A score of None makes the reward fail.
    """

    def __init__(self, scores):
        self.scores, self.waiting = scores, []

    def submit(self, requests):
        self.waiting += [request.key for request in requests]

    @property
    def pending(self):
        return len(self.waiting)

    async def poll(self):
        await asyncio.sleep(0)
        keys, self.waiting = self.waiting, []
        return [
            SampleScores(key, (None,), failed=True, error="broke") if self.scores[key] is None
            else SampleScores(key, (self.scores[key],))
            for key in keys
        ]  # fmt: skip


class FakeGroup:
    """A fake role that returns constant columns and learns nothing."""

    def __init__(self, **columns):
        self.columns, self.ranks = columns, []

    async def rows(self, method, batch, columns, *, max_tokens, only=None, keep=None):
        batch = batch if only is None else batch[only]
        tokens = len(batch.values("responses"))
        return batch.with_values(
            "responses", **{name: torch.full((tokens,), value) for name, value in self.columns.items()}
        ).select(list(self.columns))

    async def drop_kept(self):
        """Free nothing, because this group keeps no columns."""

    async def update(self, *arguments):
        return {}


BASE, _ = compose(
    ["trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=3",
     "data.shuffle=false", "rollout.max_log_prob_gap=99", "reward.max_failed_fraction=1",
     "algorithm.suppress_truncated=true"]
)  # fmt: skip


async def trained(scores, *, cut=((0, 1),), config=BASE, actor=None):
    """Take one training step, and return its batch and its metrics.

    The keys of the mapping `scores` are pairs of group number and answer number.
    """
    per_turn = "turn_index" in columns_of(ADVANTAGE_ESTIMATORS.get(config.algorithm.advantage_estimator))
    async with BackgroundTasks() as tasks:
        engines = Engines(cut, conversations=per_turn)
        collector = Collector(config, rollout=engines, rewards=Judges(scores), prompts=PROMPTS, tasks=tasks)
        collector.start()
        trainer = Trainer(
            config, collector=collector, actor=actor or FakeGroup(old_log_probs=-1.0, entropies=0.5), reference=None,
            critic=FakeGroup(values=0.25), tracker=None, checkpoints=NoCheckpoints(), val_prompts={}, tasks=tasks,
        )  # fmt: skip
        metrics, batch = await trainer.train_step()
        return batch, metrics


def two_groups(cut_score):
    """Return the scores of two groups, where `cut_score` is the score of row 1, the truncated answer."""
    return {
        (0, 0): 1.0,
        (0, 1): cut_score,
        (0, 2): 0.0,
        (1, 0): 1.0,
        (1, 1): 0.0,
        (1, 2): 0.0,
        (0, 3): 0.5,
        (1, 3): 0.0,
    }


def changed(**changes):
    return dataclasses.replace(BASE, algorithm=dataclasses.replace(BASE.algorithm, **changes))


def modes():
    """Yield every normalisation that the config accepts, with the unbiased standard deviation."""
    for mean, std, out in itertools.product((None, "batch", "group"), (None, "batch", "group"), (False, True)):
        if not out or (mean is not None and std is None):
            yield NormalizationConfig(mean_level=mean, std_level=std, leave_one_out=out, unbiased=True)


def pairs():
    """Yield all pairs of a score normalisation and an advantage normalisation.

    Also yield pairs of two equal normalisations that use the biased standard deviation.
    """
    yield from itertools.product(modes(), modes())
    yield from ((mode, mode) for mode in (dataclasses.replace(m, unbiased=False) for m in modes()) if mode.std_level)


NONE = NormalizationConfig(mean_level=None, std_level=None, leave_one_out=False, unbiased=True)
ESTIMATORS = ["grpo", "rloo", "reinforce_plus_plus", "gae"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
async def test_C5_under_every_normalisation_a_suppressed_answers_score_reaches_no_other_row(estimator):
    for rewards, advantages in pairs():
        config = changed(
            advantage_estimator=estimator, reward_normalization=rewards, advantage_normalization=advantages
        )
        one, hundred = [(await trained(two_groups(score), config=config))[0] for score in (1.0, 100.0)]
        assert torch.equal(one.values("advantages"), hundred.values("advantages")), (rewards, advantages)
        assert torch.equal(one.values("returns"), hundred.values("returns")), (rewards, advantages)


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
@pytest.mark.parametrize("how", ["suppress", "exclude"])
async def test_C5_no_estimator_lets_a_cut_answer_move_the_others(estimator, how):
    config = changed(
        advantage_estimator=estimator, suppress_truncated=how == "suppress", exclude_truncated=how == "exclude"
    )
    found = [(await trained(two_groups(score), config=config))[0].padded("advantages") for score in (1.0, 100.0)]
    others = torch.arange(6) != 1
    assert torch.equal(found[0][others], found[1][others])
    assert found[0].abs().sum() > 0
    kept, _ = await trained(two_groups(100.0), config=changed(advantage_estimator=estimator, suppress_truncated=False))
    # an estimator without statistics computes the advantages of each row independently of all other rows
    if ADVANTAGE_ESTIMATORS.metadata(estimator)["statistics"] != "none":
        assert not torch.equal(kept.padded("advantages")[others], found[0][others])


def test_there_are_eleven_normalisations_and_all_their_pairs():
    assert len(list(modes())) == 11
    assert len(list(pairs())) == 121 + 6


@pytest.mark.parametrize("estimator", ESTIMATORS)
async def test_C5_with_two_answers_the_whole_one_is_alone(estimator):
    """A finished answer has the same advantages whether the other, truncated answer has the score 1 or 100."""
    batch_mean = dataclasses.replace(NONE, mean_level="batch")
    config = changed(advantage_estimator=estimator, reward_normalization=batch_mean)
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, samples_per_prompt=2),
        trainer=dataclasses.replace(config.trainer, prompts_per_step=1, prompts_per_minibatch=1),
    )  # fmt: skip
    found = [
        (await trained({(0, 0): 1.0, (0, 1): score}, config=config))[0].padded("advantages")[0]
        for score in (1.0, 100.0)
    ]
    assert torch.equal(*found)


async def test_the_score_of_a_finished_answer_of_any_length_counts():
    """Answer 1 is the longest answer, but it finished, so it does not count as truncated."""
    found = [(await trained(two_groups(score), cut=()))[0].padded("advantages")[0, 0] for score in (1.0, 100.0)]
    assert found[0] != found[1]


@pytest.mark.parametrize(("masked", "tokens"), [(False, 4), (True, 0)])
@pytest.mark.parametrize("how", ["suppress", "exclude"])
async def test_C4_a_cut_answer_keeps_its_tokens_in_the_mask_unless_it_is_masked(how, masked, tokens):
    config = changed(suppress_truncated=how == "suppress", exclude_truncated=how == "exclude", mask_truncated=masked)
    batch, metrics = await trained(two_groups(1.0), config=config)
    assert batch.padded("response_mask").sum(-1).tolist() == [2, tokens, 3, 2, 4, 3]
    assert batch.batch["valid"].tolist() == [True, False, True, True, True, True]
    assert batch.padded("advantages")[1].tolist() == [0.0] * 4
    assert metrics["reward/excluded_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout/truncated_fraction"] == pytest.approx(1 / 6)


async def test_C4_under_gae_a_suppressed_answer_keeps_its_value_term():
    config = changed(advantage_estimator="gae", advantage={"lam": 1.0})
    batch, _ = await trained(two_groups(100.0), config=config)
    assert batch.padded("advantages")[1].tolist() == [-0.25] * 4
    assert batch.padded("returns")[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", ESTIMATORS)
async def test_C4_a_failed_row_is_masked_and_in_no_statistic_under_any_normalisation(estimator):
    """A failed row does not change the advantages of any other row, whatever score the failed row would have had."""
    scores = two_groups(1.0) | {(1, 1): None}
    for rewards, advantages in (
        (one, other) for mode in modes() for one, other in ((mode, NONE), (NONE, mode), (mode, mode))
    ):
        config = changed(
            advantage_estimator=estimator, reward_normalization=rewards, advantage_normalization=advantages
        )
        batch, metrics = await trained(scores, config=config)
        assert batch.padded("response_mask").any(-1).tolist() == [True] * 4 + [False, True]
        assert batch.padded("advantages")[4].tolist() == [0.0] * 4
        assert metrics["reward/failed_fraction"] == pytest.approx(1 / 6)
    plain = changed(advantage_estimator=estimator, reward_normalization=dataclasses.replace(NONE, mean_level="batch"))
    rewards = (await trained(scores, config=plain))[0].padded("token_level_rewards").sum(-1)
    # The four counted scores have mean 0.5.
    # The truncated answer gets the reward of an answer with score 0.
    assert rewards.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.0, -0.5])


async def test_C5_the_weights_after_a_step_of_the_real_actor_do_not_know_the_suppressed_score(start, process_group):
    role, found = Role(LocalProcess(Host({}, verbose=True)), "actor"), []
    for score in (1.0, 100.0):
        role.process.build("actor", "workers.training.actor:ActorWorker", BASE, start)
        await trained(two_groups(score), actor=WorkerGroup([role]))
        found.append(await weights_of(WorkerGroup([role])))
    role.process.build("actor", "workers.training.actor:ActorWorker", BASE, start)
    untrained = await weights_of(WorkerGroup([role]))
    assert all(torch.equal(found[0][name], found[1][name]) for name in untrained)
    assert any(not torch.equal(found[0][name], untrained[name]) for name in untrained)
