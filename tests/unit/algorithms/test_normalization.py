import itertools

import pytest
import torch

from rltrain.algorithms import combine_rewards, normalize_advantages, normalize_rewards
from rltrain.algorithms.normalization import statistics_of

UID = torch.tensor([3, 1, 3, 3, 1, 8, 6, 6])
VALID = torch.tensor([True, True, True, True, True, True, True, False])
LEVELS = ("batch", "group", None)
NAN = torch.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def oracle(scores, mean_level, std_level, leave_one_out, unbiased, eps):
    """Normalise rewards with a loop over rows, following the docstring of `normalize_rewards`."""
    result = []
    for i in range(len(scores)):

        def peers(level, i=i):
            same = [j for j in range(len(scores)) if VALID[j] and (level == "batch" or UID[j] == UID[i])]
            return torch.stack([scores[j] for j in same])

        value = scores[i].item()
        if not VALID[i]:
            result.append(0.0)
            continue
        if mean_level:
            own = peers(mean_level)
            others = (own.sum() - scores[i]) / (len(own) - 1) if leave_one_out and len(own) > 1 else own.mean()
            value = 0.0 if len(own) < 2 or own.max() == own.min() else (scores[i] - others).item()
        if std_level:
            own = peers(std_level)
            if len(own) > 1 and own.max() != own.min():
                value /= own.std(unbiased=unbiased).item() + eps
        result.append(value)
    return tensor(*result)


@pytest.mark.parametrize(("mean_level", "std_level"), list(itertools.product(LEVELS, LEVELS)))
@pytest.mark.parametrize("unbiased", [True, False])
def test_every_pair_of_levels_equals_a_slow_oracle(mean_level, std_level, unbiased):
    scores = tensor(1.0, 5.0, 2.5, -1.0, 5.0, 0.7, 2.0, 1e9)
    knobs = {"mean_level": mean_level, "std_level": std_level, "unbiased": unbiased, "eps": 1e-3}
    wanted = oracle(scores, mean_level, std_level, False, unbiased, 1e-3)
    assert torch.allclose(normalize_rewards(scores, UID, VALID, **knobs), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mean_level", ["batch", "group"])
def test_C6_leave_one_out_is_the_mean_of_the_others(mean_level):
    scores = tensor(1.0, 5.0, 2.5, -1.0, 4.0, 0.7, 2.0, 1e9)
    result = normalize_rewards(scores, UID, VALID, mean_level=mean_level, std_level=None, leave_one_out=True)
    assert torch.allclose(result, oracle(scores, mean_level, None, True, True, 0), rtol=1e-12, atol=1e-14)


def test_the_std_is_of_raw_scores_not_of_centred_ones():
    scores, uid = tensor(0, 2, 10, 12), torch.tensor([0, 0, 1, 1])
    result = normalize_rewards(scores, uid, torch.ones(4), mean_level="group", std_level="batch", eps=0.0)
    assert torch.allclose(result, tensor(-1, 1, -1, 1) / scores.std(), rtol=1e-12)


def test_C3_a_constant_group_is_divided_by_nothing():
    scores, uid = tensor(1, 1, 5, 6), torch.tensor([0, 0, 1, 1])
    result = normalize_rewards(scores, uid, torch.ones(4), mean_level="batch", std_level="group", eps=1e-6)
    assert torch.equal(result[:2], scores[:2] - scores.mean())


@pytest.mark.parametrize("constant", [0.3, -0.3])
def test_C3_C4_an_invalid_row_does_not_make_a_constant_group_vary(constant):
    scores, uid, valid = tensor(*[constant] * 3, 7.0, 5.0, 6.0), torch.tensor([0, 0, 0, 0, 1, 1]), torch.arange(6) != 3
    divided = normalize_rewards(scores, uid, valid, mean_level=None, std_level="group")
    assert torch.equal(divided[:3], scores[:3])
    assert (normalize_rewards(scores, uid, valid, mean_level="group", std_level=None)[:4] == 0).all()


@pytest.mark.parametrize("count", [0, 1])
def test_C3_fewer_than_two_valid_rows_deviate_by_exactly_nothing(count):
    valid = torch.arange(4) < count
    result = normalize_rewards(tensor(1, 2, 3, 4), torch.zeros(4).long(), valid, mean_level="batch", std_level="batch")
    assert torch.equal(result, torch.zeros(4).double())


@pytest.mark.parametrize("suppressed", [1.0, 100.0, NAN])
def test_C5_a_row_excluded_beforehand_never_moves_the_others(suppressed):
    scores, valid = tensor(1.0, suppressed, 3.0), torch.tensor([True, False, True])
    result = normalize_rewards(scores, torch.zeros(3).long(), valid, mean_level="batch", std_level=None)
    assert torch.equal(result, tensor(-1, 0, 1))


# Two of four answers to one prompt are finished, with the scores 1 and 0 (mean .5, std 1/sqrt 2).
# The other two answers are truncated, also with the scores 1 and 0, but are not counted in the statistics.
FINISHED = torch.tensor([True, True, False, False])


@pytest.mark.parametrize("level", ["batch", "group"])
def test_C9_a_row_that_is_not_counted_keeps_its_own_score_on_the_scale_of_the_others(level):
    scores, uid, valid = tensor(1, 0, 1, 0), torch.zeros(4).long(), torch.ones(4)
    both = {"mean_level": level, "std_level": level, "eps": 0.0}
    away = 0.5 * 2**0.5
    result = normalize_rewards(scores, uid, valid, counted=FINISHED, **both)
    assert result.tolist() == pytest.approx([away, -away, away, -away], rel=1e-12)
    means = normalize_rewards(scores, uid, valid, counted=FINISHED, mean_level=level, std_level=None)
    assert means.tolist() == [0.5, -0.5, 0.5, -0.5]
    out = normalize_rewards(scores, uid, valid, counted=FINISHED, mean_level=level, std_level=None, leave_one_out=True)
    # with leave-one-out, a row that is not counted is compared with all counted rows
    assert out.tolist() == [1.0, -1.0, 0.5, -0.5]


def test_C4_a_row_that_is_not_valid_gets_0_whether_it_is_counted_or_not():
    scores, uid, valid = tensor(1, 0, NAN, 7), torch.zeros(4).long(), torch.tensor([True, True, False, False])
    for counted in (None, torch.ones(4), FINISHED):
        result = normalize_rewards(scores, uid, valid, counted=counted, mean_level="batch", std_level=None)
        assert result.tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("std_level", ["batch", None])
@pytest.mark.parametrize(
    ("scores", "counted", "expected"),
    [
        # the counted scores are equal, so only their mean is subtracted
        ([0.3, 0.3, 1.3, -0.7], [True, True, False, False], [0.0, 0.0, 1.0, -1.0]),
        ([1.0, 0.0, 3.0], [True, False, False], [0.0, -1.0, 2.0]),  # a single counted score has a mean but no std
        ([1.0, 0.0], [False, False], [1.0, 0.0]),  # without counted scores, the mean is 0
    ],
)
def test_C3_a_population_that_says_nothing_moves_a_row_that_is_not_counted_by_its_mean_alone(
    scores, counted, expected, std_level
):
    rows = tensor(*scores), torch.zeros(len(scores)).long(), torch.ones(len(scores))
    result = normalize_rewards(*rows, counted=torch.tensor(counted), mean_level="batch", std_level=std_level)
    assert result.tolist() == pytest.approx(expected, abs=1e-15)
    assert (result[torch.tensor(counted)] == 0).all()


@pytest.mark.parametrize("excluded", [1.0, 100.0])
def test_C5_what_is_not_counted_never_moves_the_others(excluded):
    rows = tensor(1, excluded, 3), torch.zeros(3).long(), torch.ones(3)
    counted = torch.tensor([True, False, True])
    result = normalize_rewards(*rows, counted=counted, mean_level="batch", std_level="batch", eps=0.0)
    assert result[[0, 2]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-12)


@pytest.mark.parametrize(("mean_level", "std_level"), [("group", "group"), ("batch", "batch"), (None, None)])
def test_C6_leave_one_out_never_meets_a_std_and_needs_a_mean(mean_level, std_level):
    with pytest.raises(ValueError, match="leave_one_out=True"):
        normalize_rewards(
            tensor(1, 2),
            torch.zeros(2).long(),
            torch.ones(2),
            mean_level=mean_level,
            std_level=std_level,
            leave_one_out=True,
        )


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="std_level='row'"):
        normalize_rewards(tensor(1, 2), UID[:2], VALID[:2], mean_level="group", std_level="row")


def test_rewards_keep_their_type():
    for dtype, wanted in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        scores = torch.tensor([1, 2], dtype=dtype)
        result = normalize_rewards(scores, UID[:2], VALID[:2], mean_level="batch", std_level=None)
        assert result.dtype == wanted
        assert result.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("level", ["batch", "group"])
def test_C1_float32_is_summed_in_float64_so_that_the_order_of_rows_does_not_show(level):
    scores = torch.randn(64, generator=torch.Generator().manual_seed(0))
    uid, everyone = torch.arange(64) % 3, torch.ones(64, dtype=torch.bool)
    levels = {"mean_level": level, "std_level": level}
    wanted = normalize_rewards(scores.double(), uid, everyone, **levels).float()
    assert torch.equal(normalize_rewards(scores, uid, everyone, **levels), wanted)
    assert torch.equal(normalize_advantages(scores[:, None], everyone[:, None], uid, **levels)[:, 0], wanted)


def test_rewards_are_summed_with_their_weights_and_missing_ones_left_out():
    components = tensor([1.0, 2.0], [NAN, 3.0], [4.0, NAN], [NAN, NAN])
    result = combine_rewards(components, weights=[2.0, 0.5])
    assert torch.equal(result[:3], tensor(3.0, 1.5, 8.0))
    assert result[3].isnan()


def test_a_shut_gate_silences_every_other_component_and_not_itself():
    components = tensor([1.0, 5.0, 1.0], [0.0, 5.0, 1.0], [-1.0, 5.0, 1.0], [NAN, 5.0, 1.0])
    result = combine_rewards(components, weights=[1.0, 1.0, 1.0], gates=[True, False, False])
    assert torch.equal(result, tensor(7.0, 0.0, -1.0, 6.0))


def test_of_two_gates_each_silences_the_other():
    components = tensor([-1.0, 2.0, 4.0], [-1.0, -2.0, 4.0], [1.0, -2.0, 4.0])
    result = combine_rewards(components, weights=torch.tensor([1.0, 1.0, 1.0]), gates=torch.tensor([True, True, False]))
    assert torch.equal(result, tensor(-1.0, 0.0, -2.0))


def test_components_normalised_in_their_group_weigh_alike_whatever_their_scale():
    components = tensor([0.0, 0.0], [1.0, 1000.0], [5.0, 7.0], [9.0, 7.0], [99.0, -99.0])
    uid, valid = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([True, True, True, True, False])
    result = combine_rewards(components, uid, valid, weights=[1.0, 2.0], aggregation="normalize_then_sum")
    away = 2**-0.5
    # the row that is not counted is scaled by its group's statistics, but does not change the statistics
    moved = (99 - 0.5) / away + 2 * (-99 - 500) / (1000 * away)
    assert torch.allclose(result, tensor(-3 * away, 3 * away, -away, away, moved), rtol=1e-5)


@pytest.mark.parametrize("valid", [None, torch.ones(3, dtype=torch.bool)])
def test_a_missing_component_is_in_no_statistic_of_its_group(valid):
    components = tensor([0.0, 1.0], [1.0, NAN], [0.5, 3.0])
    uid = torch.zeros(3).long()
    result = combine_rewards(components, uid, valid, weights=[0.0, 1.0], aggregation="normalize_then_sum")
    away = 2**-0.5
    assert torch.allclose(result, tensor(-away, 0.0, away), rtol=1e-5)
    if valid is None:
        assert torch.equal(
            combine_rewards(components, uid, weights=[0.0, 1.0], aggregation="normalize_then_sum"), result
        )


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"weights": [1.0]}, "give one weight per component"),
        ({"weights": [1.0, 1.0], "aggregation": "max"}, "aggregation='max' is not known"),
        ({"weights": [1.0, 1.0], "aggregation": "normalize_then_sum"}, "uid=None"),
    ],
)
def test_combine_rewards_refuses_what_it_cannot_do(knobs, complaint):
    with pytest.raises(ValueError, match=complaint):
        combine_rewards(tensor([1.0, 2.0]), **knobs)


def test_C7_whitening_uses_trained_tokens_only_and_leaves_masked_ones_at_zero(make_batch):
    batch = make_batch()
    mask = batch["response_mask"]
    result = normalize_advantages(batch["advantages"], mask)
    trained = batch["advantages"][mask]
    assert torch.allclose(result[mask], (trained - trained.mean()) / (trained.std() + 1e-6), rtol=1e-10)
    assert (result[~mask] == 0).all()
    assert result[mask].mean().abs() < 1e-12
    assert result[mask].std().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("mask", [[[0, 0, 0]], [[0, 1, 0]], [[1, 0, 1]]])
def test_C7_nothing_to_whiten_is_zero(mask):
    assert torch.equal(normalize_advantages(torch.full((1, 3), 0.3), torch.tensor(mask)), torch.zeros(1, 3))


COUNTED = torch.tensor([True, True, True, True, True, True, False, True])


def token_oracle(advantages, mask, uid, counted, mean_level, std_level, leave_one_out, unbiased, eps):
    """Normalise advantages with a loop over tokens, following the docstring of `normalize_advantages`."""
    result = torch.zeros_like(advantages)
    slots = [(i, t) for i in range(len(mask)) for t in range(mask.shape[1]) if mask[i, t]]

    def statistics(level, i):
        own = [advantages[j, s].item() for j, s in slots if counted[j] and (level == "batch" or uid[j] == uid[i])]
        mean = sum(own) / len(own) if own else 0.0
        squares = sum((x - mean) ** 2 for x in own)
        return own, mean, (squares / max(len(own) - int(unbiased), 1)) ** 0.5, len(own) > 1 and max(own) != min(own)

    for i, t in slots:
        value = raw = advantages[i, t].item()
        if mean_level:
            own, mean, _, varied = statistics(mean_level, i)
            if counted[i] and leave_one_out and len(own) > 1:
                mean = (sum(own) - raw) / (len(own) - 1)
            value = 0.0 if counted[i] and not varied else raw - mean
        if std_level:
            _, _, std, varied = statistics(std_level, i)
            value = value / (std + eps) if varied else value
        result[i, t] = value
    return result


@pytest.mark.parametrize(("mean_level", "std_level"), list(itertools.product(LEVELS, LEVELS)))
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("counted", [COUNTED, COUNTED.long(), ~COUNTED, torch.zeros(8), torch.ones(8), None])
def test_C7_every_pair_of_levels_over_tokens_equals_a_slow_oracle(mean_level, std_level, unbiased, counted, make_batch):
    batch = make_batch(seed=13)
    columns = batch["advantages"], batch["response_mask"], batch["uid"]
    knobs = {"mean_level": mean_level, "std_level": std_level, "unbiased": unbiased, "eps": 1e-3}
    everyone = torch.ones(8) if counted is None else counted
    wanted = token_oracle(*columns, everyone, leave_one_out=False, **knobs)
    assert torch.allclose(normalize_advantages(*columns, counted, **knobs), wanted, rtol=1e-10, atol=1e-12)
    assert (wanted != 0).any()


@pytest.mark.parametrize("mean_level", ["batch", "group"])
def test_C6_leave_one_out_over_tokens_is_the_mean_of_the_other_tokens(mean_level, make_batch):
    batch = make_batch(seed=14)
    columns = batch["advantages"], batch["response_mask"], batch["uid"], COUNTED
    knobs = {"mean_level": mean_level, "std_level": None, "leave_one_out": True}
    wanted = token_oracle(*columns, unbiased=True, eps=0, **knobs)
    assert torch.allclose(normalize_advantages(*columns, **knobs), wanted, rtol=1e-10, atol=1e-12)


def test_C4_an_excluded_row_is_moved_and_scaled_by_the_others_and_moves_none_of_them():
    mask, counted = torch.tensor([[1, 1], [1, 0]]), torch.tensor([True, False])
    for credit in (5.0, 500.0):
        result = normalize_advantages(tensor([1.0, 3.0], [credit, NAN]), mask, None, counted, eps=0.0)
        std = 2**0.5
        assert torch.allclose(result, tensor([-1 / std, 1 / std], [(credit - 2) / std, 0.0]), rtol=1e-14)


@pytest.mark.parametrize("levels", [{}, {"mean_level": "group", "std_level": "group"}])
@pytest.mark.parametrize("row", [[0.3, 0.3], [0.3, 9.0]])
def test_C3_where_the_counted_tokens_say_nothing_an_excluded_row_gets_its_deviation_undivided(levels, row):
    mask = torch.tensor([[1, int(row[1] == 0.3)], [1, 1]])
    values = tensor(row, [1.3, 0.3])
    result = normalize_advantages(values, mask, torch.zeros(2).long(), torch.tensor([True, False]), **levels)
    assert (result[0] == 0).all()
    assert torch.allclose(result[1], tensor(1.0, 0.0), atol=1e-15)


def test_with_nobody_counted_nothing_is_moved():
    values = tensor([1.0, 3.0], [5.0, 7.0])
    assert torch.equal(normalize_advantages(values, torch.ones(2, 2), None, torch.zeros(2)), values)


def test_a_group_level_over_tokens_finds_groups_by_uid(make_batch):
    batch = make_batch()
    values, mask, uid = batch["advantages"], batch["response_mask"], batch["uid"]
    result = normalize_advantages(values, mask, uid, mean_level="group", std_level="group")
    for group in (5, 9, 7):
        rows = uid == group
        alone = normalize_advantages(values[rows], mask[rows])
        assert torch.allclose(result[rows], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("levels", [{"mean_level": "group"}, {"std_level": "group"}])
def test_a_group_level_without_uid_is_refused(levels):
    with pytest.raises(ValueError, match="uid=None with mean_level"):
        normalize_advantages(torch.zeros(1, 2), torch.ones(1, 2), **levels)


@pytest.mark.parametrize(
    ("levels", "complaint"),
    [
        ({"mean_level": "row"}, "mean_level='row' is not known"),
        ({"std_level": "row"}, "std_level='row' is not known"),
        ({"leave_one_out": True}, "leave_one_out=True"),
        ({"leave_one_out": True, "mean_level": None, "std_level": None}, "leave_one_out=True"),
    ],
)
def test_normalize_advantages_refuses_what_it_cannot_do(levels, complaint):
    with pytest.raises(ValueError, match=complaint):
        normalize_advantages(torch.zeros(1, 2), torch.ones(1, 2), **levels)


def test_every_component_says_whether_it_is_a_gate():
    with pytest.raises(ValueError, match=r"gates has shape \(1,\) for 2 components; give one gate per component"):
        combine_rewards(torch.ones(3, 2), weights=[1.0, 1.0], gates=[True])


def test_the_std_of_a_population_of_one_is_0():
    scores, one = torch.tensor([3.0, 5.0]), torch.tensor([0, 1])
    assert statistics_of(scores, one, torch.tensor([True, True])).std.tolist() == [0.0, 0.0]


def test_three_components_of_two_groups_are_six_populations():
    scores = torch.tensor([[0.0, 0.0, 0.0], [2.0, 4.0, 6.0], [1.0, 3.0, 5.0], [7.0, 5.0, 3.0]], dtype=torch.float64)
    found = combine_rewards(
        scores, torch.tensor([0, 0, 1, 1]), weights=[1.0, 10.0, 100.0], aggregation="normalize_then_sum"
    )
    unit = 0.5**0.5  # each of two values differs from their mean by std / sqrt(2)
    assert torch.allclose(found, torch.tensor([-111.0, 111.0, 89.0, -89.0], dtype=torch.float64) * unit, rtol=1e-5)


def test_groups_may_outnumber_the_trained_tokens():
    """Only one token is trained on, in the last of four groups."""
    mask = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 1]])
    advantages = torch.tensor([[9.0, 9.0], [9.0, 9.0], [9.0, 9.0], [9.0, 3.0]])
    for levels in ({}, {"mean_level": "group", "std_level": "group"}, {"mean_level": "group", "std_level": None}):
        assert torch.equal(normalize_advantages(advantages, mask, torch.arange(4), **levels), torch.zeros(4, 2))
    raw = normalize_advantages(advantages, mask, torch.arange(4), mean_level=None, std_level=None)
    assert raw.tolist() == [[0, 0], [0, 0], [0, 0], [0, 3]]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_a_batch_without_rows_or_tokens_keeps_its_shape(shape):
    for level in ("group", "batch"):
        found = normalize_advantages(
            torch.zeros(shape), torch.ones(shape), torch.arange(shape[0]), mean_level=level, std_level=level
        )
        assert found.shape == shape
