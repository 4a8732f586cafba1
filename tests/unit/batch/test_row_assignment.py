import inspect
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch import row_assignment
from rltrain.batch.row_assignment import assign_minibatch, balance, microbatches, minibatches, rows_of_same_groups
from rltrain.batch.row_costs import RowWork

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=30)


# Tests of the assignment of rows to mini-batches


def test_rows_of_a_group_share_a_minibatch_wherever_they_lie_in_the_batch():
    plan = minibatches([7, 9, 7, 9, 8, 8], 2, 1, seed=0, step=0)
    groups = {0: {0, 2}, 1: {1, 3}, 2: {4, 5}}
    assert sorted(len(rows) for rows in plan) == [2, 4]
    assert all(sum(members <= set(rows) for rows in plan) == 1 for members in groups.values())


def test_the_rows_of_another_batch_go_to_the_mini_batches_of_their_groups():
    uids, chosen = [7, 9, 7, 9, 8, 8], [[0, 2, 4, 5], [1, 3], [], [4, 5, 0, 2]]
    assert rows_of_same_groups(uids, chosen, [9, 8, 6, 7, 8]) == [[1, 3, 4], [0], [], [1, 3, 4]]
    assert rows_of_same_groups(uids, chosen, []) == [[], [], [], []]


@given(
    uids=st.lists(st.integers(0, 8), min_size=1, max_size=40), count=st.integers(1, 5), epochs=st.integers(1, 3),
    seed=st.integers(0, 99), step=st.integers(0, 99),
)  # fmt: skip
@settings(deadline=None)
def test_A7_minibatches_hold_whole_groups_and_each_epoch_every_row_once(uids, count, epochs, seed, step):
    plan = minibatches(uids, count, epochs, seed=seed, step=step)
    assert len(plan) == epochs * count
    for epoch in range(epochs):
        part = plan[epoch * count : (epoch + 1) * count]
        assert sorted(row for rows in part for row in rows) == list(range(len(uids)))
        groups = [{uids[row] for row in rows} for rows in part]
        sizes = [len(found) for found in groups]
        # Some mini-batches are empty if there are fewer prompt groups than mini-batches.
        assert max(sizes) - min(sizes) <= 1
        assert sum(map(len, groups)) == len(set(uids))  # No prompt group is split over two mini-batches.


def test_A7_minibatches_are_decided_before_ranks_and_budget_are_known():
    assert not {"ranks", "max_tokens", "lengths"} & set(inspect.signature(minibatches).parameters)
    assert "minibatches(" not in inspect.getsource(assign_minibatch)
    uids, lengths = [0, 0, 1, 1, 2, 2, 3, 3], [5, 1, 4, 2, 3, 3, 6, 1]
    plan = minibatches(uids, 2, 1, seed=1, step=1)
    for ranks in (1, 2, 3):
        for budget in (6, 9, 100):
            parts = [assign_minibatch(lengths, rows, ranks, budget) for rows in plan]
            shared = [sorted(row for rank in part for rows in rank for row in rows) for part in parts]
            assert shared == [sorted(rows) for rows in plan]


def test_A5_the_order_of_the_groups_depends_on_uids_only_not_on_the_order_of_rows():
    uids = [0, 0, 1, 1, 2, 2, 3, 3]
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    straight = minibatches(uids, 4, 2, seed=3, step=4)
    shuffled = minibatches([uids[row] for row in order], 4, 2, seed=3, step=4)
    assert [uids[rows[0]] for rows in straight] == [uids[order[rows[0]]] for rows in shuffled]


def test_the_shuffle_is_keyed_by_seed_step_and_epoch():
    uids = list(range(20))
    plan = minibatches(uids, 20, 2, seed=0, step=0)
    assert plan == minibatches(uids, 20, 2, seed=0, step=0)
    assert plan[:20] != plan[20:]
    assert plan != minibatches(uids, 20, 2, seed=1, step=0)
    assert plan != minibatches(uids, 20, 2, seed=0, step=1)
    assert plan[:20] != [[uid] for uid in uids]


@pytest.mark.parametrize(
    ("groups", "count", "sizes"),
    [
        (6, 3, [2, 2, 2]),
        (6, 1, [6]),
        (5, 3, [1, 2, 2]),
        (7, 4, [1, 2, 2, 2]),
        (2, 3, [0, 1, 1]),
        (1, 4, [0, 0, 0, 1]),
    ],
)
def test_a_step_with_fewer_groups_has_as_many_minibatches_as_ever_and_shares_the_groups_out_evenly(
    groups, count, sizes
):
    plan = minibatches([uid for uid in range(groups) for _ in range(2)], count, 2, seed=0, step=0)
    assert [len(rows) for rows in plan] == [2 * size for size in sizes * 2]


def test_a_full_step_is_cut_into_consecutive_runs_of_the_shuffled_groups():
    one = minibatches(list(range(12)), 1, 1, seed=4, step=7)[0]
    assert minibatches(list(range(12)), 3, 1, seed=4, step=7) == [one[:4], one[4:8], one[8:]]


# Tests of the assignment of rows to ranks and micro-batches


def test_the_longest_rows_go_to_the_emptiest_ranks():
    assert balance([9, 5, 4, 1], [0, 1, 2, 3], 2) == [[0, 3], [1, 2]]
    assert balance([1, 1], [0, 1], 3) == [[0], [1], []]
    assert balance([0, 0, 0], [0, 1, 2], 3) == [[0], [1], [2]]


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_no_rank_is_more_than_one_row_above_another(lengths, ranks):
    shares = balance(lengths, list(range(len(lengths))), ranks)
    assert sorted(row for rows in shares for row in rows) == list(range(len(lengths)))
    work = [max(length, 1) for length in lengths]  # a row without tokens counts as one token
    loads = [sum(work[row] for row in rows) for rows in shares]
    assert max(loads) - min(loads) <= max(work)


def test_microbatches_fill_the_first_with_room_longest_first():
    assert microbatches([6, 5, 4, 3, 2], [0, 1, 2, 3, 4], 10) == [[0, 2], [1, 3, 4]]
    assert microbatches([], [], 10) == []


def test_a_row_above_the_budget_is_refused():
    with pytest.raises(ValueError, match="row 1 has 11 tokens, above the token limit of 10; raise the token limit"):
        microbatches([10, 11], [0, 1], 10)
    assert microbatches([10, 11], [0], 10) == [[0]]


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(12, 40), data=st.data())
@settings(deadline=None)
def test_A6_every_row_is_once_in_a_microbatch_within_budget_and_ranks_run_equally_many(lengths, ranks, budget, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    plan = assign_minibatch(lengths, rows, ranks, budget)
    assert len(plan) == ranks
    assert sorted(row for rank in plan for part in rank for row in part) == sorted(rows)
    assert all(sum(lengths[row] for row in part) <= budget for rank in plan for part in rank)
    assert len({len(rank) for rank in plan}) == 1
    assert (
        len(plan[0]) >= 1
    )  # Even a rank without rows has a micro-batch, because every rank takes part in the collectives.


@given(lengths=st.lists(st.integers(1, 12), max_size=8), budget=st.integers(12, 30))
@settings(deadline=None, max_examples=60)
def test_there_are_as_few_micro_batches_as_first_fit_promises_against_the_best_of_all_ways(lengths, budget):
    def fewest(left, bins):
        if not left:
            return len(bins)
        placed = [[*bins[:k], b + left[0], *bins[k + 1 :]] for k, b in enumerate(bins) if b + left[0] <= budget]
        return min(fewest(left[1:], tried) for tried in [*placed, [*bins, left[0]]])

    found = len(microbatches(lengths, list(range(len(lengths))), budget))
    assert found <= (11 * fewest(lengths, []) + 6) / 9


@given(lengths=LENGTHS, ranks=st.integers(1, 4), budget=st.integers(12, 40), data=st.data())
@settings(deadline=None)
def test_a_rank_has_an_empty_micro_batch_only_where_it_has_too_few_rows(lengths, ranks, budget, data):
    work = data.draw(st.lists(st.integers(0, 99), min_size=len(lengths), max_size=len(lengths)))
    for rank in assign_minibatch(lengths, list(range(len(lengths))), ranks, budget, work=work):
        rows = sum(map(len, rank))
        assert sum(not part for part in rank) == max(0, len(rank) - rows)
        costs = [sum(work[row] for row in part) for part in rank]
        # The heaviest micro-batch comes first, so that all ranks run their heaviest micro-batches at the same time.
        assert costs == sorted(costs, reverse=True)


def test_a_rank_with_room_splits_its_micro_batch_rather_than_add_an_empty_one():
    """Rank 0 splits its rows into two micro-batches, because rank 1 needs two micro-batches.

    A micro-batch of at most 8 tokens could hold all 8 tokens of rank 0, but not the 12 tokens of rank 1.
    """
    lengths, work = [4, 2, 2, 6, 6], [9, 1, 1, 6, 6]
    plan = assign_minibatch(lengths, [0, 1, 2, 3, 4], 2, 8, work=work)
    assert plan == [[[0], [1, 2]], [[3], [4]]]


def test_micro_batches_of_a_rank_have_nearly_equal_work():
    # First-fit packing would give loads of 20 and 2.
    assert microbatches([10, 10, 1, 1], [0, 1, 2, 3], 20) == [[0, 2], [1, 3]]
    assert microbatches([5, 5, 5, 5], [0, 1, 2, 3], 10, work=[9, 8, 2, 1]) == [[0, 3], [1, 2]]
    assert microbatches([4, 4, 4], [0, 1, 2], 12, count=2) == [[0, 2], [1]]
    assert microbatches([4, 4], [0, 1], 12, count=5) == [[0], [1]]


def test_a_budget_that_only_first_fit_can_keep_is_kept():
    """Rows of 6, 5, 4, 3 and 2 tokens fit into two micro-batches of 10 tokens only as 6 + 4 and 5 + 3 + 2.

    The split must keep the token budget, even if the work of the two micro-batches is then uneven.
    """
    lengths = [6, 5, 4, 3, 2]
    found = microbatches(lengths, [0, 1, 2, 3, 4], 10, work=[1, 1, 9, 9, 9])
    assert [sum(lengths[row] for row in part) for part in found] == [10, 10]


def test_over_random_plans_no_budget_is_exceeded_and_ranks_have_equal_loads_and_wait_little():
    """The assignments have at least 8 rows per rank, and the row lengths are log-uniform between 32 and 512 tokens.

    In a row of 512 tokens, attention is up to half of the work.
    """
    source = random.Random(0)
    for _ in range(100):
        ranks, budget = source.choice((1, 2, 3, 4, 8, 16)), source.choice((512, 1024, 2048, 8192))
        lengths = [int(32 * 16 ** source.random()) for _ in range(int(ranks * source.uniform(8, 32)))]
        model = RowWork(token=1000, output=400, attention=((None, source.choice((0, 1, 4))),))
        work = [model.of(length, length // 2) for length in lengths]
        plan = assign_minibatch(lengths, list(range(len(lengths))), ranks, budget, work=work)
        assert max(sum(lengths[row] for row in part) for rank in plan for part in rank) <= budget
        loads = [sum(work[row] for part in rank for row in part) for rank in plan]
        assert max(loads) <= 1.05 * max(sum(work) / ranks, *work)


@given(lengths=LENGTHS, budget=st.integers(12, 40))
def test_micro_batches_are_at_least_half_full_on_average_but_for_one(lengths, budget):
    cuts = microbatches(lengths, list(range(len(lengths))), budget)
    assert 2 * sum(lengths) >= (len(cuts) - 1) * budget


def test_the_module_is_pure():
    assert not {"torch", "ray", "numpy"} & set(vars(row_assignment))
