import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain import batching
from rltrain.batching import balance, microbatches, minibatches, plan_minibatch

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=30)


# Which rows share a mini-batch


def test_rows_of_a_group_share_a_minibatch_wherever_they_lie_in_the_batch():
    plan = minibatches([7, 9, 7, 9, 8, 8], 2, 1, seed=0, step=0)
    groups = {0: {0, 2}, 1: {1, 3}, 2: {4, 5}}
    assert sorted(len(rows) for rows in plan) == [2, 4]
    assert all(sum(members <= set(rows) for rows in plan) == 1 for members in groups.values())


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
        assert max(sizes) - min(sizes) <= 1  # some are empty where there are fewer groups than mini-batches
        assert sum(map(len, groups)) == len(set(uids))  # no group is in two of them


def test_A7_minibatches_are_decided_before_ranks_and_budget_are_known():
    assert not {"ranks", "max_tokens", "lengths"} & set(inspect.signature(minibatches).parameters)
    assert "minibatches(" not in inspect.getsource(plan_minibatch)
    uids, lengths = [0, 0, 1, 1, 2, 2, 3, 3], [5, 1, 4, 2, 3, 3, 6, 1]
    plan = minibatches(uids, 2, 1, seed=1, step=1)
    for ranks in (1, 2, 3):
        for budget in (6, 9, 100):
            parts = [plan_minibatch(lengths, rows, ranks, budget) for rows in plan]
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


# Which rank and which micro-batch


def test_the_longest_rows_go_to_the_emptiest_ranks():
    assert balance([9, 5, 4, 1], [0, 1, 2, 3], 2) == [[0, 3], [1, 2]]
    assert balance([1, 1], [0, 1], 3) == [[0], [1], []]
    assert balance([0, 0, 0], [0, 1, 2], 3) == [[0], [1], [2]]


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_no_rank_is_more_than_one_row_above_another(lengths, ranks):
    shares = balance(lengths, list(range(len(lengths))), ranks)
    assert sorted(row for rows in shares for row in rows) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in rows) for rows in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_microbatches_fill_the_first_with_room_longest_first():
    assert microbatches([6, 5, 4, 3, 2], [0, 1, 2, 3, 4], 10) == [[0, 2], [1, 3, 4]]
    assert microbatches([], [], 10) == []


def test_a_row_above_the_budget_is_refused():
    with pytest.raises(ValueError, match="row 1 has 11 tokens, above the budget of 10; raise the budget"):
        microbatches([10, 11], [0, 1], 10)
    assert microbatches([10, 11], [0], 10) == [[0]]


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(12, 40), data=st.data())
@settings(deadline=None)
def test_A6_every_row_is_once_in_a_microbatch_within_budget_and_ranks_run_equally_many(lengths, ranks, budget, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    plan = plan_minibatch(lengths, rows, ranks, budget)
    assert len(plan) == ranks
    assert sorted(row for rank in plan for part in rank for row in part) == sorted(rows)
    assert all(sum(lengths[row] for row in part) <= budget for rank in plan for part in rank)
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1  # also without rows: every rank joins the collectives


@given(lengths=LENGTHS, budget=st.integers(12, 40))
def test_at_most_one_microbatch_is_less_than_half_full(lengths, budget):
    cuts = microbatches(lengths, list(range(len(lengths))), budget)
    assert sum(2 * sum(lengths[row] for row in cut) < budget for cut in cuts) <= 1


def test_the_module_is_pure():
    assert not {"torch", "ray", "numpy"} & set(vars(batching))
