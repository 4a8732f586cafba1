import itertools

import pytest
import torch

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    group_length_reward,
    normalize_advantages,
    normalize_rewards,
    overlong_penalty,
    shape_scores,
    suppress_truncated,
)

NAN = torch.nan
LEVELS = ("batch", "group", None)
NORMALISATIONS = [
    {"mean_level": mean, "std_level": std, "leave_one_out": loo, "unbiased": unbiased}
    for mean, std, loo, unbiased in itertools.product(LEVELS, LEVELS, (False, True), (False, True))
    if not loo or (mean is not None and std is None)
]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("knobs", "wanted"),
    [
        ({}, [-3, 0, 1, 8]),
        ({"bias": 1.0}, [-2, 1, 2, 9]),
        ({"scale": -0.5}, [1.5, 0, -0.5, -4]),
        ({"clip": 2.0}, [-2, 0, 1, 2]),
        ({"bias": 1.0, "scale": 2.0, "clip": 3.0}, [-3, 2, 3, 3]),
    ],
)
def test_a_score_is_moved_then_scaled_then_cut(knobs, wanted):
    assert shape_scores(tensor(-3, 0, 1, 8), **knobs).tolist() == wanted


def test_a_score_that_is_missing_stays_missing():
    assert shape_scores(tensor(NAN, 1), bias=1.0, clip=1.0).isnan().tolist() == [True, False]


@pytest.mark.parametrize("clip", [0.0, -1.0, NAN])
def test_bounds_that_leave_no_score_are_refused(clip):
    with pytest.raises(ValueError, match=f"clip={clip} must be > 0"):
        shape_scores(tensor(1), clip=clip)


def test_a_scale_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"scale=0.0 must not be 0"):
        shape_scores(tensor(1), scale=0.0)


def test_the_price_of_length_rises_over_the_buffer():
    lengths = torch.tensor([0, 5, 6, 7, 9, 10, 11, 99])
    penalty = overlong_penalty(lengths, max_response_length=10, buffer=4)
    assert penalty.tolist() == [0, 0, 0, -0.25, -0.75, -1, -1, -1]
    assert not penalty.signbit()[:3].any()
    assert overlong_penalty(lengths, max_response_length=10, buffer=4, factor=2.0).tolist() == [2 * p for p in penalty]


@pytest.mark.parametrize(("buffer", "wanted"), [(1, [0, 0, -1]), (3, [-1 / 3, -2 / 3, -1])])
def test_the_buffer_may_be_one_token_or_the_whole_length(buffer, wanted):
    penalty = overlong_penalty(torch.arange(1, 4), max_response_length=3, buffer=buffer)
    assert penalty.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("buffer", [0, 4])
def test_a_buffer_outside_the_response_is_refused(buffer):
    with pytest.raises(ValueError, match=rf"buffer={buffer} must be in \[1, max_response_length=3\]"):
        overlong_penalty(torch.arange(3), max_response_length=3, buffer=buffer)


@pytest.mark.parametrize("factor", [0.0, -1.0, NAN])
def test_a_length_that_costs_nothing_is_refused(factor):
    with pytest.raises(ValueError, match=f"factor={factor} must be > 0"):
        overlong_penalty(torch.arange(3), max_response_length=3, buffer=1, factor=factor)


def test_shaping_computes_in_float32_and_float64_stays():
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        scores, flags = torch.ones(2, dtype=dtype), torch.tensor([True, False])
        assert shape_scores(scores).dtype == wanted
        assert suppress_truncated(scores, flags, scores).dtype == wanted
        assert overlong_penalty(scores, max_response_length=3, buffer=1).dtype == wanted


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_C9_a_suppressed_row_scores_what_earning_nothing_would_and_no_more_than_its_own(dtype):
    scores, truncated = tensor(3, 3, -2, NAN), torch.tensor([False, True, True, True], dtype=dtype)
    assert suppress_truncated(scores, truncated, torch.zeros(4))[:3].tolist() == [3, 0, -2]
    assert suppress_truncated(scores, truncated, tensor(0, -0.5, -0.5, 0))[:3].tolist() == [3, -0.5, -2]
    # a row whose score is NaN keeps the score NaN
    assert suppress_truncated(scores, truncated, torch.zeros(4))[3].isnan()


def suppressed(score, *, others=()):
    """Return the scores [1, score, *others] of one group whose row 1 is suppressed, and the mask of valid rows."""
    scores = tensor(1.0, score, *others)
    truncated = torch.arange(len(scores)) == 1
    return suppress_truncated(scores, truncated, torch.zeros_like(scores)), ~truncated


def as_batch(batch, scores, valid):
    """Return the columns of one group, with `scores` as token rewards and as reward components.

    An answer is correct if its score is above 1.
    """
    rows = len(scores)
    rewards = torch.zeros(rows, 9, dtype=torch.float64)
    rewards[:, 4] = scores
    return {
        **{name: column[:rows] for name, column in batch.items()},
        "token_level_rewards": rewards,
        "reward_components": scores[:, None].expand(-1, 2),
        "successes": (scores > 1).double(),
        "response_mask": torch.ones(rows, 9, dtype=torch.bool),
        "uid": torch.zeros(rows).long(),
        "valid": valid,
    }


# scores of further rows in the group: none, or two rows that enter the group's statistics
OTHERS = [(), (3.0, 0.0)]


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
def test_C5_what_a_suppressed_row_scored_moves_no_other_under_any_estimator(name, others, make_batch, call):
    function, batch = ADVANTAGE_ESTIMATORS.get(name), make_batch()
    one, hundred = (call(function, as_batch(batch, *suppressed(s, others=others)))[0] for s in (1.0, 100.0))
    untreated = call(function, as_batch(batch, tensor(1, 100, *others), torch.ones(2 + len(others))))[0]
    assert torch.equal(one, hundred)
    assert not torch.equal(one, untreated)
    if others:
        assert (one[2] != 0).any()


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("levels", NORMALISATIONS, ids=str)
def test_C5_what_a_suppressed_row_scored_moves_no_other_under_any_normalisation(levels, others):
    results = []
    for score in (1.0, 100.0):
        scores, valid = suppressed(score, others=others)
        uid = torch.zeros_like(scores).long()
        tokens = torch.ones(len(scores), 3, dtype=torch.bool)
        by_row = normalize_rewards(scores, uid, torch.ones_like(valid), counted=valid, **levels)
        # GAE keeps the advantages of an excluded row
        unsuppressed = tensor(1.0, score, *others)[:, None].expand(-1, 3)
        by_token = normalize_advantages(unsuppressed, tokens, uid, valid, **levels)
        results.append(torch.cat([by_row[:, None], by_token], -1)[valid])
    assert torch.equal(*results)
    without = tensor(1.0, *others)
    alone = torch.zeros_like(without).long(), torch.ones_like(without)
    assert torch.allclose(results[0][:, 0], normalize_rewards(without, *alone, **levels), rtol=1e-12, atol=1e-14)


# Tests of the length reward within a group, Kimi k1.5, arXiv 2501.12599


def test_the_length_reward_by_hand():
    # Group 1 has the lengths 10, 20 and 30, so lambda is 0.5, 0 and -0.5.
    # Group 2 has the lengths 4, 5 and 8, so lambda is 0.5, 0.25 and -0.5.
    lengths, uid = torch.tensor([10, 4, 20, 5, 30, 8]), torch.tensor([1, 2, 1, 2, 1, 2])
    correct, counted = torch.tensor([True, False, True, True, True, False]), torch.ones(6, dtype=torch.bool)
    assert group_length_reward(lengths, uid, correct, counted).tolist() == [0.5, 0.0, 0.0, 0.25, -0.5, -0.5]


def test_the_length_reward_equals_the_papers_formula_in_loops():
    generator = torch.Generator().manual_seed(0)
    lengths, uid = (torch.randint(1, 40, (64,), generator=generator) for _ in range(2))
    uid = uid % 9
    correct, counted = (torch.rand(64, generator=generator) < share for share in (0.5, 0.8))
    found = group_length_reward(lengths.double(), uid, correct, counted)
    for i in range(64):
        group = [lengths[j].item() for j in range(64) if uid[j] == uid[i] and counted[j]]
        least, most = min(group), max(group)
        rate = 0.5 - (min(max(lengths[i].item(), least), most) - least) / (most - least)
        assert found[i].item() == pytest.approx(rate if correct[i] else min(0.0, rate), abs=1e-12)


@pytest.mark.parametrize(
    ("lengths", "counted"), [([7, 7, 7], [True] * 3), ([7, 9, 2], [True, False, False]), ([7, 9, 2], [False] * 3)]
)
def test_a_group_without_different_lengths_has_no_length_reward(lengths, counted):
    found = group_length_reward(
        torch.tensor(lengths), torch.zeros(3), torch.tensor([True, False, True]), torch.tensor(counted)
    )
    assert found.tolist() == [0, 0, 0]


def test_a_row_that_does_not_count_moves_no_other_and_is_never_better_than_the_longest():
    counted = torch.tensor([True, True, False])
    for length in (1, 500):
        lengths = torch.tensor([10, 20, length])
        found = group_length_reward(lengths, torch.zeros(3), torch.ones(3), counted).tolist()
        assert found == [0.5, -0.5, 0.5 if length == 1 else -0.5]


def test_the_order_of_rows_does_not_change_length_rewards():
    lengths, uid = torch.tensor([3, 9, 4, 1, 6, 2]), torch.tensor([5, 5, 8, 8, 5, 8])
    correct, order = torch.tensor([True, False, True, False, False, True]), torch.tensor([4, 2, 0, 5, 3, 1])
    found = group_length_reward(lengths, uid, correct, torch.ones(6))
    assert torch.equal(group_length_reward(lengths[order], uid[order], correct[order], torch.ones(6)), found[order])
