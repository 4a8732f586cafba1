"""Property tests of prompt groups with engines, reward workers and a trainer that act in any order."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rltrain.trajectories.prompt_groups import PromptGroups
from tests.unit.trajectories.test_prompt_groups import completion, prompt, score


class Life(RuleBasedStateMachine):
    """State machine of engines, reward workers and a trainer that act in any order.

    The version of the weights advances each time the trainer takes a batch of groups.
    """

    @initialize(
        samples=st.integers(1, 3), per_step=st.integers(1, 3), staleness=st.integers(0, 3), steps=st.integers(1, 5),
        greedy=st.booleans(), first=st.sampled_from([0, -7]), reused=st.integers(0, 2),
    )  # fmt: skip
    def start(self, samples, per_step, staleness, steps, greedy, first, reused):
        self.reused = min(reused, per_step - 1)  # a step may fill at most this number of places with earlier groups
        self.groups = PromptGroups(
            samples_per_prompt=samples, prompts_per_step=per_step, max_staleness=staleness, steps=steps,
            greedy_baseline=greedy, first_uid=first, reused=self.reused,
        )  # fmt: skip
        self.staleness, self.per_step, self.samples = staleness, per_step, samples + greedy
        self.steps, self.first = steps, first
        self.version = self.added = 0
        # each request is (uid, number, version), and the list includes duplicates and requests of dropped groups
        self.generating: list[tuple[int, int, int]] = []
        self.scoring: list[tuple[int, int]] = []
        self.used: list[int] = []
        self.dropped: list[int] = []
        self.empty_places = 0  # number of groups that were dropped without a replacement
        self.filled = 0  # number of places that were filled with groups of earlier steps

    @rule()
    def fill(self):
        count = self.groups.wanted(self.version)
        self.groups.add(prompt(self.added + n) for n in range(count))
        self.added += count
        for group in self.groups.ship(self.version):
            assert self.age(group) <= self.staleness, "the group will be older than max_staleness in its step"
            missing = [number for number in range(group.size) if number not in group.trajectories]
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

    @precondition(lambda self: self.groups.oldest(self.places()))
    @rule(data=st.data())
    def give_up(self, data):
        """Drop a group of the current step, as dynamic sampling does.

        If the step needs only one more group, the dropped group is always replaced.
        """
        places = self.places()
        uid = data.draw(st.sampled_from([group.uid for group in self.groups.oldest(places)]))
        replace = places == 1 or data.draw(st.booleans())
        self.groups.drop(uid, replace=replace)
        self.dropped.append(uid)
        self.empty_places += not replace

    def age(self, group):
        """Return the largest possible number of weight updates between a group's shipping and its use in a step."""
        before = sum(uid < group.uid for uid in self.groups.groups) - self.places()
        later = 0 if before < 0 else 1 + before // (self.per_step - self.reused)
        return self.version + later - group.shipped

    def places(self):
        """Return the number of groups that the current step still needs."""
        return (self.version + 1) * self.per_step - len(self.used) - self.empty_places - self.filled

    @precondition(lambda self: self.version < self.steps)
    @rule(reused=st.integers(0, 2))
    def train(self, reused):
        answered = self.groups.answered(self.places())
        taken = self.groups.take(self.places())
        assert taken in ([], answered)
        for group in taken:
            assert set(group.trajectories) == set(group.results) == set(range(self.samples))
            for number in range(self.samples):
                answer, result = group.trajectories[number], group.results[number]
                assert answer.key == result.key == (group.uid, number)
                assert result.scores == (100 * group.uid + number,)
                assert self.version - min(answer.versions()) <= self.staleness, "older than max_staleness"
            assert self.version - group.shipped <= self.staleness
            self.used.append(group.uid)
        self.version += bool(taken)
        if taken and self.version < self.steps:
            count = min(reused, self.reused)
            self.groups.reuse(count)
            self.filled += count

    @invariant()
    def none_is_lost_and_none_is_doubled(self):
        if not hasattr(self, "groups"):
            return
        everywhere = [*self.used, *self.dropped, *self.groups.groups]
        assert sorted(everywhere) == list(range(self.first, self.first + self.added))
        assert self.used == sorted(self.used)
        assert self.groups.used == len(self.used) + self.empty_places + self.filled
        assert self.groups.dropped == len(self.dropped)
        assert len(self.groups.groups) <= (self.staleness + 1) * self.per_step
        assert len(self.groups.groups) + self.groups.used <= self.steps * self.per_step, "no step would use a group"

    def teardown(self):
        """Check that with working engines, the run can complete another step after any order of actions."""
        if not hasattr(self, "groups"):
            return
        before, places = len(self.used), self.places()
        if self.version == self.steps:
            assert (self.groups.wanted(self.version), self.groups.groups) == (0, {})
            return
        self.fill()
        while self.generating:
            uid, number, version = self.generating.pop()
            self.groups.generated(completion(uid, number, version))
        for uid, group in self.groups.groups.items():
            for number in range(group.size):
                self.groups.scored(score(uid, number, value=100 * uid + number))
        self.train(reused=0)
        assert len(self.used) == before + places


Life.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
test_groups_in_any_order_of_events = Life.TestCase


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_staleness_bound_is_reached_and_never_passed(staleness):
    """Engines of random speed generate answers for a trainer that takes each step as soon as possible."""
    draw, ages = random.Random(staleness), set()
    made = PromptGroups(samples_per_prompt=2, prompts_per_step=2, max_staleness=staleness, steps=60)
    version, running, added = 0, [], 0
    while version < 60:
        added += made.wanted(version)
        made.add([prompt()] * made.wanted(version))
        running += [(group.uid, number, version) for group in made.ship(version) for number in range(2)]
        draw.shuffle(running)
        for uid, number, sampled in [running.pop() for _ in range(min(len(running), 3))]:
            made.generated(completion(uid, number, sampled))
            made.scored(score(uid, number))
        if taken := made.take(2):
            ages |= {version - v for group in taken for c in group.trajectories.values() for v in c.versions()}
            version += 1
    assert max(ages) == staleness
    assert (added, running) == (120, [])  # every generated group was used by a step
