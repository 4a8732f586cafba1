import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch

from rltrain.base.errors import RewardError
from rltrain.base.random_streams import stream_seed
from rltrain.batch.data_proto import DataProto
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.data.prompts import Prompt
from rltrain.monitoring.step_metrics import sample_metrics
from rltrain.settings.compose import compose
from rltrain.trajectories.batch_building import to_batch
from rltrain.trajectories.collector import EVAL_SEED, Collector, _name_of
from rltrain.trajectories.prompt_groups import Group, GroupState, trajectory_of
from rltrain.trajectories.scoring import on_last_token
from rltrain.trajectories.token_rewards import estimate_advantages
from tests.collecting import collect
from tests.fakes import Immortal, Waiting, turns
from tests.reward_configs import reward_function
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion

PROMPTS = [Prompt(n, f"prompt {n}", [1, n], {"answer": str(n)}) for n in range(10)]
ONE = [reward_function("exact", "x:y")]
TWO = [
    *ONE,
    reward_function("style", "x:z", weight=0.5),
]


class Engines(Immortal):
    """Fake engines that answer one request at a time, in random order.

    The token of each answer encodes the request, and the version of each answer is the version of the weights.
    """

    def __init__(self, version=0):
        self.waiting, self.requests, self.groups, self.version = [], [], [], version
        self.random = random.Random(0)

    def submit(self, groups):
        self.groups += [[request.key for request in group] for group in groups]
        new = [request for group in groups for request in group]
        self.waiting, self.requests = self.waiting + new, self.requests + new

    @property
    def pending(self):
        return len(self.waiting)

    async def poll(self):
        await asyncio.sleep(0)
        request = self.waiting.pop(self.random.randrange(len(self.waiting)))
        uid, number = request.key
        return [Completion(request.key, [10 * uid + number], [-1.0], "stop", [self.version], f"{uid}/{number}")]


class Judges(Waiting):
    """Fake reward workers that return results in reverse order.

    The function `score` maps a request to its result.
    """

    def __init__(self, score):
        super().__init__()
        self.score = score

    async def poll(self):
        await asyncio.sleep(0)
        results, self.waiting = [self.score(request) for request in reversed(self.waiting)], []
        return results

    def abort(self):
        self.waiting = []


def by_key(request) -> SampleScores:
    return SampleScores(request.key, (100.0 * request.key[0] + request.key[1],))


def some_fail(request) -> SampleScores:
    number = request.key[1]
    return SampleScores(request.key, (None,), failed=True, error=f"error {number}") if number else by_key(request)


def no_score(request) -> SampleScores:
    return SampleScores(request.key, (None,))


@pytest.fixture
def collector(tasks):
    """Return a function that makes and starts a collector."""

    def make(score=by_key, *, engines=None, max_failed=0.5, staleness=0, reward="reward=median") -> Collector:
        config, _ = compose(
            ["trainer.prompts_per_step=3", "trainer.prompts_per_minibatch=3", "rollout.samples_per_prompt=4",
             "trainer.seed=5", "data.shuffle=false", f"reward.max_failed_fraction={max_failed}", reward]
        )  # fmt: skip
        made = Collector(config, rollout=engines or Engines(), rewards=Judges(score), prompts=PROMPTS, tasks=tasks)
        made.groups.max_staleness = staleness
        made.start()
        return made

    return make


def at_once(coroutine):
    """Return the result of a coroutine that finishes without waiting."""
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


# Tests of how samples pass through the engines and the reward workers


async def test_G3_a_batch_holds_each_answer_with_its_own_score_sorted_by_group_and_sample(collector):
    batch = await collect(collector(), 0)
    assert batch.batch["uid"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.values("responses").tolist() == [10 * uid + n for uid in range(3) for n in range(4)]
    assert batch.batch["scores"].tolist() == [100.0 * uid + n for uid in range(3) for n in range(4)]
    assert batch.non_tensor_batch["response_text"].tolist() == [f"{uid}/{n}" for uid in range(3) for n in range(4)]
    assert batch.non_tensor_batch["prompt_text"].tolist() == [f"prompt {uid}" for uid in range(3) for _ in range(4)]
    assert batch[4].values("prompts").tolist() == [1, 1]


async def test_each_step_continues_with_the_next_prompts_and_the_current_version(collector):
    engines = Engines()
    made = collector(engines=engines)
    for version in range(3):
        engines.version = version
        batch = await collect(made, version)
        assert batch.values("policy_version").tolist() == [version] * 12
        assert sorted(set(batch.batch["uid"].tolist())) == [3 * version, 3 * version + 1, 3 * version + 2]
    assert [len(group) for group in engines.groups] == [4] * 9


async def test_with_staleness_one_two_steps_are_shipped_at_first_and_then_one(collector):
    engines = Engines()
    made, shipped = collector(engines=engines, staleness=1), []
    for version in range(3):
        engines.version = version
        batch = await collect(made, version)
        assert batch.batch["uid"].unique().tolist() == [3 * version, 3 * version + 1, 3 * version + 2]
        assert int(batch.values("policy_version").min()) >= version - 1
        shipped.append(len(engines.groups))
    assert shipped == [6, 9, 12]


async def test_E8_requests_carry_the_streams_of_the_runs_seed_and_evaluations_others(collector):
    engines = Engines()
    made = collector(engines=engines)
    await collect(made, 0)
    assert sorted(r.seed for r in engines.requests) == sorted(stream_seed(5, u, n) for u in range(3) for n in range(4))
    assert {request.temperature for request in engines.requests} == {made.config.rollout.temperature}
    assert {request.max_tokens for request in engines.requests} == {made.config.rollout.max_response_length}
    engines.requests.clear()
    await made.evaluate(PROMPTS[:2], greedy=False)
    assert [request.seed for request in engines.requests] == [stream_seed(5 + EVAL_SEED, u, 0) for u in (-2, -1)]


@pytest.mark.parametrize("greedy", [True, False])
async def test_an_evaluation_gives_one_answer_a_prompt_and_leaves_the_groups_alone(greedy, collector):
    engines = Engines(version=7)
    made = collector(engines=engines)
    batch = await made.evaluate(PROMPTS[:5], greedy=greedy)
    assert batch.non_tensor_batch["prompt_text"].tolist() == [p.text for p in PROMPTS[:5]]
    assert {request.temperature for request in engines.requests} == {0.0 if greedy else made.config.rollout.temperature}
    assert (made.groups.used, made.order.next(1)) == (0, [0])


async def test_all_that_is_under_way_may_arrive_while_the_caller_does_something_else(collector):
    made = collector(staleness=1)
    await collect(made, 0)
    while made.rollout.pending or made.rewards.pending:
        await asyncio.sleep(0)
    batch, _ = at_once(made.scored(at_once(made.answers(1))))
    assert batch.batch["scores"].tolist() == [100.0 * uid + n for uid in range(3, 6) for n in range(4)]
    evaluated = await made.evaluate(PROMPTS[:4], greedy=True)
    assert evaluated.batch["uid"].tolist() == [-4, -3, -2, -1]


async def test_scores_are_received_while_the_engines_answer_and_nobody_is_asked_in_vain(collector):
    """The last answer arrives only when all other answers have scores."""
    scored, late, found = [], asyncio.Event(), []

    def score(request):
        scored.append(request.key)
        if len(scored) == 11:
            late.set()
        return by_key(request)

    class OneIsLate(Engines):
        async def poll(self):
            if len(self.waiting) == 1:
                await late.wait()
            found.append(await super().poll())
            return found[-1]

    made = collector(score, engines=OneIsLate())
    poll = made.rewards.poll

    async def polled():
        found.append(await poll())
        return found[-1]

    made.rewards.poll = polled
    batch = await asyncio.wait_for(collect(made, 0), 10.0)
    assert batch.batch["scores"].tolist() == [100.0 * uid + n for uid in range(3) for n in range(4)]
    assert all(found)
    assert sum(map(len, found)) == 2 * 12


async def test_what_is_lost_while_all_requests_are_dropped_is_not_requested_again(collector):
    """A replica dies while the requests of another replica are dropped.

    The groups of the dead replica are discarded too, so the collector must not request the groups again.
    """

    class DiesMeanwhile(Engines):
        def __init__(self):
            super().__init__()
            self.lost = set()

        @property
        def pending(self):
            return len(self.waiting) + len(self.lost)

        async def poll(self):
            await asyncio.sleep(0)
            return await super().poll() if self.waiting else []

        def take_lost(self):
            taken, self.lost = self.lost, set()
            return taken

        async def abort(self):
            self.waiting, self.lost = [], {0, 1, 2}
            await turns(10)
            self.lost = set()

    made = collector(engines=DiesMeanwhile())
    state, before = made.state_dict(), asyncio.create_task(made.answers(0))
    await turns(5)
    assert made.rollout.waiting
    before.cancel()
    await made.abort()
    assert (made.rollout.waiting, len(made.rollout.requests)) == ([], 12)
    made.load_state_dict(state)
    batch = await collect(made, 0)
    assert batch.batch["scores"].tolist() == [100.0 * uid + n for uid in range(3) for n in range(4)]
    assert len(made.rollout.requests) == 24


async def test_groups_that_nobody_works_on_are_an_error_and_no_endless_wait(collector):
    class Forgetful(Engines):
        def submit(self, groups):
            super().submit([group[1:] for group in groups])

    with pytest.raises(AssertionError, match="no engine or reward worker has work"):
        await collect(collector(engines=Forgetful()), 0)


# Failures


async def test_too_many_failed_rewards_stop_the_run_and_the_first_of_this_step_are_named(collector):
    with pytest.raises(RewardError) as caught:
        await collect(collector(some_fail), 0)
    assert str(caught.value) == (
        "75% of the rewards failed, 9 of 12, above reward.max_failed_fraction=0.5: "
        "error 1 (3 x, first in prompt group 0, sample 1); error 2 (3 x, first in prompt group 0, sample 2); "
        "error 3 (3 x, first in prompt group 0, sample 3)"
    )
    assert len(caught.value.batch) == 12


def test_failed_samples_of_an_evaluation_are_not_named_by_a_prompt_group():
    assert [_name_of(uid) for uid in (3, 0, -16)] == ["prompt group 3", "prompt group 0", "an evaluation"]


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        ("environment_reward", "the environment gave no reward: return a number from its method `step` or `reward`"),
        ("exact_match", "return a number for the samples that a function judges"),
    ],
)
async def test_a_step_without_any_score_says_who_must_give_one(collector, function, advice):
    with pytest.raises(RewardError, match=f"any of 12 samples: all returned None; {advice}"):
        await collect(collector(no_score, reward=f"reward.functions=[{function}]"), 0)


async def test_failed_conversations_stop_the_run_as_conversations_and_not_as_rewards(collector):
    class Broken(Engines):
        all_break = True

        async def poll(self):
            (answer,) = await super().poll()
            breaks = self.all_break or answer.key[1] == 3
            turn = Turn((), (), (), (), "abort")
            return [Trajectory(*answer.key, [turn], "error", error="reset raised (a.py:1)") if breaks else answer]

    with pytest.raises(RewardError) as caught:
        await collect(collector(engines=Broken()), 0)
    assert str(caught.value) == (
        "100% of the conversations failed, 12 of 12, above reward.max_failed_fraction=0.5 (the limit for "
        "failed rewards applies to failed conversations too): reset raised (a.py:1) (12 x, first in prompt group 0, "
        "sample 0)"
    )
    some = Broken()
    some.all_break = False
    with pytest.raises(RewardError) as caught:
        await collect(collector(some_fail, engines=some), 0)
    assert str(caught.value).startswith(
        "75% of the rewards failed, 9 of 12, above reward.max_failed_fraction=0.5 (3 of the rewards failed because "
        "their conversations failed): error 1 (3 x"
    )


async def test_T7_a_failed_conversation_below_the_limit_is_in_no_statistic_and_is_not_trained_on(collector):
    class Conversations(Engines):
        async def poll(self):
            ((uid, number),) = [answer.key for answer in await super().poll()]
            if number == 3:
                return [
                    Trajectory(uid, number, [Turn((), (), (), (), "abort")], "error", error="reset raised (a.py:1)")
                ]
            two = [Turn([1, uid] if n == 0 else [7], [10 + number], [-1.0], [0], "stop", "", 1.0) for n in range(2)]
            return [Trajectory(uid, number, two, "answer" if number else "max_turns")]

    made = collector(lambda request: SampleScores(request.key, (float(request.key[1]),)), engines=Conversations())
    batch = await collect(made, 0)
    failed = torch.tensor([reason == "error" for reason in batch.non_tensor_batch["stop_reason"]])
    assert (int(failed.sum()), len(batch)) == (3, 12)
    assert not batch.batch["valid"][failed].any()
    assert len(batch[failed].values("responses")) == 0

    whole, others = (sample_metrics(one, ["exact"]) for one in (batch, batch[~failed]))
    shares = {name for name in whole if name.startswith("rollout/stop_")}
    shares |= {"reward/failed_fraction", "reward/unscored_fraction"}
    assert {name: whole[name] for name in whole.keys() - shares} == {n: others[n] for n in others.keys() - shares}
    assert (whole["rollout/length_mean"], whole["rollout/turns_mean"]) == (2.0, 2.0)
    assert (whole["rollout/stop_error_fraction"], whole["reward/failed_fraction"]) == (0.25, 0.25)

    config, _ = compose(["algorithm=grpo"])
    advantages = []
    for one in (batch[~failed], batch):
        rewards = on_last_token(one, one.batch["scores"])
        found, _ = estimate_advantages(one.with_values("responses", token_level_rewards=rewards), config.algorithm)
        advantages.append(found.values("advantages").tolist())
    assert advantages[0] == advantages[1]
    assert any(advantages[0])


def test_statistics_of_a_batch_whose_conversations_all_failed_are_finite():
    turn = Turn((1,), (), (), (), "abort")
    group = Group(0, PROMPTS[0], 1, 1, state=GroupState.READY)
    group.trajectories[0] = Trajectory(0, 0, [turn], "error", error="it broke")
    group.results[0] = SampleScores((0, 0), (None,), failed=True, error="it broke")
    metrics = sample_metrics(to_batch([group], ONE), ["exact"])
    assert metrics["rollout/stop_error_fraction"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


async def test_failures_past_the_limit_are_not_waited_for_to_the_end(monkeypatch, collector):
    class NeverDone(Engines):
        async def poll(self):
            if len(self.waiting) == 1:
                await asyncio.Event().wait()
            return await super().poll()

    monkeypatch.setattr("rltrain.trajectories.collector.PATIENCE_S", 0.0)
    made = collector(some_fail, engines=NeverDone())
    with pytest.raises(RewardError, match=r"above reward\.max_failed_fraction=0\.5: error") as caught:
        await asyncio.wait_for(collect(made, 0), 10.0)
    assert caught.value.batch is None
    assert sum(len(group.results) for group in made.groups.groups.values()) < 12


async def test_failures_up_to_the_limit_go_on(collector):
    batch = await collect(collector(some_fail, max_failed=0.75), 0)
    assert batch.batch["valid"].tolist() == [True, False, False, False] * 3


async def test_failures_of_earlier_steps_are_not_blamed(collector):
    broken = []
    made = collector(lambda r: some_fail(r) if r.key[1] == 1 or broken else by_key(r))
    await collect(made, 0)
    broken.append(True)
    made.rollout.version = 1
    with pytest.raises(RewardError, match=r": error 1 \(3 x, first in prompt group 3, sample 1\); error 2"):
        await collect(made, 1)


async def test_a_failure_of_an_earlier_step_does_not_start_the_patience_of_this_one(collector):
    made = collector(lambda r: some_fail(r) if r.key[0] < 3 else by_key(r), max_failed=0.75)
    poll, answered = made.rewards.poll, asyncio.Event()

    async def polled():
        await answered.wait()
        return await poll()

    made.rewards.poll = polled
    batch = await made.answers(0)
    answered.set()
    while made.rewards.pending:
        await asyncio.sleep(0)
    await made.scored(batch)
    made.take()
    await made.answers(1)
    assert made.first_failure == 0.0


# Tests of groups converted to a batch


def group(uid, scores, *, tokens=((1, 2), (3,)), failed=()) -> Group:
    trajectories = {
        n: trajectory_of(PROMPTS[uid].ids, Completion((uid, n), list(ids), [-0.5] * len(ids), "stop", [0] * len(ids)))
        for n, ids in enumerate(tokens)
    }
    results = {
        n: SampleScores(
            (uid, n), (None,) * len(values) if n in failed else values, n in failed, "it broke" * (n in failed)
        )
        for n, values in enumerate(scores)
    }
    return Group(uid, PROMPTS[uid], len(tokens), len(tokens), GroupState.READY, 0, trajectories, results)


def with_placed_scores(batch) -> DataProto:
    return batch.with_values("responses", placed=on_last_token(batch, batch.batch["scores"]))


def test_B8_the_score_sits_on_the_last_trained_token_and_token_scores_sum_to_it():
    batch = to_batch([group(0, [(2.0,), (-1.0,)]), group(1, [(0.25,), (0.0,)], tokens=((4, 5, 6), (7,)))], ONE)
    batch = with_placed_scores(batch)
    assert batch.padded("placed").tolist() == [[0, 2, 0], [-1, 0, 0], [0, 0, 0.25], [0, 0, 0]]
    assert batch.padded("placed").sum(-1).tolist() == batch.batch["scores"].tolist()
    assert batch.padded("response_mask").tolist() == batch.padding_mask("responses").tolist()


def test_C4_a_failed_row_is_masked_and_not_valid_and_its_zero_is_in_no_token():
    batch = with_placed_scores(to_batch([group(0, [(2.0,), (5.0,)], failed=(1,))], ONE))
    assert batch.batch["valid"].tolist() == [True, False]
    assert batch.padded("response_mask").tolist() == [[True, True], [False, False]]
    assert batch.padded("placed").tolist() == [[0, 2], [0, 0]]
    assert batch.batch["reward_components"].isnan().tolist() == [[False], [True]]
    assert batch.non_tensor_batch["reward_error"].tolist() == ["", "it broke"]


def test_C4_without_rewards_every_row_scores_0_and_a_failed_row_is_masked_all_the_same():
    batch = to_batch([group(0, [(), ()], failed=(1,))], [])
    assert batch.batch["scores"].tolist() == [0, 0]
    assert batch.batch["valid"].tolist() == [True, False]
    assert batch.padded("response_mask").tolist() == [[True, True], [False, False]]
    assert batch.batch["reward_components"].shape == (2, 0)
    assert batch.batch["successes"].isnan().all()


def test_C4_nothing_that_a_failed_row_scored_is_kept():
    half_done = replace(group(0, [(2.0, 2.0), (5.0, None)], failed=(1,)))
    half_done.results[1] = SampleScores((0, 1), (5.0, None), failed=True, error="second function broke")
    batch = to_batch([half_done], TWO)
    assert batch.batch["scores"].tolist() == [3.0, 0.0]
    assert batch.batch["reward_components"][1].isnan().all()
    assert batch.batch["valid"].tolist() == [True, False]


def test_G4_a_component_that_does_not_apply_is_left_out_and_a_row_with_none_is_not_valid():
    batch = to_batch([group(0, [(1.0, None), (None, None)]), group(1, [(None, 4.0), (1.0, 4.0)])], TWO)
    assert batch.batch["scores"].tolist() == [1.0, 0.0, 2.0, 3.0]
    assert batch.batch["valid"].tolist() == [True, False, True, True]
    assert batch.padded("response_mask")[1].tolist() == [False, False]


def test_an_answer_is_correct_if_every_function_that_decides_says_so():
    exact, style = replace(ONE[0], success=1.0), replace(TWO[1], success=4.0)
    groups = [group(0, [(1.0, 4.0), (1.0, 3.0)]), group(1, [(None, None), (0.5, None)], failed=(0,))]
    groups[1].results[1] = replace(groups[1].results[1], success=True)
    # the last answer is wrong, because its score 0.5 is below the success threshold 1.0
    assert successes_of(groups, [exact, style]) == [1.0, 0.0, None, 0.0]
    assert successes_of(groups, [exact, TWO[1]]) == [1.0, 1.0, None, 0.0]
    # without success thresholds, an answer is correct only if a reward function reports success
    assert successes_of(groups, TWO) == [None, None, None, 1.0]
    groups[0].results[0] = replace(groups[0].results[0], success=False)
    assert successes_of(groups, [exact, style]) == [0.0, 0.0, None, 0.0]


def successes_of(groups, components):
    """Return for each row 1.0 if the answer is correct, 0.0 if it is wrong, and None if no reward function decides."""
    found = to_batch(groups, components).batch["successes"].tolist()
    return [None if math.isnan(value) else value for value in found]
