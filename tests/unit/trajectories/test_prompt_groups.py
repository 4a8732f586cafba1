import pytest

from rltrain.base.random_streams import stream_seed
from rltrain.data.prompts import Prompt
from rltrain.trajectories.prompt_groups import GroupState, PromptGroups, requests_of
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion


def prompt(number: int = 0) -> Prompt:
    return Prompt(number, f"prompt {number}", [1, number], {"answer": str(number)})


def completion(uid: int, number: int, version: int = 0, text: str = "text") -> Completion:
    return Completion((uid, number), [3], [-0.5], "stop", [version], text)


def score(uid: int, number: int, value: float = 1.0) -> SampleScores:
    return SampleScores((uid, number), (value,))


def groups(*, samples: int = 2, per_step: int = 1, staleness: int = 0, prompts: int = 1, ship: bool = True):
    made = PromptGroups(samples_per_prompt=samples, prompts_per_step=per_step, max_staleness=staleness, steps=99)
    made.add([prompt(n) for n in range(prompts)])
    if ship:
        made.ship(0)
    return made


def finish(made: PromptGroups, uid: int, version: int = 0) -> None:
    for number in range(made.samples_per_prompt):
        made.generated(completion(uid, number, version))
        made.scored(score(uid, number))


# Tests of the life cycle of one group


def test_a_group_passes_from_pending_over_generating_and_scoring_to_ready():
    made = groups(ship=False)
    group = made.groups[0]
    assert (group.state, made.take(1)) == (GroupState.PENDING, [])
    assert made.ship(4) == [group]
    assert (group.state, group.shipped, made.ship(5)) == (GroupState.GENERATING, 4, [])
    request = made.generated(completion(0, 1, 4))
    assert (request.key, request.prompt, request.response) == ((0, 1), "prompt 0", "text")
    assert request.columns == {
        "answer": "0",
        "finish_reason": "stop",
        "prompt_messages": None,
        "response_ids": request.columns["response_ids"],
    }
    made.scored(score(0, 1))
    assert group.state is GroupState.GENERATING
    made.generated(completion(0, 0, 4))
    assert (group.state, made.take(1)) == (GroupState.SCORING, [])
    made.scored(score(0, 0))
    assert group.state is GroupState.READY
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
            assert group.trajectories[number].text == f"answer {(group.uid, number)}"
            assert group.results[number].scores == (10 * group.uid + number,)


def test_second_copies_and_answers_of_gone_groups_are_ignored():
    made = groups()
    assert made.generated(completion(0, 0, text="first")) is not None
    assert made.generated(completion(0, 0, text="second")) is None
    made.scored(score(0, 0, 1.0))
    made.scored(score(0, 0, 2.0))
    made.scored(score(0, 1))  # a score whose sample has not arrived yet is ignored
    assert made.groups[0].trajectories[0].text == "first"
    assert {n: r.scores for n, r in made.groups[0].results.items()} == {0: (1.0,)}
    made.drop(0, replace=True)
    assert made.generated(completion(0, 1)) is None
    made.scored(score(0, 1))
    assert made.groups == {}


def test_an_answer_before_shipping_is_ignored():
    made = groups(ship=False)
    assert made.generated(completion(0, 0)) is None
    assert made.groups[0].trajectories == {}


def test_a_reissued_group_keeps_its_answers_and_scores_and_asks_for_the_rest():
    made = groups()
    made.generated(completion(0, 0))
    made.reissue([0, 99])
    assert made.groups[0].state is GroupState.PENDING
    made.scored(score(0, 0, value=7.0))  # a late score of an answer that was lost with its engine is ignored
    assert made.generated(completion(0, 1)) is None  # an answer without an open request is ignored
    (group,) = made.ship(1)
    assert [r.key for r in requests_of(group, temperature=1.0, max_tokens=4, seed=0)] == [(0, 1)]
    assert made.generated(completion(0, 0)) is None  # a copy
    made.generated(completion(0, 1, version=1))
    made.scored(score(0, 1))
    (group,) = made.take(1)
    assert (group.shipped, [list(one.versions()) for _, one in sorted(group.trajectories.items())]) == (0, [[0], [1]])
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


def test_answered_groups_are_told_oldest_first_before_their_scores_are_there_and_stay():
    made = groups(prompts=3)
    for uid in (2, 1):
        finish(made, uid)
    assert made.answered(2) == []
    made.generated(completion(0, 0))
    made.scored(score(0, 0))
    assert made.answered(2) == []  # one of the oldest groups still lacks an answer
    made.generated(completion(0, 1))
    for _ in range(2):
        assert [group.uid for group in made.answered(2)] == [0, 1]
    assert [group.uid for group in made.answered(3)] == [0, 1, 2]
    assert made.answered(4) == []
    assert (sorted(made.groups), made.used, made.take(1)) == ([0, 1, 2], 0, [])


def test_the_oldest_groups_are_told_whatever_their_state_as_many_as_there_are():
    made = groups(prompts=3)
    finish(made, 1)
    made.generated(completion(2, 0))
    made.reissue([2])
    assert [(g.uid, g.state) for g in made.oldest(2)] == [(0, GroupState.GENERATING), (1, GroupState.READY)]
    assert [g.uid for g in made.oldest(9)] == [0, 1, 2]
    made.drop(0, replace=True)
    assert [g.uid for g in made.oldest(2)] == [1, 2]


def test_groups_may_be_numbered_from_below_zero_so_that_two_collections_share_no_number():
    once = PromptGroups(samples_per_prompt=1, prompts_per_step=3, max_staleness=0, steps=1, first_uid=-3)
    once.add([prompt(n) for n in range(3)])
    assert [(g.uid, g.prompt.index) for g in once.ship(0)] == [(-3, 0), (-2, 1), (-1, 2)]
    finish(once, -2)
    assert once.generated(completion(0, 0)) is None  # an answer from an earlier collection is ignored
    assert once.take(3) == []
    finish(once, -1)
    finish(once, -3)
    assert [g.prompt.index for g in once.take(3)] == [0, 1, 2]


def test_a_greedy_answer_is_one_more_request_at_temperature_zero_and_the_group_waits_for_it():
    made = PromptGroups(samples_per_prompt=2, prompts_per_step=1, max_staleness=0, steps=99, greedy_baseline=True)
    made.add([prompt()])
    (group,) = made.ship(0)
    assert (group.samples, group.size) == (2, 3)
    requests = requests_of(group, temperature=0.7, max_tokens=4, seed=0)
    assert [(request.key, request.temperature) for request in requests] == [((0, 0), 0.7), ((0, 1), 0.7), ((0, 2), 0.0)]
    finish(made, 0)
    assert (group.state, made.take(1)) == (GroupState.GENERATING, [])
    made.generated(completion(0, 2))
    made.scored(score(0, 2))
    assert made.take(1) == [group]


def test_without_a_baseline_every_answer_is_sampled():
    group = groups(samples=3).groups[0]
    assert (group.samples, group.size) == (3, 3)
    assert {r.temperature for r in requests_of(group, temperature=0.7, max_tokens=4, seed=0)} == {0.7}


@pytest.mark.parametrize(("staleness", "wanted"), [(0, [3, 3, 3]), (1, [6, 3, 3]), (3, [12, 3, 3])])
def test_so_many_groups_are_wanted_at_each_version(staleness, wanted):
    made = PromptGroups(samples_per_prompt=1, prompts_per_step=3, max_staleness=staleness, steps=99)
    asked = []
    for version in range(3):
        asked.append(made.wanted(version))
        made.add([prompt()] * asked[-1])
        assert made.wanted(version) == 0
        made.ship(version)
        for uid in list(made.groups):
            if made.groups[uid].state is GroupState.GENERATING:
                finish(made, uid, version)
        assert len(made.take(3)) == 3
    assert asked == wanted


@pytest.mark.parametrize(
    ("staleness", "steps", "wanted"),
    [(0, 3, [2, 2, 2, 0]), (1, 3, [4, 2, 0, 0]), (2, 3, [6, 0, 0, 0]), (5, 3, [6, 0, 0, 0]), (1, 1, [2, 0])],
)
def test_no_group_is_wanted_that_no_step_would_use(staleness, steps, wanted):
    made, asked = PromptGroups(samples_per_prompt=1, prompts_per_step=2, max_staleness=staleness, steps=steps), []
    for version in range(steps + 1):
        asked.append(made.wanted(version))
        made.add([prompt()] * asked[-1])
        for group in made.ship(version):
            finish(made, group.uid, version)
        assert len(made.take(2)) == 2 * (version < steps)
    assert asked == wanted
    assert (made.used, made.groups) == (2 * steps, {})


def test_a_group_dropped_in_the_last_step_is_replaced_and_one_without_a_replacement_is_not():
    made = PromptGroups(samples_per_prompt=1, prompts_per_step=2, max_staleness=3, steps=1)
    made.add([prompt()] * made.wanted(0))
    made.drop(0, replace=True)
    assert made.wanted(0) == 1
    made.add([prompt()])
    made.drop(1, replace=False)
    assert made.wanted(0) == 0


# Random streams


def test_E8_every_seed_group_and_sample_has_a_stream_of_its_own():
    seeds = {stream_seed(s, u, n) for s in range(5) for u in range(2500) for n in range(8)}
    assert len(seeds) == 5 * 2500 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, 2, 3) == stream_seed(1, 2, 3)
    assert len({stream_seed(*triple) for triple in [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2), (0, 0, 6)]}) == 5


def test_E8_the_bits_of_neighbouring_streams_have_nothing_in_common():
    flips = [bin(stream_seed(0, u, n) ^ stream_seed(0, u, n + 1)).count("1") for u in range(200) for n in range(8)]
    assert 30 < sum(flips) / len(flips) < 33  # the seeds of neighbouring streams differ in about half of their 63 bits


def test_E8_requests_of_a_group_differ_in_their_seed_only():
    group = groups(samples=4).groups[0]
    requests = requests_of(group, temperature=0.7, max_tokens=9, seed=11)
    assert [request.key for request in requests] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert {(*r.prompt_ids, r.temperature, r.max_tokens) for r in requests} == {(1, 0, 0.7, 9)}
    assert [request.seed for request in requests] == [stream_seed(11, 0, n) for n in range(4)]
    again = requests_of(group, temperature=0.7, max_tokens=9, seed=12)
    assert not {r.seed for r in requests} & {r.seed for r in again}
