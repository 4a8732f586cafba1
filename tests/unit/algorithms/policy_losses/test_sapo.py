import math

import pytest


def gate(r, tau):
    """Return SAPO's gate f(r) = 4 p / tau with p = sigmoid(tau (r - 1)), and its derivative f'(r) = 4 p (1 - p)."""
    p = 1 / (1 + math.exp(-tau * (r - 1)))
    return p * 4 / tau, 4 * p * (1 - p)


def test_at_ratio_one_the_value_is_two_over_tau_and_the_slope_is_one(by_hand):
    losses, gradient, metrics = by_hand("sapo", [[1.0, 1.0, 1.0]], [[3.0, -3.0, 0.0]], tau_pos=2.0, tau_neg=4.0)
    assert losses[0].tolist() == pytest.approx([-3.0, 1.5, 0.0], rel=1e-12)
    assert gradient[0].tolist() == pytest.approx([-3.0, 3.0, 0.0], rel=1e-12)
    assert metrics["gate_mean"] == pytest.approx(3.0)
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
@pytest.mark.parametrize("ratio", [0.2, 3.0])
def test_D2_off_the_old_policy_the_gate_fades_by_hand(ratio, advantage, tau, by_hand):
    losses, gradient, metrics = by_hand("sapo", [[ratio]], [[advantage]])
    value, slope = gate(ratio, tau)
    assert losses.item() == pytest.approx(-advantage * value, rel=1e-12)
    assert gradient.item() == pytest.approx(-advantage * slope * ratio, rel=1e-12)
    assert metrics["gate_mean"] == pytest.approx(slope, rel=1e-12)
    assert metrics["ratio_mean"] == pytest.approx(ratio)
    assert slope < 1


def test_a_token_without_advantage_counts_with_tau_neg(by_hand):
    losses, gradient, metrics = by_hand("sapo", [[3.0]], [[0.0]], tau_pos=1.0, tau_neg=2.0)
    assert losses.item() == gradient.item() == 0
    assert metrics["gate_mean"] == pytest.approx(gate(3.0, 2.0)[1], rel=1e-12)


def test_sapo_equals_an_oracle_token_by_token(against, gradcheck):
    def oracle(new, old, a, **_):
        r = math.exp(new - old)
        value, slope = gate(r, 0.7 if a > 0 else 2.0)
        return -value * a, -slope * r * a, a > 0

    assert against("sapo", oracle, tau_pos=0.7, tau_neg=2.0) == {True, False}
    assert gradcheck("sapo")


@pytest.mark.parametrize("knob", ["tau_pos", "tau_neg"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_no_temperature_is_refused(knob, value, by_hand):
    with pytest.raises(ValueError, match=f"{knob}={value} must be finite and > 0"):
        by_hand("sapo", [[1.0]], [[1.0]], **{knob: value})
