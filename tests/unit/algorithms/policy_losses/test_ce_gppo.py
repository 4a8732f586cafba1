import math

import pytest

# each case with low = 0.1, high = 0.3, c = 4, beta_low = 0.5 and beta_high = 2 is
# (ratio, advantage, loss, gradient, tokens in weight_clip_fraction, tokens in clip_fraction_c)
CASES = [
    (1.0, 2.0, -2.0, -2.0, 0, 0),
    (0.5, 2.0, -1.0, -1.0, 0, 0),
    (1.5, 2.0, -5.2, -5.2, 1, 0),
    (9.0, 2.0, -5.2, -5.2, 1, 0),
    (1.5, -2.0, 3.0, 3.0, 0, 0),
    (0.5, -2.0, 0.9, 0.9, 1, 0),
    (5.0, -2.0, 8.0, 0.0, 0, 1),
    (5.0, 0.0, 0.0, 0.0, 0, 0),
]
KNOBS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 4.0, "beta_low": 0.5, "beta_high": 2.0}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped", "clipped_c"), CASES)
def test_D2_clipped_tokens_keep_a_bounded_gradient(ratio, advantage, loss, gradient, clipped, clipped_c, by_hand):
    losses, actual, metrics = by_hand("ce_gppo", [[ratio]], [[advantage]], **KNOBS)
    assert losses.item() == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert actual.item() == pytest.approx(gradient, rel=1e-12, abs=0)
    assert (metrics["weight_clip_fraction"], metrics["clip_fraction_c"]) == (clipped, clipped_c)
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_mean"] == pytest.approx(ratio)


def test_the_defaults_are_the_papers_values_for_7b(by_hand):
    losses, gradient, metrics = by_hand("ce_gppo", [[0.5, 9.0, 9.9, 10.1]], [[-1.0, 1.0, -1.0, -1.0]])
    assert losses[0].tolist() == pytest.approx([0.75 * 0.8, -1.2, 9.9, 10.0])
    assert gradient[0].tolist() == pytest.approx([0.75 * 0.8, -1.2, 9.9, 0.0])
    assert metrics["clip_fraction_c"] == 1


def test_ce_gppo_equals_an_oracle_token_by_token(against):
    def oracle(new, old, a, **_):
        r = math.exp(new - old)
        if a < 0 and r < 0.9:
            return -0.5 * 0.9 * a, -0.5 * 0.9 * a, "low"
        if a > 0 and r > 1.3:
            return -2.0 * 1.3 * a, -2.0 * 1.3 * a, "high"
        if a < 0 and r > 2.0:
            return -2.0 * a, 0.0, "dual"
        return -r * a, -r * a, "kept"

    assert against("ce_gppo", oracle, **{**KNOBS, "clip_ratio_c": 2.0}) == {"low", "high", "dual", "kept"}


def test_a_dual_clip_of_infinity_is_none(by_hand):
    assert by_hand("ce_gppo", [[1e6]], [[-1.0]], clip_ratio_c=math.inf)[1].item() == pytest.approx(1e6)


@pytest.mark.parametrize("knob", ["beta_low", "beta_high"])
@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
def test_a_beta_that_is_not_a_positive_number_is_refused(knob, value, by_hand):
    with pytest.raises(ValueError, match=f"{knob}={value} must be finite and > 0"):
        by_hand("ce_gppo", [[1.0]], [[1.0]], **{knob: value})


def test_clip_ratios_that_act_at_ratio_one_are_refused(by_hand):
    for knobs, message in (
        ({"clip_ratio_low": -0.1}, "clip_ratio_low=-0.1 must be >= 0"),
        ({"clip_ratio_high": -0.1}, "clip_ratio_high=-0.1 must be >= 0"),
        ({"clip_ratio_c": 1.0}, r"clip_ratio_c=1\.0 must be > 1"),
    ):
        with pytest.raises(ValueError, match=message):
            by_hand("ce_gppo", [[1.0]], [[1.0]], **knobs)
