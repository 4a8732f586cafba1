import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch.data_proto import DataProto, jagged
from workers.training.dispatch import (
    OVERHEAD_METRICS,
    Minibatch,
    UpdateResult,
    collect_rows,
    overhead_metrics,
    renumbered,
    rows_read,
    split_minibatches,
    split_rows,
    sum_updates,
)


def batch(masks) -> DataProto:
    made = DataProto.from_dict(
        {"responses": jagged([[row] * len(mask) for row, mask in enumerate(masks)], torch.int64),
         "row": torch.arange(len(masks))}
    )  # fmt: skip
    return made.with_values(
        "responses", response_mask=torch.tensor([m for mask in masks for m in mask], dtype=torch.bool)
    )


MASKS = [[1, 1, 1], [0, 0], [], [1, 0]]


def test_every_rank_gets_its_rows_and_the_counts_of_the_whole_minibatch():
    plans = split_minibatches(batch(MASKS), [4, 3, 1, 3], [[0, 1], [2, 3]], 2, 10)
    assert plans == [
        [Minibatch([[0]], 3, 1), Minibatch([[3]], 1, 1)],
        [Minibatch([[]], 3, 1), Minibatch([[]], 1, 1)],
    ]


def test_A6_rows_without_a_trained_token_are_computed_by_nobody_and_stay_in_the_mini_batch():
    plans = split_minibatches(batch(MASKS), [4, 3, 1, 3], [[0, 1, 2, 3], [1, 2]], 1, 10)
    assert plans == [[Minibatch([[0, 3]], 4, 2), Minibatch([[]], 0, 0)]]


def test_work_not_tokens_decides_which_rank_a_row_goes_to():
    lengths, work = [4, 4, 4, 4], [9, 3, 3, 3]
    full = batch([[1]] * 4)
    assert split_rows(lengths, 2, 100, work=work) == [[[0]], [[1, 2, 3]]]
    plans = split_minibatches(full, lengths, [[0, 1, 2, 3]], 2, 100, work=work)
    assert [plan[0].microbatches for plan in plans] == [[[0]], [[1, 2, 3]]]


def test_of_a_plan_it_is_said_what_stands_in_and_how_long_ranks_wait():
    """In the first micro-batch, the two ranks have 6 and 4 units of work.

    In the second micro-batch, one rank has no rows, so the rank gets row 2 as a filler.
    """
    ranks = [[Minibatch([[0], [3]], 9, 3)], [Minibatch([[1], []], 9, 3)]]
    found = overhead_metrics(ranks, [6, 4, 1, 5], [6, 4, 1, 5])
    assert found == pytest.approx({"filler_fraction": 1 / 16, "idle_fraction": 1 - 15 / (2 * 6 + 2 * 5)})
    assert set(found) == set(OVERHEAD_METRICS)
    assert overhead_metrics([[]], [], []) == {"filler_fraction": 0.0, "idle_fraction": 0.0}


def test_a_rank_reads_the_rows_of_its_micro_batches_and_the_shortest_row_if_one_is_empty():
    assert rows_read([[[4, 1], [2]], [[4, 1], []]], [5, 3, 3, 1, 2]) == [[1, 2, 4], [1, 3, 4]]
    assert rows_read([[[]]], [2, 1, 1]) == [[1]]
    assert rows_read([[[]]], []) == [[]]
    assert rows_read([[]], [2, 1]) == [[]]
    assert renumbered([[4, 1], [], [3]], [1, 3, 4]) == [[2, 0], [], [1]]


def test_ranks_without_rows_get_an_empty_microbatch():
    plans = split_minibatches(batch(MASKS), [4, 3, 1, 3], [[0]], 3, 10)
    assert [plan[0].microbatches for plan in plans] == [[[0]], [[]], [[]]]
    assert split_rows([5], 2, 5) == [[[0]], [[]]]


@given(
    masks=st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=12), ranks=st.integers(1, 3),
    budget=st.integers(6, 20), data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_A4_counts_are_those_of_the_minibatch_for_any_split(masks, ranks, budget, data):
    rows = data.draw(st.permutations(range(len(masks))))
    cut = data.draw(st.integers(0, len(rows)))
    minibatches = [part for part in (rows[:cut], rows[cut:]) if part]
    plans = split_minibatches(batch(masks), [len(mask) + 1 for mask in masks], minibatches, ranks, budget)
    for number, part in enumerate(minibatches):
        mine = [plan[number] for plan in plans]
        needed = [row for row in part if any(masks[row])]
        assert sorted(row for own in mine for rows in own.microbatches for row in rows) == sorted(needed)
        assert {own.num_tokens for own in mine} == {sum(sum(masks[row]) for row in part)}
        assert {own.num_sequences for own in mine} == {sum(any(masks[row]) for row in part)}
        assert len({len(own.microbatches) for own in mine}) == 1


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12), ranks=st.integers(1, 4), budget=st.integers(6, 20))
@settings(deadline=None, max_examples=60)
def test_rows_come_back_in_the_order_in_which_they_were_sent(lengths, ranks, budget):
    made = batch([[True] * length for length in lengths])
    plan = split_rows(lengths, ranks, budget)
    parts = [made[[row for rows in rank for row in rows]] for rank in plan]
    back = collect_rows(parts, plan)
    assert back.batch["row"].tolist() == list(range(len(lengths)))
    assert back.values("responses").tolist() == made.values("responses").tolist()


def test_updates_of_two_ranks_add_up():
    steps = [{"grad_norm": 3.0, "lr": 0.1, "skipped": 0.0}, {"grad_norm": 1.0, "lr": 0.3, "skipped": 0.0}]
    ranks = [
        UpdateResult({"clip": 2.0}, {"policy_loss": 0.5}, 8, steps),
        UpdateResult({"clip": 4.0}, {"policy_loss": 1.5}, 8, steps),
    ]
    assert sum_updates(ranks) == pytest.approx(
        {"clip": 6 / 8, "policy_loss": 2.0 / 2, "grad_norm": 2.0, "grad_norm_max": 3.0, "lr": 0.2, "skipped_updates": 0}
    )


def test_the_supervised_loss_is_a_mean_over_the_tokens_of_all_ranks_and_of_steps_that_were_not_skipped():
    nan, ranks = float("nan"), [UpdateResult(), UpdateResult()]
    steps = [(0.0, 6, (9.0, 3.0)), (1.0, 50, (nan, 1.0)), (0.0, 0, (0.0, 0.0)), (0.0, 4, (1.0, 7.0))]
    for skipped, tokens, losses in steps:
        for result, loss in zip(ranks, losses, strict=True):
            part = UpdateResult(supervised_loss=loss, supervised_tokens=tokens)
            assert part.finite is not math.isnan(loss)
            result.add(part, 1, {"grad_norm": 1.0, "lr": 0.1, "skipped": skipped})
    metrics = sum_updates(ranks)
    assert (metrics["sft_loss"], metrics["sft_tokens"]) == ((9 + 3 + 1 + 7) / (6 + 4), 10)
    nothing = UpdateResult()
    nothing.add(UpdateResult(supervised_tokens=0), 1, {"grad_norm": 1.0, "lr": 0.1, "skipped": 0.0})
    found = sum_updates([nothing])
    assert found["sft_tokens"] == 0
    assert "sft_loss" not in found


def test_a_skipped_step_is_counted_and_in_no_mean():
    nan, good = (
        float("nan"),
        UpdateResult({"clip": 2.0}, {"policy_loss": 0.5}, first={"same_policy": 4.0}, first_tokens=2),
    )
    bad = UpdateResult({"clip": nan}, {"policy_loss": nan}, first={"same_policy": nan}, first_tokens=3)
    assert good.finite
    assert not bad.finite
    result = UpdateResult()
    result.add(bad, 6, {"grad_norm": nan, "lr": 0.1, "skipped": 1.0})
    result.add(good, 8, {"grad_norm": 3.0, "lr": 0.3, "skipped": 0.0})
    assert sum_updates([result]) == pytest.approx(
        {"clip": 2 / 8, "policy_loss": 0.5, "grad_norm": 3.0, "grad_norm_max": 3.0, "lr": 0.2, "skipped_updates": 1,
         "same_policy_gap": 2.0}
    )  # fmt: skip
    nothing = UpdateResult()
    nothing.add(bad, 6, {"grad_norm": nan, "lr": 0.1, "skipped": 1.0})
    found = sum_updates([nothing])
    assert found.pop("lr") == 0.1
    assert found.pop("skipped_updates") == 1
    assert found.pop("same_policy_gap") == 0
    assert all(math.isnan(value) for value in found.values())
    assert set(found) == {"clip", "policy_loss", "grad_norm", "grad_norm_max"}


def test_what_the_first_mini_batch_says_of_engine_and_actor_is_divided_by_its_tokens_over_all_ranks():
    sums = [
        {"same_policy": 0.1, "abs": 1.0, "kl": 0.5, "k3": 0.25, "weight": 2.0, "weight_squared": 5.0},
        {"same_policy": 0.3, "abs": 2.0, "kl": -1.0, "k3": 0.75, "weight": 3.0, "weight_squared": 5.0},
    ]
    ranks = [UpdateResult(first=own, first_tokens=count, tokens=9) for own, count in zip(sums, (1, 3), strict=True)]
    assert sum_updates(ranks) == pytest.approx({
        "same_policy_gap": 0.4 / 4, "engine_gap": 3.0 / 4, "engine_kl": -0.5 / 4, "engine_k3": 1.0 / 4,
        "engine_effective_sample_size": 5.0**2 / (4 * 10.0),
    })  # fmt: skip
    nothing = [UpdateResult(first=dict.fromkeys(sums[0], 0.0))] * 2
    assert sum_updates(nothing)["engine_effective_sample_size"] == 1.0
    assert sum_updates(nothing)["same_policy_gap"] == 0.0


def test_an_update_without_trained_tokens_or_steps_has_finite_metrics():
    assert sum_updates([UpdateResult({"clip": 0.0}, {}, 0, [])]) == {"clip": 0.0}
    assert sum_updates([UpdateResult()]) == {}
