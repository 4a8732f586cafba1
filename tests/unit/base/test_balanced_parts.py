import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.base.balanced_parts import least_largest_sum, partition, refined

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=7)
OF_A_PLAN = 1.05  # Allowed ratio of a plan's largest load to a lower bound on the largest load of any plan.


def largest(weights, parts):
    return max(sum(weights[index] for index in part) for part in parts)


def best(weights, parts):
    """Return the smallest possible largest sum of a part, by trying every assignment of the numbers to parts."""
    ways = itertools.product(range(parts), repeat=len(weights))
    return min(max(sum(w for w, p in zip(weights, way, strict=True) if p == k) for k in range(parts)) for way in ways)


def test_exchanges_find_what_greedy_placing_misses():
    """Greedy placement from the heaviest to the lightest number gives the parts 8 + 5 + 4 and 7 + 6, but the parts 8 +
    7 and 6 + 5 + 4 have equal sums.
    """
    weights = [8, 7, 6, 5, 4]
    assert largest(weights, partition(weights, 2)) == 15
    # Greedy placement gives a largest load of 7.
    assert largest([3, 3, 2, 2, 2], partition([3, 3, 2, 2, 2], 2)) == 6


@given(weights=WEIGHTS, parts=st.integers(1, 3))
@settings(deadline=None, max_examples=150)
def test_no_partition_is_below_the_bound_or_far_above_the_best(weights, parts):
    found, optimum = largest(weights, partition(weights, parts)), best(weights, parts)
    assert least_largest_sum(weights, parts) <= optimum <= found
    # Greedy placement has a largest sum of at most 4/3 of the optimum, and exchanges only lower that sum.
    assert 3 * found <= 4 * optimum


@given(weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=60), parts=st.integers(1, 12))
@settings(deadline=None)
def test_every_index_is_in_one_part_and_none_is_empty_without_need(weights, parts):
    found = partition(weights, parts)
    assert sorted(index for part in found for index in part) == list(range(len(weights)))
    assert len(found) == parts
    assert sum(not part for part in found) == max(parts - len(weights), 0)


@pytest.mark.parametrize(
    ("weights", "parts", "bound"),
    [([5, 1, 1], 3, 5), ([4, 4, 4], 2, 8), ([3, 3, 2], 3, 3), ([3, 3, 3, 3, 3], 2, 9), ([], 2, 0), ([1, 1, 1], 2, 2)],
)
def test_the_bound_knows_the_mean_the_heaviest_and_what_must_share(weights, parts, bound):
    assert least_largest_sum(weights, parts) == bound


@given(data=st.data(), parts=st.integers(1, 4), room=st.integers(10, 25))
@settings(deadline=None)
def test_no_part_holds_more_than_it_has_room_for_whatever_the_weights_ask(data, parts, room):
    sizes = data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=14))
    weights = data.draw(st.lists(st.integers(1, 99), min_size=len(sizes), max_size=len(sizes)))
    found = partition(weights, parts, sizes=sizes, room=room)
    if found is None:
        assert sum(sizes) > parts * (room - max(sizes))  # The result may be None only if all parts are nearly full.
    else:
        assert all(sum(sizes[index] for index in part) <= room for part in found)
        assert sorted(index for part in found for index in part) == list(range(len(sizes)))


def test_exchanges_start_from_any_parts_and_leave_those_that_they_were_given():
    start = [[0, 1, 2, 3], []]
    found = refined([1, 2, 3, 4], start, sizes=[0] * 4, room=0)
    assert start == [[0, 1, 2, 3], []]
    assert largest([1, 2, 3, 4], found) == 5


def works(source, rows, square):
    """Return the estimated work of random rows of 32 to 512 tokens, log-uniform in length.

    In a row of 512 tokens, attention costs `square` times as much as all other operations together.
    """
    lengths = [int(32 * 16 ** source.random()) for _ in range(rows)]
    return [1000 * length + int(square * 1000 / 512 * length**2) for length in lengths]


@pytest.mark.parametrize(("rows", "bound"), [((8, 32), OF_A_PLAN), ((4, 8), OF_A_PLAN), ((1, 4), 4 / 3)])
def test_of_random_plans_the_largest_load_is_near_what_no_plan_can_be_below(rows, bound):
    """With at least 8 rows per rank, the lower bound on the largest load is max(mean load, heaviest row).

    With fewer than 8 rows per rank, the bound also accounts for rows that must share a rank.
    """
    source = random.Random(0)
    for _ in range(300):
        ranks = source.choice((2, 3, 4, 8, 16))
        weights = works(source, max(1, int(ranks * source.uniform(*rows))), source.choice((0, 0.1, 1)))
        found = largest(weights, partition(weights, ranks))
        assert found <= bound * least_largest_sum(weights, ranks)
        if rows[0] >= 8:
            assert found <= bound * max(sum(weights) / ranks, *weights)


def test_of_few_rows_the_largest_load_is_near_the_best_of_all_partitions():
    source, above = random.Random(1), 0
    for _ in range(60):
        ranks = source.choice((2, 3))
        weights = works(source, source.randint(ranks, 7), 0.1)
        found, optimum = largest(weights, partition(weights, ranks)), best(weights, ranks)
        assert found <= 1.1 * optimum
        above += found > OF_A_PLAN * optimum
    assert above <= 1
