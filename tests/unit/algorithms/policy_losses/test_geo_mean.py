import math

import pytest
import torch


def test_a_case_worked_by_hand(by_hand):
    # Row 0, A = 1: the log-ratios are 0.1 and 0.9, and 0.9 is clipped to 0.3, so the mean is 0.2.
    # Row 1, A = -2: the log-ratio of the only trained token is -0.1.
    # Row 2, A = -1: the log-ratio -0.9 is clipped to -0.5, and 0.7 is not clipped, so the mean is 0.1.
    # Row 3, A = 1: the log-ratios -0.9 are not clipped, because only ratios above 1 are clipped if A is positive.
    ratios = [[math.exp(x) for x in row] for row in ([0.1, 0.9], [-0.1, 5.0], [-0.9, 0.7], [-0.9, -0.9])]
    advantages, mask = [[1.0, 1.0], [-2.0, -2.0], [-1.0, -1.0], [1.0, 1.0]], [[1, 1], [1, 0], [1, 1], [1, 1]]
    knobs = {"clip_ratio_low": 0.5, "clip_ratio_high": 0.3}
    losses, gradient, metrics = by_hand("geo_mean", ratios, advantages, mask, **knobs)
    s = [math.exp(x) for x in (0.2, -0.1, 0.1, -0.9)]
    expected = [[-s[0], -s[0]], [2 * s[1], 0], [s[2], s[2]], [-s[3], -s[3]]]
    slopes = [[-s[0], 0], [2 * s[1], 0], [0, s[2]], [-s[3], -s[3]]]
    assert losses.tolist() == [pytest.approx(row, rel=1e-12) for row in expected]
    assert gradient.tolist() == [pytest.approx(row, rel=1e-12, abs=0) for row in slopes]
    assert metrics["clip_fraction"] == 2
    assert metrics["ratio_mean"] == pytest.approx(2 * s[0] + s[1] + 2 * s[2] + 2 * s[3])


def test_a_token_without_advantage_is_not_counted_as_clipped_but_is_in_the_mean(by_hand):
    losses, _, metrics = by_hand("geo_mean", [[math.exp(0.9), 1.0, math.exp(-0.9)]], [[0.0, 1.0, 0.0]])
    assert losses[0].tolist() == pytest.approx([0, -math.exp((0.4 + 0 - 0.9) / 3), 0], rel=1e-12)
    assert metrics["clip_fraction"] == 0


def test_D2_token_advantages_clip_each_token_by_its_own_sign(against):
    def oracle(new, old, a, row, **_):
        def clipped(x, advantage):
            return min(x, 0.4) if advantage >= 0 else max(x, -0.4)

        s = math.exp(sum(clipped(x, advantage) for x, advantage in row) / len(row))
        lost = clipped(new - old, a) != new - old
        return -s * a, 0.0 if lost else -s * a, (a > 0, lost)

    assert len(against("geo_mean", oracle)) == 4


def paper_objective(log_probs, old, advantage, mask, low, high):
    """Return the paper's loss: minus the mean over rows of A (prod_t min(r_t A, clip(r_t) A) / A)^(1 / |y|)."""
    rows = []
    for i in mask.any(-1).nonzero().flatten():
        a, product = advantage[i], torch.ones((), dtype=torch.float64)
        for t in mask[i].nonzero().flatten():
            r = torch.exp(log_probs[i, t] - old[i, t])
            product = product * torch.min(r * a, r.clip(math.exp(-low), math.exp(high)) * a) / a
        rows.append(a * product ** (1 / mask[i].sum().item()))
    return -torch.stack(rows).mean()


def test_D3_the_token_form_is_the_papers_sequence_objective(as_sequence_objective):
    as_sequence_objective("geo_mean", paper_objective, 0.3, 0.2)


@pytest.mark.parametrize("knob", ["clip_ratio_low", "clip_ratio_high"])
def test_a_negative_bound_is_refused(knob, by_hand):
    with pytest.raises(ValueError, match=f"{knob}=-0.1 must be >= 0"):
        by_hand("geo_mean", [[1.0]], [[1.0]], **{knob: -0.1})
