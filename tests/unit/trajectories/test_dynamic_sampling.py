"""Tests of dynamic sampling, which replaces or drops groups with equal outcomes, and of greedy baselines.

Engines and reward workers are fakes.
"""

import asyncio
import random

import pytest

from rltrain.base.errors import RewardError
from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.trajectories.collector import Collector
from rltrain.trajectories.scoring import on_last_token
from tests.collecting import collect, collect_with_metrics
from tests.fakes import Immortal, Waiting
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion

PROMPTS = [Prompt(n, f"prompt {n}", [1, n], {"answer": str(n)}) for n in range(10)]
SAMPLES = 4
REMAX = ["algorithm.advantage_estimator=remax"]


class Engines(Immortal):
    """Fake engines that answer one request at a time, in random order.

    The function `reason` maps the key of a request to a finish reason, and `lengths` lists the lengths of a prompt's
    answers.
    """

    def __init__(self, seed=0, reason=lambda key: "stop", tokens=1, lengths=None):
        self.lengths = lengths or [tokens] * (SAMPLES + 1)
        self.waiting, self.requests, self.groups, self.version = [], [], [], 0
        self.random, self.reason = random.Random(seed), reason

    def submit(self, groups):
        self.groups += [group[0].key[0] for group in groups]
        new = [request for group in groups for request in group]
        self.waiting, self.requests = self.waiting + new, self.requests + new

    @property
    def pending(self):
        return len(self.waiting)

    async def poll(self):
        await asyncio.sleep(0)
        request = self.waiting.pop(self.random.randrange(len(self.waiting)))
        uid, number = request.key
        tokens = self.lengths[number]
        ids, ones = [10 * uid + number] * tokens, [-1.0] * tokens
        return [Completion(request.key, ids, ones, self.reason(request.key), [self.version] * tokens, "")]


class Judges(Waiting):
    """Fake reward workers that score answers at once.

    The function `score` maps a key to a number, to None if the reward does not apply, or to "fails".
    """

    def __init__(self, score):
        super().__init__()
        self.score = score

    async def poll(self):
        await asyncio.sleep(0)
        keys, self.waiting = [request.key for request in self.waiting], []
        scores = [(key, self.score(*key)) for key in keys]
        return [
            SampleScores(key, (None,), failed=True, error="broke") if value == "fails" else SampleScores(key, (value,))
            for key, value in scores
        ]


@pytest.fixture
def collector(tasks):
    """Return a function that makes and starts a collector."""

    def make(score, *overrides, engines=None, staleness=0) -> Collector:
        config, _ = compose(
            ["trainer.prompts_per_step=3", "trainer.prompts_per_minibatch=3", f"rollout.samples_per_prompt={SAMPLES}",
             "trainer.seed=5", "data.shuffle=false", "reward.max_failed_fraction=0.5", *overrides]
        )  # fmt: skip
        made = Collector(config, rollout=engines or Engines(), rewards=Judges(score), prompts=PROMPTS, tasks=tasks)
        made.groups.max_staleness = staleness
        made.start()
        return made

    return make


def sampling(batches):
    return f"algorithm.dynamic_sampling={batches}"


def varied(uid, number):
    return float(number % 2)


def flat(*uids):
    """Return a score function whose scores are equal within each group in `uids`, and vary within other groups."""
    return lambda uid, number: 1.0 if uid in uids else varied(uid, number)


def uids(batch):
    return batch.batch["uid"].unique().tolist()


def facts(metrics):
    return metrics["rollout/groups_dropped"], metrics["rollout/groups_missing"]


# Replaced groups


async def test_groups_without_spread_are_replaced_by_the_next_prompts(collector):
    made = collector(flat(0, 2), sampling(2))
    batch, metrics = await collect_with_metrics(made, 0)
    assert uids(batch) == [1, 3, 4]
    assert facts(metrics) == (2, 0)
    assert batch.non_tensor_batch["prompt_text"].tolist()[::SAMPLES] == ["prompt 1", "prompt 3", "prompt 4"]
    assert bool(batch.values("response_mask").all())
    assert (made.groups.used, made.groups.dropped) == (3, 2)


async def test_a_replacement_without_spread_is_replaced_too(collector):
    batch, metrics = await collect_with_metrics(collector(flat(0, 3, 4), sampling(3)), 0)
    assert uids(batch) == [1, 2, 5]
    assert facts(metrics) == (3, 0)


async def test_where_every_group_has_spread_nothing_changes_but_the_facts(collector):
    (plain, none), (dynamic, metrics) = [await collect_with_metrics(collector(varied, sampling(n)), 0) for n in (0, 4)]
    assert uids(plain) == uids(dynamic) == [0, 1, 2]
    assert plain.values("responses").tolist() == dynamic.values("responses").tolist()
    assert none == {}
    assert facts(metrics) == (0, 0)
    assert {type(fact) for fact in facts(metrics)} == {float}


async def test_switched_off_a_group_without_spread_stays_and_is_trained_on(collector):
    batch = await collect(collector(flat(0, 1, 2), sampling(0)), 0)
    assert uids(batch) == [0, 1, 2]
    assert bool(batch.values("response_mask").all())


async def test_the_next_step_goes_on_where_the_replacements_ended_with_the_weights_of_its_version(collector):
    engines = Engines()
    made = collector(flat(0, 2, 6), sampling(2), engines=engines)
    seen = []
    for version in range(3):
        engines.version = version
        batch, metrics = await collect_with_metrics(made, version)
        assert set(batch.values("policy_version").tolist()) == {version}
        seen.append((uids(batch), facts(metrics)))
    assert seen == [([1, 3, 4], (2, 0)), ([5, 7, 8], (1, 0)), ([9, 10, 11], (0, 0))]


@pytest.mark.parametrize("staleness", [1, 2])
async def test_groups_in_flight_for_later_steps_are_dropped_early_and_no_token_is_older_than_allowed(
    staleness, collector
):
    engines = Engines()
    made = collector(lambda uid, number: 1.0 if uid % 3 == 0 else varied(uid, number), sampling(2),
                     engines=engines, staleness=staleness)  # fmt: skip
    ages, order = set(), []
    for version in range(8):
        engines.version = version
        batch = await collect(made, version)
        order += uids(batch)
        ages |= {version - sampled for sampled in batch.values("policy_version").tolist()}
    assert order == sorted(order)
    assert not [uid for uid in order if uid % 3 == 0]
    assert max(ages) == staleness


# Tests of the bound on generated batches


@pytest.mark.parametrize(
    ("batches", "kept", "dropped", "generated"), [(1, [0, 1], 1, 3), (2, [0, 1], 4, 6), (3, [0, 1, 8], 6, 9)]
)
async def test_a_step_generates_at_most_so_many_batches_and_then_goes_on_with_fewer_groups(
    batches, kept, dropped, generated, collector
):
    engines = Engines()
    batch, metrics = await collect_with_metrics(collector(flat(*range(2, 8)), sampling(batches), engines=engines), 0)
    assert uids(batch) == kept
    assert facts(metrics) == (dropped, 3 - len(kept))
    assert sorted(engines.groups) == list(range(generated))
    assert bool(batch.values("response_mask").all())


async def test_a_step_with_fewer_groups_leaves_the_next_one_whole(collector):
    made = collector(flat(0, 1), sampling(1))
    assert uids(await collect(made, 0)) == [2]
    made.rollout.version = 1
    batch, metrics = await collect_with_metrics(made, 1)
    assert (uids(batch), facts(metrics)) == ([3, 4, 5], (0, 0))


async def test_where_no_group_has_spread_one_is_left_and_trains_nothing(collector):
    batch, metrics = await collect_with_metrics(collector(flat(*range(99)), sampling(2)), 0)
    assert len(batch) == SAMPLES
    assert facts(metrics) == (5, 2)
    assert not bool(batch.values("response_mask").any())
    assert batch.batch["valid"].all()  # the rows are masked, but no row has failed


# Tests of the mean score over all generated groups


async def test_the_mean_score_is_also_told_over_all_answers_that_were_generated_those_of_dropped_groups_included(
    collector,
):
    batch, metrics = await collect_with_metrics(
        collector(lambda uid, n: 3.0 if uid in (0, 2) else varied(uid, n), sampling(2)), 0
    )
    assert uids(batch) == [1, 3, 4]
    assert batch.batch["scores"].mean() == 0.5
    assert metrics["reward/mean_generated"] == (2 * 3.0 + 3 * 0.5) / 5


async def test_the_mean_over_all_is_of_the_functions_scores_where_there_is_one(collector):
    def score(uid, number):
        return "fails" if uid == 0 else None if (uid, number) == (1, 0) else 3.0 if uid == 1 else varied(uid, number)

    batch, metrics = await collect_with_metrics(collector(score, sampling(2), "algorithm.reward_shaping.scale=7"), 0)
    assert uids(batch) == [2, 3, 4]
    assert metrics["reward/mean_generated"] == pytest.approx((3 * 3.0 + 12 * 0.5) / 15)
    _, every = await collect_with_metrics(
        collector(lambda uid, n: "fails", sampling(1), "reward.max_failed_fraction=1"), 0
    )
    assert every["reward/mean_generated"] == 0.0


async def test_greedy_answers_are_not_in_the_mean_over_all(collector):
    _, metrics = await collect_with_metrics(
        collector(lambda uid, n: 99.0 if n == SAMPLES else varied(uid, n), *REMAX, sampling(1)), 0
    )
    assert metrics["reward/mean_generated"] == 0.5


# Tests of groups whose scores are all equal


async def test_a_group_whose_answers_were_cut_has_no_spread_where_they_are_in_no_statistic(collector):
    def reason(key):
        return "length" if key[0] == 0 and key[1] % 2 else "stop"

    kept = [
        uids(await collect(collector(varied, sampling(2), *more, engines=Engines(reason=reason)), 0))
        for more in ([], ["algorithm.suppress_truncated=true"], ["algorithm.exclude_truncated=true"])
    ]
    assert kept == [[0, 1, 2], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("outcome", [0.0, 1.0])
@pytest.mark.parametrize("preset", ["dapo", "top_entropy"])
async def test_C8_an_all_wrong_or_all_right_group_is_replaced_whatever_its_lengths_cost(preset, outcome, collector):
    """The limit is 16 tokens, the answers have 13 to 16 tokens, and the last 3 tokens lower the score by up to 1."""
    batch, metrics = await collect_with_metrics(
        collector(
            lambda uid, n: outcome if uid == 0 else varied(uid, n),
            f"algorithm={preset}",
            engines=Engines(lengths=[13, 14, 15, 16]),
        ),
        0,
    )
    assert uids(batch) == [1, 2, 3]
    assert facts(metrics) == (1, 0)


@pytest.mark.parametrize("shaping", ["clip=1.5", "scale=1e-30", "bias=9"])
async def test_C8_what_shaping_makes_of_scores_does_not_decide(shaping, collector):
    def two_to_five(uid, number):
        return 2.0 if uid == 1 else 2.0 + number

    batch = await collect(collector(two_to_five, sampling(2), f"algorithm.reward_shaping.{shaping}"), 0)
    assert uids(batch) == [0, 2, 3]


async def test_one_score_among_answers_that_none_applies_to_is_no_spread(collector):
    batch = await collect(collector(lambda uid, n: float(n) if uid or n == 3 else None, sampling(2)), 0)
    assert uids(batch) == [1, 2, 3]


# Failures


async def test_a_group_with_a_failed_reward_is_dropped_like_others_where_the_rest_has_no_spread_and_counted(collector):
    def score(uid, number):
        return "fails" if (uid, number) == (1, 0) else 1.0 if uid in (0, 1) else varied(uid, number)

    batch, metrics = await collect_with_metrics(collector(score, sampling(2)), 0)
    assert uids(batch) == [2, 3, 4]
    assert facts(metrics) == (2, 0)
    assert not bool(batch.batch["failed"].any())
    assert bool(batch.values("response_mask").all())
    # one of the 20 results of five groups failed
    await collect(collector(score, sampling(2), "reward.max_failed_fraction=0.05"), 0)
    with pytest.raises(
        RewardError, match=r"^5% of .* failed, 1 of 20, above .*=0\.04: broke \(1 x, .* group 1, sample 0\)$"
    ):
        await collect(collector(score, sampling(2), "reward.max_failed_fraction=0.04"), 0)


async def test_the_steps_last_group_stays_masked_and_counted_though_a_reward_failed(collector):
    def score(uid, number):
        return "fails" if (uid, number) == (5, 0) else 1.0

    batch, metrics = await collect_with_metrics(collector(score, sampling(2)), 0)
    assert (uids(batch), facts(metrics)) == ([5], (5, 2))
    assert batch.batch["failed"].tolist() == [True, False, False, False]
    assert not bool(batch.values("response_mask").any())
    with pytest.raises(RewardError, match=r"^4% of the rewards failed"):  # one of the 24 results of six groups failed
        await collect(collector(score, sampling(2), "reward.max_failed_fraction=0.04"), 0)


async def test_a_group_with_a_failed_reward_and_spread_among_the_others_trains_on_these(collector):
    batch = await collect(collector(lambda uid, n: "fails" if (uid, n) == (0, 0) else varied(uid, n), sampling(2)), 0)
    assert uids(batch) == [0, 1, 2]
    assert batch.padded("response_mask")[:4, 0].tolist() == [False, True, True, True]


async def test_failures_are_not_dropped_before_they_are_counted(collector):
    with pytest.raises(RewardError, match=r"100% of the rewards failed"):
        await collect(collector(lambda uid, number: "fails", sampling(3)), 0)


# Order


@pytest.mark.parametrize("without_spread", [(0, 2, 3, 4, 6), range(20)])
@pytest.mark.parametrize("batches", [1, 2, 4])
async def test_which_groups_are_used_does_not_depend_on_who_finishes_first(batches, without_spread, collector):
    found = set()
    for seed in range(6):
        made = collector(flat(*without_spread), sampling(batches), engines=Engines(seed=seed))
        batch, metrics = await collect_with_metrics(made, 0)
        found.add((tuple(uids(batch)), facts(metrics)))
    assert len(found) == 1


# The greedy baseline of ReMax


async def test_the_greedy_answer_is_asked_for_once_a_group_and_is_no_row(collector):
    engines = Engines()
    batch = await collect(collector(lambda uid, n: 10.0 * uid + n, *REMAX, engines=engines), 0)
    at_zero = [request.key for request in engines.requests if request.temperature == 0]
    assert sorted(at_zero) == [(uid, SAMPLES) for uid in range(3)]
    assert len(engines.requests) == 3 * (SAMPLES + 1)
    assert batch.batch["uid"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.values("responses").tolist() == [10 * uid + n for uid in range(3) for n in range(SAMPLES)]
    assert batch.batch["baseline_rewards"].tolist() == [
        10.0 * uid + SAMPLES for uid in range(3) for _ in range(SAMPLES)
    ]


async def test_no_other_estimator_has_a_greedy_answer(collector):
    engines = Engines()
    batch = await collect(collector(varied, engines=engines), 0)
    assert "baseline_rewards" not in batch
    assert 0.0 not in {request.temperature for request in engines.requests}


async def test_the_baseline_is_shaped_as_the_scores_are(collector):
    made = collector(
        lambda uid, n: 4.0 if n == SAMPLES else 1.0, *REMAX, "algorithm.reward_shaping.scale=2",
        "algorithm.reward_shaping.bias=-1", "algorithm.reward_shaping.clip=5",
    )  # fmt: skip
    batch = await collect(made, 0)
    # the shaped score of the greedy answer is (4 - 1) * 2 = 6, clipped to 5
    assert batch.batch["baseline_rewards"].tolist() == [5.0] * 12
    # the column `scores` keeps the values that the reward functions returned
    assert batch.batch["scores"].tolist() == [1.0] * 12


async def test_a_greedy_answer_without_a_score_leaves_its_group_without_a_baseline_and_untrained(collector):
    batch = await collect(collector(lambda uid, n: None if (uid, n) == (1, SAMPLES) else varied(uid, n), *REMAX), 0)
    assert batch.batch["valid"].tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert batch.padded("response_mask")[:, 0].tolist() == batch.batch["valid"].tolist()
    placed = batch.with_values("responses", placed=on_last_token(batch, batch.batch["scores"]))
    assert placed.padded("placed")[4:8].abs().sum() == 0
    assert not bool(batch.batch["failed"].any())


async def test_C4_a_greedy_answer_whose_reward_failed_fails_its_group_and_is_counted(collector):
    def score(uid, number):
        return "fails" if number == SAMPLES and uid == 1 else varied(uid, number)

    # one of the 15 results failed
    batch = await collect(collector(score, *REMAX, "reward.max_failed_fraction=0.07"), 0)
    assert batch.batch["failed"].tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert batch.batch["valid"].tolist() == [True] * 4 + [False] * 4 + [True] * 4
    with pytest.raises(RewardError, match=r"^7% of the rewards failed.*: broke \(1 x, .* group 1, sample 4\)$"):
        await collect(collector(score, *REMAX, "reward.max_failed_fraction=0.06"), 0)


async def test_greedy_answers_and_replacements_go_together(collector):
    batch, metrics = await collect_with_metrics(collector(flat(1), *REMAX, sampling(2)), 0)
    assert uids(batch) == [0, 2, 3]
    assert facts(metrics) == (1, 0)
    assert len(batch.batch["baseline_rewards"]) == 12
