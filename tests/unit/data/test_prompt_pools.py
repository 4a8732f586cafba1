"""Tests of the sampling of prompts from pools by difficulty."""

import json
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.base.errors import ConfigError
from rltrain.data.prompt_pools import POOLS, PromptPools, most_in_flight
from rltrain.settings.sampling_config import DIFFICULTY_DEFAULTS, DifficultyConfig

DEFAULT = DifficultyConfig(**DIFFICULTY_DEFAULTS)


def pools_of(successes, *, seed=0, difficulty=DEFAULT):
    """Return pools of prompts with the given numbers of correct answers out of four, where None is an unseen prompt."""
    made = PromptPools(len(successes), seed, difficulty)
    state = made.state_dict()
    indices = made.next(len(successes))
    made.give_back({n: (0, 0) if successes[i] is None else (successes[i], 4) for n, i in enumerate(indices)})
    moved = made.state_dict()
    made.load_state_dict(moved | {name: state[name] for name in ("drawn", "drawn_in_step", "fallbacks")})
    return made


def sizes(pools):
    metrics, size = pools.metrics(), pools.state_dict()["size"]
    return {name: round(metrics[f"difficulty/{name}_fraction"] * size) for name in POOLS}


def passed_through_json(pools, *, size, seed=0, difficulty=DEFAULT):
    again = PromptPools(size, seed, difficulty)
    again.load_state_dict(json.loads(json.dumps(pools.state_dict())))
    return again


# Worked examples


def test_the_golden_points_choose_the_pools():
    """The pools have the intervals normal [0, 0.5), unseen [0.5, 0.8), hard [0.8, 0.9) and easy [0.9, 1).

    With u(0) = 0, the first points u(n) are 0, 0.618, 0.236, 0.854, 0.472, 0.090, 0.708, 0.326, 0.944, 0.562.
    """
    pools = pools_of([None] * 8 + [0] * 8 + [2] * 8 + [4] * 8)
    pools._first = 0
    names = [("unseen", "hard", "normal", "easy")[index // 8] for index in pools.next(10)]
    assert names == [
        "normal", "unseen", "normal", "hard", "normal", "normal", "unseen", "normal", "easy", "unseen",
    ]  # fmt: skip
    assert pools.metrics()["difficulty/fallback_fraction"] == 0.0


@pytest.mark.parametrize(
    ("correct", "judged", "name"),
    [
        (0, 0, "unseen"), (0, 4, "hard"), (1, 5, "hard"), (2, 8, "normal"), (3, 4, "normal"), (4, 5, "easy"),
        (9, 10, "easy"), (8, 8, "easy"),
    ],
)  # fmt: skip
def test_the_thresholds_belong_to_the_outer_pools(correct, judged, name):
    difficulty = DifficultyConfig(**DIFFICULTY_DEFAULTS | {"easy_threshold": 0.8, "hard_threshold": 0.2})
    pools = PromptPools(1, 0, difficulty)
    pools.next(1)
    pools.give_back({0: (correct, judged)})
    assert sizes(pools) == dict.fromkeys(POOLS, 0) | {name: 1}


@pytest.mark.parametrize(
    ("successes", "order", "fallbacks"),
    [
        ([2] * 20, "normal", 0.5),  # half of the points are in the interval of the normal pool
        ([None] * 20, "unseen", 0.7),
        ([2] * 5 + [None] * 20, "normal unseen", None),
        ([4] * 5 + [None] * 5 + [0] * 5, "unseen hard easy", None),
    ],
)
def test_an_empty_pool_is_replaced_by_normal_prompts_or_else_by_unseen_ones(successes, order, fallbacks):
    pools = pools_of(successes)
    names = {None: "unseen", 0: "hard", 2: "normal", 4: "easy"}
    drawn = [names[successes[index]] for index in pools.next(len(successes))]
    assert set(drawn) == set(order.split())
    if fallbacks is not None:
        assert pools.metrics()["difficulty/fallback_fraction"] == pytest.approx(fallbacks, abs=0.1)
    pools.give_back(dict.fromkeys(range(len(successes)), (0, 0)))
    assert pools.metrics()["difficulty/fallback_fraction"] == 0.0


def test_a_worked_example_of_empty_pools():
    """Two prompts are normal, eight prompts are unseen, and eight prompts are hard.

    The first ten draws choose the pools normal, unseen, normal, hard, normal, normal, unseen, normal, easy and unseen.
    Counted from 0, the draws 4, 5 and 7 find no normal prompt, and draw 8 finds no easy prompt.
    """
    pools = pools_of([2] * 2 + [None] * 8 + [0] * 8)
    pools._first = 0
    names = [
        ("normal", "unseen", "unseen", "unseen", "unseen", "hard")[min(index, 10) // 2] for index in pools.next(10)
    ]
    assert names == [
        "normal", "unseen", "normal", "hard", "unseen", "unseen", "unseen", "unseen", "unseen", "unseen",
    ]  # fmt: skip
    assert pools.metrics()["difficulty/fallback_fraction"] == 0.4


def test_normal_prompts_come_before_unseen_ones_where_a_pool_is_empty():
    """There are no hard and no easy prompts, so draw 3 (hard) and draw 8 (easy) take normal prompts."""
    pools = pools_of([2] * 10 + [None] * 10)
    pools._first = 0
    assert ["nu"[index // 10] for index in pools.next(10)] == list("nunnnnunnu")


def test_without_normal_and_unseen_prompts_hard_and_easy_ones_are_taken_as_often_as_they_occur():
    pools, counts = pools_of([0] * 30 + [4] * 10), Counter()
    for position in range(1000):
        (index,) = pools.next(1)
        counts["hard" if index < 30 else "easy"] += 1
        pools.give_back({position: (0, 4) if index < 30 else (4, 4)})
    # Each of the two pools gets a tenth of the draws. The other 80% of the draws are random, and three quarters of
    # these draws are hard.
    assert counts["hard"] == pytest.approx(100 + 800 * 0.75, abs=40)


def test_a_prompt_is_in_no_pool_until_its_step_has_ended():
    pools = pools_of([2] * 4)
    assert sorted(pools.next(4)) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="all 4 prompts are in flight"):
        pools.next(1)
    first = pools.at(0)
    pools.give_back({0: (2, 4)})
    assert pools.next(1) == [first]


def test_a_prompt_without_a_judged_answer_keeps_its_earlier_success():
    pools = pools_of([3, None])
    pools.next(2)
    pools.give_back({0: (0, 0), 1: (0, 0)})
    assert sizes(pools) == {"normal": 1, "unseen": 1, "hard": 0, "easy": 0}


def test_the_most_recent_group_counts():
    pools = PromptPools(1, 0, DEFAULT)
    found = []
    for position, correct in enumerate([0, 2, 4, 0]):
        pools.next(1)
        pools.give_back({position: (correct, 4)})
        found.append(next(name for name, size in sizes(pools).items() if size))
    assert found == ["hard", "normal", "easy", "hard"]


# Properties

OUTCOMES = ((2, 4), (0, 0), (0, 4), (4, 4))  # Outcomes that keep a prompt in its pool, in the order of `POOLS`.


def run(size, seed, steps, *, shuffled=None, pools=None, per_step=4, success=lambda index: index % 5, step=0):
    """Simulate training steps without staleness, and return the prompt indices of each step.

    Args:
        success: function from the prompt index to the number of correct answers out of four.
        shuffled: random generator that permutes the outcomes of a step, as if answers arrived in another order.
    """
    pools, found = pools or PromptPools(size, seed, DEFAULT), []
    for number in range(step, step + steps):
        indices = pools.next(per_step)
        outcomes = [(number * per_step + n, (success(index), 4)) for n, index in enumerate(indices)]
        if shuffled is not None:
            shuffled.shuffle(outcomes)
        pools.give_back(dict(outcomes))
        found.append(indices)
    return found


@settings(max_examples=40, deadline=None)
@given(size=st.integers(4, 40), seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_draws_depend_on_the_seed_and_not_on_the_order_in_which_answers_arrive(size, seed, order):
    expected = run(size, seed, 60)
    assert run(size, seed, 60, shuffled=order) == expected
    assert all(len(set(indices)) == len(indices) for indices in expected)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(4, 40), seed=st.integers(0, 2**32), cut=st.integers(0, 59), within=st.integers(0, 4))
def test_restored_pools_continue_exactly_also_within_a_step(size, seed, cut, within):
    whole = run(size, seed, 60)
    pools = PromptPools(size, seed, DEFAULT)
    run(size, seed, cut, pools=pools)
    begun = pools.next(within)
    again = passed_through_json(pools, size=size, seed=seed)
    assert again.metrics() == pools.metrics()
    assert [again.at(cut * 4 + n) for n in range(within)] == begun
    begun += again.next(4 - within)
    assert begun == whole[cut]
    again.give_back({cut * 4 + n: (index % 5, 4) for n, index in enumerate(begun)})
    assert run(size, seed, 59 - cut, pools=again, step=cut + 1) == whole[cut + 1 :]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(4, 60), seed=st.integers(0, 2**32), successes=st.lists(st.integers(0, 4), min_size=60))
def test_no_prompt_starves(size, seed, successes):
    """In a pool with n prompts, a prompt waits for at most two passes, which are 2 n draws from the pool.

    A pool with fraction f gets at least one of any ceil(2 / f) draws, and the smallest fraction is 0.1.
    """
    drawn = [index for step in run(size, seed, 25 * size, success=successes.__getitem__) for index in step]
    last = dict.fromkeys(range(size), -1)
    for position, index in enumerate(drawn):
        assert position - last[index] <= 2 * size * 20 + 20
        last[index] = position
    assert len(set(drawn)) == size


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), fractions=st.tuples(*[st.floats(0.02, 0.32)] * 3))
def test_the_shares_of_the_pools_are_the_fractions_and_a_pass_uses_each_prompt_once(seed, fractions):
    names = [f"{name}_fraction" for name in ("easy", "hard", "unseen")]
    difficulty = DifficultyConfig(**DIFFICULTY_DEFAULTS | dict(zip(names, fractions, strict=True)))
    pools = pools_of([2] * 30 + [None] * 30 + [0] * 30 + [4] * 30, seed=seed, difficulty=difficulty)
    of_pool = {name: [] for name in POOLS}
    for position in range(1000):
        (index,) = pools.next(1)
        of_pool[POOLS[index // 30]].append(index)
        pools.give_back({position: OUTCOMES[index // 30]})
    for name, indices in of_pool.items():
        assert abs(len(indices) - 1000 * getattr(difficulty, f"{name}_fraction")) <= 4
        passes = [indices[start : start + 30] for start in range(0, len(indices) - 29, 30)]
        assert all(len(set(one)) == 30 for one in passes)
        assert len({tuple(one) for one in passes}) == len(passes)  # each pass is another permutation


def test_middle_prompts_are_sampled_more_often_than_others_by_the_ratio_of_fractions_and_sizes():
    """Of 100 prompts, 30 are normal, 50 are hard and 20 are easy.

    No prompt is unseen, so the draws for the unseen pool take normal prompts.
    """
    success = lambda index: 2 if index < 30 else 0 if index < 80 else 4  # noqa: E731
    steps = run(100, 1, 3000, success=success)
    counts = Counter(index for indices in steps[1000:] for index in indices)
    draws = 2000 * 4
    for number, (first, size, fraction) in enumerate([(0, 30, 0.8), (30, 50, 0.1), (80, 20, 0.1)]):
        each = [counts[index] for index in range(first, first + size)]
        assert sum(each) == pytest.approx(draws * fraction, abs=5), number
        # A prompt in flight at the beginning of a pass misses the pass, which happens to each prompt equally often.
        assert each == pytest.approx([draws * fraction / size] * size, rel=0.05, abs=2)


# State


def test_other_prompts_or_another_seed_are_refused():
    state = PromptPools(10, 5, DEFAULT).state_dict()
    with pytest.raises(ConfigError, match="size=11: the checkpoint's prompts were sampled with size=10"):
        PromptPools(11, 5, DEFAULT).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed=6: the checkpoint's prompts were sampled with seed=5"):
        PromptPools(10, 6, DEFAULT).load_state_dict(state)


def used():
    pools = PromptPools(10, 5, DEFAULT)
    run(10, 5, 6, pools=pools)
    pools.next(3)
    return pools


@pytest.mark.parametrize(
    "damage",
    [
        {"in_flight": []},
        {"in_flight": [[24, 0], [25, 0], [26, 0]]},
        {"in_flight": [["24", 0]]},
        {"drawn": -1},
        {"drawn": 2},
        {"drawn": 1.5},
        {"correct": "////"},
        {"judged": "AAAAAAAAAAAAAAAAAAAAAAAAAAA="},
        {"correct": "not base64!"},
        {"pools": {name: {"passes": 0, "left": "", "returned": ""} for name in POOLS}},
    ],
)
def test_a_damaged_state_is_refused(damage):
    with pytest.raises(ValueError):
        PromptPools(10, 5, DEFAULT).load_state_dict(used().state_dict() | damage)
    PromptPools(10, 5, DEFAULT).load_state_dict(used().state_dict())


def test_200_000_prompts_take_eight_bytes_each_and_no_time_that_a_step_would_notice():
    size = 200_000
    pools = PromptPools(size, 0, DEFAULT)
    dice = random.Random(0)
    run(size, 0, 50, per_step=1024, pools=pools, success=lambda _: dice.randint(0, 4))
    began = time.process_time()
    run(size, 0, 20, per_step=1024, pools=pools, success=lambda _: dice.randint(0, 4), step=50)
    assert (time.process_time() - began) / 20 < 0.1  # seconds for 1,024 prompts of a step; usually 5 ms
    began = time.process_time()
    text = json.dumps(pools.state_dict())
    assert time.process_time() - began < 1.0  # usually 5 ms
    assert len(text) <= 8 * size * 4 / 3 + 1_000  # base64 stores three bytes in four characters
    began = time.process_time()
    PromptPools(size, 0, DEFAULT).load_state_dict(json.loads(text))
    assert time.process_time() - began < 5.0  # usually 0.3 s


@pytest.mark.parametrize(("ahead", "sampling", "expected"), [(0, 0, 4), (0, 1, 4), (2, 0, 12), (0, 3, 12), (2, 3, 20)])
def test_the_prompts_of_all_groups_in_flight_are_counted(ahead, sampling, expected):
    assert most_in_flight(4, ahead, sampling) == expected
