"""Tests of the statistics of the importance weights of a mini-batch."""

import math

import pytest
import torch

from rltrain.algorithms import CorrectionStatistics, correction_statistics, rollout_correction

#                   kept, dropped, masked
WEIGHTS = torch.tensor([[2.0, 0.0, 9.0], [0.5, 1.0, 0.5], [9.0, 9.0, 9.0]], dtype=torch.float64)
KEPT = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])


def test_tokens_on_a_case_worked_by_hand():
    # Five trained tokens have the weights 2, 0 (dropped), 0.5, 1 and 0.5, and row 2 has no trained token.
    found = correction_statistics(WEIGHTS, KEPT, MASK, level="token")
    assert found == CorrectionStatistics(weight_mean=4 / 5, num_tokens=4, num_sequences=2)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_rows_on_a_case_worked_by_hand(level):
    # Rows 0 to 2 have the weights 3, 0 (dropped) and 0.5, regardless of their lengths. Row 3 has no trained token.
    weights = torch.tensor([[3.0, 3.0, 3.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    found = correction_statistics(weights, weights * mask > 0, mask, level=level)
    assert found == CorrectionStatistics(weight_mean=3.5 / 3, num_tokens=4, num_sequences=2)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rubbish", [1e4, math.inf, math.nan])
def test_B2_masked_slots_are_ignored_whatever_they_hold(level, rubbish):
    weights = torch.where(MASK == 1, WEIGHTS, rubbish)
    assert correction_statistics(weights, KEPT, MASK, level=level) == correction_statistics(
        WEIGHTS, KEPT, MASK, level=level
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_A6_where_nothing_is_kept_the_mean_is_a_divisor_all_the_same(level):
    for mask in (MASK, 0 * MASK):
        found = correction_statistics(0 * WEIGHTS, 0 * KEPT, mask, level=level)
        assert found == CorrectionStatistics(weight_mean=1.0, num_tokens=0, num_sequences=0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_D8_where_rollout_and_trainer_agree_the_mean_is_exactly_1(level):
    old = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5, 7)
    weights, kept, _ = rollout_correction(old, old, mask, level=level, mode="truncate", lower=None, upper=2.0)
    assert correction_statistics(weights, kept, mask, level=level) == CorrectionStatistics(1.0, 35, 5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_mean_of_the_divided_weights_is_1_and_a_common_factor_has_no_effect(level):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    rollout = old + 0.3 * torch.randn(6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    settings = {"level": level, "mode": "truncate", "lower": None, "upper": None}
    divided = []
    for shift in (0.0, 0.25):
        # At the level "sequence", the shift is divided among the tokens of each row, so that the weights of all rows
        # change by the same factor.
        each = shift / mask.sum(-1, keepdim=True).clamp(min=1) if level == "sequence" else shift
        weights, kept, _ = rollout_correction(old, rollout - each, mask, **settings)
        mean = correction_statistics(weights, kept, mask, level=level).weight_mean
        divided.append(weights / mean)
        again = correction_statistics(divided[-1], kept, mask, level=level).weight_mean
        assert again == pytest.approx(1, rel=1e-12)
    assert torch.allclose(*divided, rtol=1e-12)
