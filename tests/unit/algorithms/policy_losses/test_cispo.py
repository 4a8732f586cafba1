import math

import pytest

# each CISPO case is (ratio, advantage, weight, number of tokens counted in weight_clip_fraction)
CASES = [
    (1.0, 2.0, 1.0, 0),
    (0.6, 2.0, 0.6, 0),
    (0.4, 2.0, 0.5, 1),
    (0.4, -2.0, 0.5, 1),
    (2.9, -2.0, 2.9, 0),
    (9.0, 2.0, 3.0, 1),
    (9.0, -2.0, 3.0, 1),
]


@pytest.mark.parametrize(("ratio", "advantage", "weight", "counted"), CASES)
def test_D2_the_weight_is_clipped_and_no_gradient_is_lost(ratio, advantage, weight, counted, by_hand):
    losses, gradient, metrics = by_hand("cispo", [[ratio]], [[advantage]], clip_ratio_low=0.5, clip_ratio_high=2.0)
    assert losses.item() == pytest.approx(-weight * advantage * math.log(0.1 * ratio), rel=1e-12)
    assert gradient.item() == pytest.approx(-weight * advantage, rel=1e-12)
    assert metrics["weight_clip_fraction"] == counted
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_mean"] == pytest.approx(ratio)


def test_cispo_clips_to_zero_and_five_by_default(by_hand):
    _, gradient, metrics = by_hand("cispo", [[4.9, 5.1, 1e-4]], [[1.0, 1.0, 1.0]])
    assert gradient[0].tolist() == pytest.approx([-4.9, -5.0, -1e-4], rel=1e-12)
    assert metrics["weight_clip_fraction"] == 1


def test_a_ratio_on_the_edge_is_not_counted(by_hand):
    assert by_hand("cispo", [[1.0]], [[1.0]], clip_ratio_low=0.0, clip_ratio_high=0.0)[2]["weight_clip_fraction"] == 0


def test_cispo_equals_an_oracle_token_by_token(against):
    def oracle(new, old, a, **_):
        r = math.exp(new - old)
        weight = min(max(r, 0.7), 1.5)
        return -weight * a * new, -weight * a, (r < 0.7, r > 1.5)

    branches = against("cispo", oracle, clip_ratio_low=0.3, clip_ratio_high=0.5)
    assert branches == {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("knob", ["clip_ratio_low", "clip_ratio_high"])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_range_without_ratio_one_is_refused(knob, value, by_hand):
    with pytest.raises(ValueError, match=f"{knob}={value} must be >= 0"):
        by_hand("cispo", [[1.0]], [[1.0]], **{knob: value})
