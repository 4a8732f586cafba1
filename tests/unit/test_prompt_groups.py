import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rltrain.data import Prompt
from rltrain.prompt_groups import PromptGroups, State, requests_of, stream_seed
from workers.reward.messages import RewardResult
from workers.rollout.messages import Completion


def prompt(number: int = 0) -> Prompt:
    return Prompt(number, f"prompt {number}", [1, number], {"answer": str(number)})


def completion(uid: int, number: int, version: int = 0, text: str = "text") -> Completion:
    return Completion((uid, number), [3], [-0.5], "stop", [version], text)


def score(uid: int, number: int, value: float = 1.0) -> RewardResult:
    return RewardResult((uid, number), (value,))


def groups(*, samples: int = 2, per_step: int = 1, staleness: int = 0, prompts: int = 1, ship: bool = True):
    made = PromptGroups(samples_per_prompt=samples, prompts_per_step=per_step, max_staleness=staleness)
    made.add([prompt(n) for n in range(prompts)])
    if ship:
        made.ship(0)
    return made


def finish(made: PromptGroups, uid: int, version: int = 0) -> None:
    for number in range(made.samples_per_prompt):
        made.generated(completion(uid, number, version))
        made.scored(score(uid, number))


# One group's life


def test_a_group_passes_from_pending_over_generating_and_scoring_to_ready():
    made = groups(ship=False)
    group = made.groups[0]
    assert (group.state, made.take(1)) == (State.PENDING, [])
    assert made.ship(4) == [group]
    assert (group.state, group.shipped, made.ship(5)) == (State.GENERATING, 4, [])
    request = made.generated(completion(0, 1, 4))
    assert (request.key, request.prompt, request.response) == ((0, 1), "prompt 0", "text")
    assert request.columns == {"answer": "0", "finish_reason": "stop"}
    made.scored(score(0, 1))
    assert group.state is State.GENERATING
    made.generated(completion(0, 0, 4))
    assert (group.state, made.take(1)) == (State.SCORING, [])
    made.scored(score(0, 0))
    assert group.state is State.READY
    assert made.take(1) == [group]
    assert (made.groups, made.used) == ({}, 1)


def test_G3_scores_go_to_their_own_samples_whatever_the_order():
    made = groups(samples=3, prompts=2)
    keys = [(uid, number) for uid in range(2) for number in range(3)]
    for key in keys:
        made.generated(completion(*key, text=f"answer {key}"))
    for key in sorted(keys, key=lambda k: (-k[1], k[0])):
        made.scored(score(*key, value=10 * key[0] + key[1]))
    for group in made.take(2):
        for number in range(3):
            assert group.completions[number].text == f"answer {(group.uid, number)}"
            assert group.results[number].scores == (10 * group.uid + number,)


def test_second_copies_and_answers_of_gone_groups_are_ignored():
    made = groups()
    assert made.generated(completion(0, 0, text="first")) is not None
    assert made.generated(completion(0, 0, text="second")) is None
    made.scored(score(0, 0, 1.0))
    made.scored(score(0, 0, 2.0))
    made.scored(score(0, 1))  # of a sample that is not there yet
    assert made.groups[0].completions[0].text == "first"
    assert {n: r.scores for n, r in made.groups[0].results.items()} == {0: (1.0,)}
    made.drop(0, replace=True)
    assert made.generated(completion(0, 1)) is None
    made.scored(score(0, 1))
    assert made.groups == {}


def test_an_answer_before_shipping_is_ignored():
    made = groups(ship=False)
    assert made.generated(completion(0, 0)) is None
    assert made.groups[0].completions == {}


def test_a_reissued_group_keeps_its_answers_and_scores_and_asks_for_the_rest():
    made = groups()
    made.generated(completion(0, 0))
    made.reissue([0, 99])
    assert made.groups[0].state is State.PENDING
    made.scored(score(0, 0, value=7.0))  # was on its way when the engine died
    assert made.generated(completion(0, 1)) is None  # not asked for at the moment
    (group,) = made.ship(1)
    assert [r.key for r in requests_of(group, temperature=1.0, max_tokens=4, seed=0)] == [(0, 1)]
    assert made.generated(completion(0, 0)) is None  # a copy
    made.generated(completion(0, 1, version=1))
    made.scored(score(0, 1))
    (group,) = made.take(1)
    assert (group.shipped, [c.versions for _, c in sorted(group.completions.items())]) == (0, [[0], [1]])
    assert [group.results[number].scores for number in (0, 1)] == [(7.0,), (1.0,)]


def test_a_ready_group_is_not_reissued():
    made = groups()
    finish(made, 0)
    made.reissue([0])
    assert made.take(1)[0].uid == 0


def test_only_the_oldest_groups_are_taken_and_only_when_all_are_ready():
    made = groups(per_step=2, prompts=4)
    for uid in (1, 2, 3):
        finish(made, uid)
    assert made.take(2) == []
    finish(made, 0)
    assert [group.uid for group in made.take(2)] == [0, 1]
    assert [group.uid for group in made.take(2)] == [2, 3]
    assert made.take(2) == []


def test_a_dropped_group_leaves_room_for_one_more():
    made = groups(per_step=2, prompts=2)
    assert made.wanted(0) == 0
    made.drop(0, replace=True)
    assert (made.wanted(0), made.dropped) == (1, 1)
    made.add([prompt(7)])
    made.ship(0)
    for uid in (1, 2):
        finish(made, uid)
    assert [group.prompt.index for group in made.take(2)] == [1, 7]
    assert (made.used, made.wanted(1)) == (2, 2)


def test_a_dropped_group_that_is_not_replaced_leaves_its_place_empty():
    made = groups(per_step=3, prompts=3)
    made.drop(1, replace=False)
    assert (made.wanted(0), made.dropped, made.used) == (0, 1, 1)
    finish(made, 0)
    assert made.take(2) == []
    finish(made, 2)
    assert [group.uid for group in made.take(2)] == [0, 2]
    assert (made.used, made.wanted(1)) == (3, 3)


def test_ready_groups_are_told_oldest_first_and_stay():
    made = groups(prompts=3)
    assert made.ready() == []
    finish(made, 2)
    finish(made, 0)
    assert [group.uid for group in made.ready()] == [0, 2]
    assert [group.uid for group in made.ready()] == [0, 2]
    assert sorted(made.groups) == [0, 1, 2]


def test_a_greedy_answer_is_one_more_request_at_temperature_zero_and_the_group_waits_for_it():
    made = PromptGroups(samples_per_prompt=2, prompts_per_step=1, max_staleness=0, greedy_baseline=True)
    made.add([prompt()])
    (group,) = made.ship(0)
    assert (group.samples, group.size) == (2, 3)
    requests = requests_of(group, temperature=0.7, max_tokens=4, seed=0)
    assert [(request.key, request.temperature) for request in requests] == [((0, 0), 0.7), ((0, 1), 0.7), ((0, 2), 0.0)]
    finish(made, 0)
    assert (group.state, made.take(1)) == (State.GENERATING, [])
    made.generated(completion(0, 2))
    made.scored(score(0, 2))
    assert made.take(1) == [group]


def test_without_a_baseline_every_answer_is_sampled():
    group = groups(samples=3).groups[0]
    assert (group.samples, group.size) == (3, 3)
    assert {r.temperature for r in requests_of(group, temperature=0.7, max_tokens=4, seed=0)} == {0.7}


@pytest.mark.parametrize(("staleness", "wanted"), [(0, [3, 3, 3]), (1, [6, 3, 3]), (3, [12, 3, 3])])
def test_so_many_groups_are_wanted_at_each_version(staleness, wanted):
    made = PromptGroups(samples_per_prompt=1, prompts_per_step=3, max_staleness=staleness)
    asked = []
    for version in range(3):
        asked.append(made.wanted(version))
        made.add([prompt()] * asked[-1])
        assert made.wanted(version) == 0
        made.ship(version)
        for uid in list(made.groups):
            if made.groups[uid].state is State.GENERATING:
                finish(made, uid, version)
        assert len(made.take(3)) == 3
    assert asked == wanted


# Any order of events


class Life(RuleBasedStateMachine):
    """Engines, reward workers and a trainer that act in any order; the weights advance at each take."""

    @initialize(
        samples=st.integers(1, 3), per_step=st.integers(1, 3), staleness=st.integers(0, 3), greedy=st.booleans()
    )
    def start(self, samples, per_step, staleness, greedy):
        self.groups = PromptGroups(
            samples_per_prompt=samples, prompts_per_step=per_step, max_staleness=staleness, greedy_baseline=greedy
        )
        self.staleness, self.per_step, self.samples = staleness, per_step, samples + greedy
        self.version = self.added = 0
        self.generating: list[tuple[int, int, int]] = []  # (uid, number, version), copies and orphans too
        self.scoring: list[tuple[int, int]] = []
        self.used: list[int] = []
        self.dropped: list[int] = []
        self.empty_places = 0  # of groups that were dropped and not replaced

    @rule()
    def fill(self):
        count = self.groups.wanted(self.version)
        self.groups.add(prompt(self.added + n) for n in range(count))
        self.added += count
        for group in self.groups.ship(self.version):
            missing = [number for number in range(group.size) if number not in group.completions]
            self.generating += [(group.uid, number, self.version) for number in missing]

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def answer(self, data):
        uid, number, version = self.generating.pop(data.draw(st.integers(0, len(self.generating) - 1)))
        if request := self.groups.generated(completion(uid, number, version, f"{uid}/{number}/{version}")):
            self.scoring.append(request.key)

    @precondition(lambda self: self.scoring)
    @rule(data=st.data())
    def judge(self, data):
        uid, number = self.scoring.pop(data.draw(st.integers(0, len(self.scoring) - 1)))
        self.groups.scored(score(uid, number, value=100 * uid + number))

    @precondition(lambda self: self.groups.groups)
    @rule(data=st.data())
    def engine_dies(self, data):
        self.groups.reissue([data.draw(st.sampled_from(sorted(self.groups.groups)))])

    @precondition(lambda self: self.groups.groups)
    @rule(data=st.data())
    def give_up(self, data):
        """As dynamic sampling does: a group of the current step; the last place of a step is never left empty."""
        places = self.places()
        uid = data.draw(st.sampled_from(sorted(self.groups.groups)[:places]))
        replace = places == 1 or data.draw(st.booleans())
        self.groups.drop(uid, replace=replace)
        self.dropped.append(uid)
        self.empty_places += not replace

    def places(self):
        """Groups that the current step still takes."""
        return (self.version + 1) * self.per_step - len(self.used) - self.empty_places

    @rule()
    def train(self):
        taken = self.groups.take(self.places())
        for group in taken:
            assert set(group.completions) == set(group.results) == set(range(self.samples))
            for number in range(self.samples):
                answer, result = group.completions[number], group.results[number]
                assert answer.key == result.key == (group.uid, number)
                assert result.scores == (100 * group.uid + number,)
                assert self.version - min(answer.versions) <= self.staleness, "older than max_staleness"
            assert self.version - group.shipped <= self.staleness
            self.used.append(group.uid)
        self.version += bool(taken)

    @invariant()
    def none_is_lost_and_none_is_doubled(self):
        if not hasattr(self, "groups"):
            return
        everywhere = [*self.used, *self.dropped, *self.groups.groups]
        assert sorted(everywhere) == list(range(self.added))
        assert self.used == sorted(self.used)
        assert self.groups.used == len(self.used) + self.empty_places
        assert self.groups.dropped == len(self.dropped)
        assert len(self.groups.groups) <= (self.staleness + 1) * self.per_step

    def teardown(self):
        """Whatever happened, the run can go on: with the engines at work a further step comes about."""
        if not hasattr(self, "groups"):
            return
        before, places = len(self.used), self.places()
        self.fill()
        while self.generating:
            uid, number, version = self.generating.pop()
            self.groups.generated(completion(uid, number, version))
        for uid, group in self.groups.groups.items():
            for number in range(group.size):
                self.groups.scored(score(uid, number, value=100 * uid + number))
        self.train()
        assert len(self.used) == before + places


Life.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
test_groups_in_any_order_of_events = Life.TestCase


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_staleness_bound_is_reached_and_never_passed(staleness):
    """Engines of random speed under a trainer that takes a step as soon as it can."""
    draw, ages = random.Random(staleness), set()
    made = PromptGroups(samples_per_prompt=2, prompts_per_step=2, max_staleness=staleness)
    version, running = 0, []
    while version < 60:
        made.add([prompt()] * made.wanted(version))
        running += [(group.uid, number, version) for group in made.ship(version) for number in range(2)]
        draw.shuffle(running)
        for uid, number, sampled in [running.pop() for _ in range(min(len(running), 3))]:
            made.generated(completion(uid, number, sampled))
            made.scored(score(uid, number))
        if taken := made.take(2):
            ages |= {version - v for group in taken for c in group.completions.values() for v in c.versions}
            version += 1
    assert max(ages) == staleness


# Random streams


def test_E8_every_seed_group_and_sample_has_a_stream_of_its_own():
    seeds = {stream_seed(s, u, n) for s in range(5) for u in range(2500) for n in range(8)}
    assert len(seeds) == 5 * 2500 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, 2, 3) == stream_seed(1, 2, 3)
    assert len({stream_seed(*triple) for triple in [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2), (0, 0, 6)]}) == 5


def test_E8_the_bits_of_neighbouring_streams_have_nothing_in_common():
    flips = [bin(stream_seed(0, u, n) ^ stream_seed(0, u, n + 1)).count("1") for u in range(200) for n in range(8)]
    assert 30 < sum(flips) / len(flips) < 33  # half of 63


def test_E8_requests_of_a_group_differ_in_their_seed_only():
    group = groups(samples=4).groups[0]
    requests = requests_of(group, temperature=0.7, max_tokens=9, seed=11)
    assert [request.key for request in requests] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert {(*r.prompt_ids, r.temperature, r.max_tokens) for r in requests} == {(1, 0, 0.7, 9)}
    assert [request.seed for request in requests] == [stream_seed(11, 0, n) for n in range(4)]
    again = requests_of(group, temperature=0.7, max_tokens=9, seed=12)
    assert not {r.seed for r in requests} & {r.seed for r in again}
