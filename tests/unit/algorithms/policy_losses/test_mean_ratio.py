import math

import pytest
import torch


def test_a_case_worked_by_hand(by_hand):
    # Row 0, A = 1: the ratios 0.5 and 1.7 have the mean 1.1, which is not clipped although 1.7 is above 1.3.
    # Row 1, A = -2: the ratio of the only trained token is 0.4, which is clipped to 0.5.
    # Row 2, A = -1: the mean 2 is not clipped, because only ratios below 0.5 are clipped if A is negative.
    # Row 3, A = 1: the mean 1.4 is clipped to 1.3, so no token has a gradient, not even the one with the ratio 0.8.
    ratios = [[0.5, 1.7], [0.4, 9.0], [1.0, 3.0], [0.8, 2.0]]
    advantages, mask = [[1.0, 1.0], [-2.0, -2.0], [-1.0, -1.0], [1.0, 1.0]], [[1, 1], [1, 0], [1, 1], [1, 1]]
    knobs = {"clip_ratio_low": 0.5, "clip_ratio_high": 0.3}
    losses, gradient, metrics = by_hand("mean_ratio", ratios, advantages, mask, **knobs)
    expected = [[-1.1, -1.1], [1.0, 0], [2.0, 2.0], [-1.3, -1.3]]
    slopes = [[-0.5, -1.7], [0, 0], [1.0, 3.0], [0, 0]]
    assert losses.tolist() == [pytest.approx(row, rel=1e-12) for row in expected]
    assert gradient.tolist() == [pytest.approx(row, rel=1e-12, abs=0) for row in slopes]
    assert metrics["clip_fraction"] == 3
    assert metrics["ratio_mean"] == pytest.approx(2 * 1.1 + 0.4 + 2 * 2 + 2 * 1.4)


def test_D2_token_advantages_clip_the_mean_by_the_sign_of_each_token(against):
    def oracle(new, old, a, row, **_):
        w = sum(math.exp(x) for x, _ in row) / len(row)
        bounded = min(w, 1.1) if a >= 0 else max(w, 0.95)
        slope = 0.0 if bounded != w else -a * math.exp(new - old)
        return -a * bounded, slope, (a > 0, bounded != w)

    assert len(against("mean_ratio", oracle, spread=0.4, clip_ratio_low=0.05, clip_ratio_high=0.1)) == 4


def paper_objective(log_probs, old, advantage, mask, low, high):
    """Return the paper's loss: minus the mean over rows of min(w A, clip(w) A), where w is the mean token ratio."""
    rows = []
    for i in mask.any(-1).nonzero().flatten():
        ratios = [torch.exp(log_probs[i, t] - old[i, t]) for t in mask[i].nonzero().flatten()]
        w = sum(ratios) / len(ratios)
        rows.append(torch.min(w * advantage[i], w.clip(1 - low, 1 + high) * advantage[i]))
    return -torch.stack(rows).mean()


def test_D3_the_token_form_is_the_papers_sequence_objective(as_sequence_objective):
    as_sequence_objective("mean_ratio", paper_objective, 0.1, 0.1)


@pytest.mark.parametrize("knob", ["clip_ratio_low", "clip_ratio_high"])
def test_a_negative_bound_is_refused(knob, by_hand):
    with pytest.raises(ValueError, match=f"{knob}=-0.1 must be >= 0"):
        by_hand("mean_ratio", [[1.0]], [[1.0]], **{knob: -0.1})
