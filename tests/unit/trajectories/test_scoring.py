import pytest
import torch

from rltrain.base.errors import RewardError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.trajectories.scoring import flat_rows, on_last_token, shaped_scores, truncated_rows, zero_spread

LIMIT = 16  # rollout.max_response_length of the default config


def batch(scores, *, reasons=None, valid=None, lengths=None, mask=None) -> DataProto:
    """Return a batch of rows with the given scores.

    Each response has two tokens unless `lengths` is given.
    """
    rows = len(scores)
    lengths = lengths or [2] * rows
    made = DataProto.from_dict(
        {"responses": jagged([[1] * length for length in lengths], torch.int64), "scores": torch.tensor(scores),
         "uid": torch.zeros(rows, dtype=torch.int64), "valid": torch.tensor(valid or [True] * rows),
         "reward_components": torch.tensor(scores)[:, None]},
        {"finish_reason": reasons or ["stop"] * rows},
    )  # fmt: skip
    trained = made.batch["valid"].repeat_interleave(torch.tensor(lengths)) if mask is None else torch.tensor(mask)
    versions = torch.zeros(len(trained), dtype=torch.int64)
    return made.with_values("responses", response_mask=trained, policy_version=versions)


def shaped(made, *overrides):
    config = compose([f"rollout.max_response_length={LIMIT}", *(f"algorithm.{text}" for text in overrides)])[0]
    scores, _, counted = shaped_scores(made, config)
    return scores.tolist(), counted.tolist()


# Tests of the shaping of single scores


def test_without_shaping_scores_are_as_the_functions_said():
    made = batch([3.0, -1.0, 0.5], reasons=["length", "stop", "abort"], lengths=[16, 1, 3])
    assert shaped(made) == ([3.0, -1.0, 0.5], [True] * 3)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["bias=1.0"], [4.0, 0.0, 1.5]),
        (["scale=-2.0"], [-6.0, 2.0, -1.0]),
        (["clip=0.75"], [0.75, -0.75, 0.5]),
        (["bias=1.0", "scale=2.0"], [8.0, 0.0, 3.0]),  # the bias is added before the scale is applied
        (["bias=1.0", "scale=2.0", "clip=2.5"], [2.5, 0.0, 2.5]),  # clipping is applied last, after bias and scale
    ],
)
def test_a_score_is_moved_then_scaled_then_bounded(overrides, expected):
    assert shaped(batch([3.0, -1.0, 0.5]), *(f"reward_shaping.{text}" for text in overrides))[0] == expected


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (12, 0.0), (13, 0.125), (14, 0.25), (15, 0.375), (16, 0.5)])
def test_length_costs_more_over_the_last_tokens_before_the_limit(length, penalty):
    made = batch([1.0], lengths=[length])
    scores, _ = shaped(made, "reward_shaping.overlong_buffer=4", "reward_shaping.overlong_penalty=0.5")
    assert scores == [1.0 - penalty]


def test_the_price_of_length_comes_after_the_bounds():
    settings = ["clip=1.0", "overlong_buffer=4", "overlong_penalty=2.0"]
    assert shaped(batch([-5.0], lengths=[16]), *(f"reward_shaping.{text}" for text in settings))[0] == [-3.0]


def test_C4_a_row_that_is_not_valid_has_score_zero_whatever_is_done_to_scores():
    made = batch([5.0, float("nan")], valid=[True, False], lengths=[16, 16])
    settings = ["reward_shaping.bias=1.0", "reward_shaping.overlong_buffer=4"]
    assert shaped(made, *settings) == ([5.0, 0.0], [True, False])


# Cut answers

CUT = [4.0, 2.0, 3.0, 1.0]
REASONS = ["length", "stop", "length", "abort"]


def test_a_cut_answer_is_one_that_the_engine_cut_and_no_other():
    """Row 1 is an answer of maximum length that finished by itself.

    Row 2 is short, but the engine cut the answer at the model's own length limit.
    """
    made = batch(CUT, reasons=REASONS, lengths=[16, 16, 3, 16])
    assert truncated_rows(made).tolist() == [True, False, True, False]


def test_C5_a_suppressed_answer_earns_nothing_and_is_in_no_statistic():
    made = batch(CUT, reasons=REASONS, lengths=[16, 16, 3, 16])
    assert shaped(made, "suppress_truncated=true") == ([0.0, 2.0, 0.0, 1.0], [False, True, False, True])


def test_an_excluded_answer_keeps_its_score_and_is_in_no_statistic():
    made = batch(CUT, reasons=REASONS, lengths=[16, 16, 3, 16])
    assert shaped(made, "exclude_truncated=true") == (CUT, [False, True, False, True])


def test_masking_alone_leaves_scores_and_statistics_as_they_are():
    assert shaped(batch(CUT, reasons=REASONS), "mask_truncated=true") == (CUT, [True] * 4)


def test_a_suppressed_answer_is_shaped_as_one_that_earned_nothing_and_keeps_the_price_of_its_length():
    made = batch([4.0, 0.0, 4.0], reasons=["length", "stop", "stop"], lengths=[16, 16, 14])
    settings = ["suppress_truncated=true", "reward_shaping.bias=7.0", "reward_shaping.overlong_buffer=4"]
    assert shaped(made, *settings) == ([6.0, 6.0, 10.5], [False, True, True])


@pytest.mark.parametrize("shaping", [[], ["bias=-0.5"], ["bias=-0.5", "scale=2"], ["scale=-1"], ["clip=0.4"]])
@pytest.mark.parametrize("how", ["suppress", "exclude"])
def test_C9_a_wrong_answer_scores_no_better_for_being_cut(how, shaping):
    """Each finished answer is paired with a truncated answer of equal score.

    With a negative scale, the higher score belongs to the wrong answer.
    """
    made = batch([-1.0, -1.0, 0.0, 0.0, 1.0, 1.0], reasons=["stop", "length"] * 3)
    scores, counted = shaped(made, f"{how}_truncated=true", *(f"reward_shaping.{text}" for text in shaping))
    assert all(cut <= finished for finished, cut in zip(scores[::2], scores[1::2], strict=True))
    assert scores[3] == scores[2]  # truncation does not lower the score of an answer whose score is 0
    assert counted == [True, False] * 3


def test_C5_C9_under_normalize_then_sum_a_cut_answer_is_in_no_statistic_and_earns_nothing():
    """The two finished answers have the scores 2 and 0, with mean 1 and standard deviation sqrt(2).

    A suppressed answer with score 100 gets the reward of an answer with score 0, not of an answer with the mean score.
    """
    aggregation = "reward.aggregation=normalize_then_sum"
    for cut_score in (2.0, 100.0):
        made = batch([2.0, 0.0, cut_score], reasons=["stop", "stop", "length"])
        config = compose([aggregation, "algorithm.suppress_truncated=true"])[0]
        assert shaped_scores(made, config).scores.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), -(0.5**0.5)])
        config = compose([aggregation, "algorithm.exclude_truncated=true"])[0]
        scores = shaped_scores(made, config).scores.tolist()
        assert scores == pytest.approx([0.5**0.5, -(0.5**0.5), (cut_score - 1) * 0.5**0.5], rel=1e-5)


# Groups without spread


@pytest.mark.parametrize(
    ("scores", "uid", "valid", "flat"),
    [
        ([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [True] * 4, [False, False, True, True]),
        # one group has three scores that are equal in float32, and the other group has one row
        ([0.3, 0.3, 0.3, 0.1], [4, 4, 4, 2], [True] * 4, [True] * 4),
        # rows with equal uid form a group, wherever the rows are in the batch
        ([1.0, 0.0, 1.0, 0.0], [0, 1, 0, 1], [True] * 4, [True] * 4),
        ([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [True, False, True, True], [True, True, False, False]),
        # a failed row does not count as a row with score 0
        ([-1.0, 0.0, -1.0, 0.0], [0, 0, 1, 1], [True, False, False, True], [True] * 4),
        ([1.0, 0.0], [0, 0], [False, False], [True, True]),
        ([5.0, 5.0, 5.0, 6.0], [9, 9, 9, 9], [True, True, True, True], [False] * 4),
    ],
)
def test_C3_a_group_has_no_spread_where_all_valid_rows_have_one_score(scores, uid, valid, flat):
    assert zero_spread(torch.tensor(uid), torch.tensor(scores), torch.tensor(valid)).tolist() == flat


# Tests of scores on the last trained token


def test_B8_a_score_sits_on_the_last_trained_token_and_they_sum_to_the_scores():
    made = batch([2.0, -1.0, 7.0], lengths=[3, 1, 2])
    placed = on_last_token(made, made.batch["scores"])
    assert placed.tolist() == [0, 0, 2.0, -1.0, 0, 7.0]


def test_B7_what_a_tool_wrote_at_the_end_carries_no_score():
    made = batch([2.0, 3.0], lengths=[4, 3], mask=[True, True, False, False, True, False, True])
    assert on_last_token(made, made.batch["scores"]).tolist() == [0, 2.0, 0, 0, 0, 0, 3.0]


def test_B3_empty_and_masked_rows_carry_no_score_and_disturb_no_neighbour():
    made = batch([9.0, 1.0, 8.0, 2.0, 7.0], lengths=[0, 2, 2, 1, 0], mask=[True, True, False, False, True])
    assert on_last_token(made, made.batch["scores"]).tolist() == [0, 1.0, 0, 0, 2.0]


def test_a_batch_of_empty_responses_has_no_place_for_a_score():
    made = batch([1.0, 2.0], lengths=[0, 0])
    placed = on_last_token(made, made.batch["scores"].double())
    assert (len(placed), placed.dtype) == (0, torch.float64)


# Tests of groups whose answers all have the same outcome

FORM = "reward.functions=[{path: 'x:right', weight: 2.0}, {path: length_penalty, weight: 0.5}]"
ESTIMATORS = [[], ["reward.aggregation=normalize_then_sum"], ["algorithm.advantage_estimator=gdpo"]]


@pytest.mark.parametrize("overrides", ESTIMATORS, ids=["sum", "normalize_then_sum", "gdpo"])
@pytest.mark.parametrize(("right", "flat"), [([0.0, 0.0], True), ([1.0, 1.0], True), ([1.0, 0.0], False)])
def test_C8_a_penalty_among_the_functions_makes_no_two_outcomes_of_one(right, flat, overrides):
    made = batch([0.0, 0.0])
    made.batch["reward_components"] = torch.tensor([[right[0], -0.25], [right[1], -1.0]])
    assert flat_rows(made, compose([FORM, *overrides])[0]).tolist() == [flat] * 2
    counts = FORM.replace("0.5", "0.5, outcome: true")
    assert flat_rows(made, compose([counts, *overrides])[0]).tolist() == [False] * 2


def test_C8_a_right_answer_whose_price_of_length_eats_its_reward_is_another_outcome_than_a_wrong_one():
    """The weighted sum of the right answer, 2 x 1 + 0.5 x (-4) = 0, equals the score of the wrong answer."""
    made = batch([0.0, 0.0])
    made.batch["reward_components"] = torch.tensor([[1.0, -4.0], [0.0, 0.0]])
    assert flat_rows(made, compose([FORM])[0]).tolist() == [False] * 2


def test_an_aggregation_of_ones_own_says_the_outcome_of_all_functions(tmp_path):
    (tmp_path / "own.py").write_text("def least(components, **others):\n    return components.amin(-1)\n")
    made = batch([0.0, 0.0])
    made.batch["reward_components"] = torch.tensor([[1.0, -1.0], [0.0, -1.0]])
    config = compose([FORM, f"reward.aggregation={tmp_path / 'own.py'}:least"])[0]
    # the aggregation takes the lowest score, which is the length penalty in both rows
    assert flat_rows(made, config).tolist() == [True] * 2


@pytest.mark.parametrize(
    ("components", "flat"),
    [
        ([[0.0, 1.0], [1.0, 0.0]], False),  # the components differ, although their sum is constant
        ([[1.0, 1.0], [1.0, 0.0]], False),
        ([[1.0, 0.5], [1.0, 0.5]], True),
        ([[1.0, float("nan")], [1.0, 2.0]], True),  # a component with a single value has no spread
        ([[0.0, float("nan")], [1.0, float("nan")]], False),
    ],
)
def test_an_estimator_that_reads_the_functions_one_by_one_looks_at_the_spread_of_each(components, flat):
    values = torch.tensor(components)
    made = batch(values.nansum(1).tolist())
    made.batch["reward_components"] = values
    two = "reward.functions=[x:y, x:z]"
    gdpo = compose([two, "algorithm.advantage_estimator=gdpo"])[0]
    assert flat_rows(made, gdpo).tolist() == [flat] * 2
    total = values.nansum(1)
    assert flat_rows(made, compose([two])[0]).tolist() == [bool(total[0] == total[1])] * 2


# The length reward within a group


def of_lengths(scores, lengths, successes, **given):
    made = batch(scores, lengths=lengths, **given)
    return made.union(DataProto.from_dict({"successes": torch.tensor(successes)}))


WEIGHT = "reward_shaping.group_length_weight=0.2"


def test_the_length_reward_is_added_after_the_bounds_of_scores():
    made = of_lengths([3.0, 0.0, 1.0], [2, 6, 10], [1.0, 0.0, 1.0])
    assert shaped(made, WEIGHT, "reward_shaping.clip=0.5")[0] == pytest.approx([0.6, 0.0, 0.4])


def test_the_length_reward_counts_sampled_tokens_and_no_observations():
    mask = [True] * 2 + [True] * 2 + [False] * 6 + [True] * 4
    made = of_lengths([1.0, 1.0, 1.0], [2, 8, 4], [1.0] * 3, mask=mask)
    made = made.with_values("responses", policy_version=torch.where(torch.tensor(mask), 0, -1))
    assert shaped(made, WEIGHT)[0] == pytest.approx([1.1, 1.1, 0.9])


def test_an_undecided_answer_and_a_row_without_a_score_are_not_compared():
    made = of_lengths([1.0, 1.0, 1.0, 1.0], [2, 16, 4, 1], [1.0, float("nan"), 1.0, 1.0], valid=[True] * 3 + [False])
    assert shaped(made, WEIGHT)[0] == pytest.approx([1.1, 1.0, 0.9, 0.0])


def test_C5_a_suppressed_cut_answer_moves_no_other_and_counts_as_wrong():
    for lengths in ([4, 8, 16], [4, 8, 6]):
        made = of_lengths([1.0, 1.0, 1.0], lengths, [1.0] * 3, reasons=["stop", "stop", "length"])
        scores, counted = shaped(made, WEIGHT, "suppress_truncated=true")
        assert scores[:2] == pytest.approx([1.1, 0.9])
        assert scores[2] <= 0
        assert counted == [True, True, False]


def test_C8_the_length_reward_does_not_change_which_groups_have_one_outcome():
    made = of_lengths([1.0, 1.0], [2, 6], [1.0, 1.0])
    config = compose([f"algorithm.{WEIGHT}"])[0]
    assert flat_rows(made, config).tolist() == [True, True]
    assert len(set(shaped(made, WEIGHT)[0])) == 2


def test_a_length_reward_without_a_function_that_decides_is_an_error():
    made = of_lengths([1.0, 0.0], [2, 6], [float("nan")] * 2)
    with pytest.raises(
        RewardError, match=r"group_length_weight=0\.2: the length reward .*, but no reward function decides whether"
    ):
        shaped(made, WEIGHT)
