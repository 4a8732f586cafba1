"""Pools of prompts and reused groups, with slow fake engines and reward workers that answer in random order."""

import pytest
from test_async_loop import Engines, Judges, step

from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.trajectories.collector import Collector
from workers.reward.messages import SampleScores

PROMPTS = [Prompt(n, f"prompt {n}", [1, n], {}) for n in range(40)]
P, G = 3, 2


class Exam(Judges):
    """Fake reward workers: of four prompts, one is easy, one is hard, and two are solved by one of two answers.

    `prompt_of` maps the uid of a group to its prompt index.
    """

    def __init__(self, seed):
        super().__init__(None, seed)
        self.prompt_of = {}

    def submit(self, requests):
        self.prompt_of |= {request.key[0]: int(request.prompt.split()[-1]) for request in requests}
        super().submit(requests)

    async def poll(self):
        self.score = lambda uid, number: correct(self.prompt_of[uid], number)
        found = await super().poll()
        return [SampleScores(one.key, one.scores, success=one.scores[0] == 1.0) for one in found]


def correct(prompt, number):
    return (1.0, 0.0, float(number == 0), float(number == 1))[prompt % 4]


@pytest.fixture
def collector(tasks):
    """Return a function that starts a collector whose engines and reward workers answer in an order given by a seed."""

    def make(*overrides, seed=0, staleness=0, steps=12) -> Collector:
        config, _ = compose(
            [f"trainer.prompts_per_step={P}", "trainer.prompts_per_minibatch=1", f"rollout.samples_per_prompt={G}",
             f"trainer.max_staleness={staleness}", f"trainer.total_steps={steps}", *overrides]
        )  # fmt: skip
        made = Collector(config, rollout=Engines(seed), rewards=Exam(seed), prompts=PROMPTS, tasks=tasks)
        made.start()
        return made

    return make


async def trained(made, steps, looks=4):
    """Take steps, and return for each step its uids and the prompts of all groups that exist by then."""
    found = []
    for version in range(steps):
        batch = await step(made, version, looks=looks)
        found.append((batch.batch["uid"].unique().tolist(), dict(sorted(made.rewards.prompt_of.items()))))
    return found


@pytest.mark.parametrize("sampling", [0, 3])
@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_the_prompts_of_groups_do_not_depend_on_the_order_or_the_speed_of_answers(collector, staleness, sampling):
    words = ["data.difficulty={}", f"algorithm.dynamic_sampling={sampling}"]
    runs = [
        await trained(collector(*words, seed=seed, staleness=staleness), 12, looks=looks)
        for seed, looks in ((0, 4), (1, 0), (2, 30))
    ]
    steps = [[uids for uids, _ in one] for one in runs]
    assert steps[0] == steps[1] == steps[2]
    prompts = [one[-1][1] for one in runs]
    assert prompts[0] == prompts[1] == prompts[2]
    for uids in steps[0]:
        assert len({prompts[0][uid] for uid in uids}) == len(uids)  # no prompt occurs twice in a step


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_a_draw_knows_the_outcomes_of_all_steps_except_those_that_are_unfinished(collector, staleness):
    """The number of prompts with known outcomes at each draw shows which steps the draw takes into account.

    With staleness k, the groups of step s are drawn at the start of step s - k, after s - k finished steps.
    """
    made, known = collector("data.difficulty={}", staleness=staleness), []
    draw = made.pools.next

    def noted(count):
        unseen = made.pools.metrics()["difficulty/unseen_fraction"]
        known.extend([round(len(PROMPTS) * (1 - unseen))] * count)
        return draw(count)

    made.pools.next = noted
    found = await trained(made, 5)
    first = [len({found[-1][1][uid] for uid in range(P * finished)}) for finished in range(5)]
    assert known[: 5 * P] == [first[max(0, number // P - staleness)] for number in range(5 * P)]


@pytest.mark.parametrize("sampling", [0, 2])
@pytest.mark.parametrize("staleness", [1, 2, 3])
async def test_reused_groups_do_not_depend_on_the_order_of_answers_and_keep_the_bound(collector, staleness, sampling):
    words = ["trainer.reuse={groups:2,steps:1}", f"algorithm.dynamic_sampling={sampling}"]
    runs = []
    for seed in range(3):
        made, steps, ages = collector(*words, seed=seed, staleness=staleness), [], set()
        for version in range(12):
            batch = await step(made, version, looks=7 * seed)
            reused = sorted(group.uid for group in made.step.reused)
            behind = version - batch.values("policy_version")
            assert 0 <= int(behind.min()) <= int(behind.max()) <= staleness
            ages |= {version - group.shipped for group in made.step.reused}
            steps.append((batch.batch["uid"].unique().tolist(), reused))
        assert max(ages) <= staleness
        assert (made.groups.groups, made.rollout.pending, made.rewards.pending) == ({}, 0, 0)
        new = [uid for uids, reused in steps for uid in uids if uid not in reused]
        assert new == sorted(set(new))
        runs.append(steps)
    assert runs[0] == runs[1] == runs[2]
    assert sum(bool(reused) for _, reused in runs[0]) > 8


async def test_a_group_that_is_too_old_to_be_reused_stops_the_run_instead_of_being_trained_on(collector):
    made = collector("trainer.reuse={groups:2,steps:1}", staleness=1)
    await step(made, 0)
    made.buffer.steps = 9  # the buffer keeps groups beyond the staleness bound
    await step(made, 1)
    with pytest.raises(AssertionError, match="answers requested at weight version 0 are too old for training at"):
        await step(made, 2)


async def test_switched_off_the_state_and_the_metrics_are_as_before(collector):
    made = collector()
    batch = await made.answers(0)
    _, metrics = await made.scored(batch)
    finished = made.take()
    assert (metrics, finished.dropped, finished.reused) == ({}, [], [])
    assert set(made.state_dict()) == {"order", "groups", "step"}
