import math

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES
from rltrain.algorithms.policy_losses import dppo_kl

# each total-variation (TV) case is (pi_old, pi, advantage, whether the token is dropped), with both deltas at 0.2
TV = [
    (0.5, 0.69, 1.0, False),
    (0.5, 0.71, 1.0, True),
    (0.5, 0.71, -1.0, False),
    (0.5, 0.31, -1.0, False),
    (0.5, 0.29, -1.0, True),
    (0.5, 0.29, 1.0, False),
    (0.5, 0.29, 0.0, False),
    (0.5, 0.71, 0.0, False),
    (0.01, 0.2, 1.0, False),  # the ratio is 20, but the total variation is below 0.2
]
# each KL case is (pi_old, pi, advantage, whether the token is dropped), with both deltas at 0.1.
# KL(0.5 || 0.71) = KL(0.5 || 0.29) = 0.097 is below the deltas, and KL(0.5 || 0.72) = KL(0.5 || 0.28) = 0.107 is above
KL = [
    (0.5, 0.71, 1.0, False),
    (0.5, 0.72, 1.0, True),
    (0.5, 0.72, -1.0, False),
    (0.5, 0.29, -1.0, False),
    (0.5, 0.28, -1.0, True),
    (0.5, 0.28, 1.0, False),
    (0.5, 0.28, 0.0, False),
    (0.5, 0.72, 0.0, False),
]
CASES = [("dppo_tv", 0.2, *case) for case in TV] + [("dppo_kl", 0.1, *case) for case in KL]


@pytest.mark.parametrize(("name", "delta", "old", "new", "advantage", "dropped"), CASES)
def test_D2_a_token_is_dropped_once_it_has_moved_too_far(name, delta, old, new, advantage, dropped, by_hand):
    knobs = {"delta_low": delta, "delta_high": delta}
    losses, gradient, metrics = by_hand(name, [[new / old]], [[advantage]], old_probability=old, **knobs)
    weight = 0.0 if dropped else advantage * new / old
    assert losses.item() == pytest.approx(-weight * math.log(new), rel=1e-12, abs=0)
    assert gradient.item() == pytest.approx(-weight, rel=1e-12, abs=0)
    assert metrics["clip_fraction"] == dropped
    assert metrics["ratio_mean"] == pytest.approx(new / old)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_two_deltas_bound_the_two_directions(name, by_hand):
    ratios, advantages = [[1.5, 0.5]], [[1.0, -1.0]]
    for low, high in ((0.0, 1.0), (1.0, 0.0)):
        knobs = {"delta_low": low, "delta_high": high}
        _, gradient, _ = by_hand(name, ratios, advantages, old_probability=0.4, **knobs)
        assert (gradient == 0).tolist() == [[high == 0, low == 0]]


@pytest.mark.parametrize(("name", "inside", "outside"), [("dppo_tv", 0.149, 0.151), ("dppo_kl", 0.154, 0.156)])
def test_the_defaults_are_those_of_the_registry(name, inside, outside, by_hand):
    # KL(0.5 || 0.5 + x) = -log(1 - 4 x^2) / 2 reaches the default bound 0.05 at x = 0.1542, between 0.154 and 0.156
    ratios, advantages = [[1 + 2 * inside, 1 + 2 * outside, 1 - 2 * inside, 1 - 2 * outside]], [[1.0, 1.0, -1.0, -1.0]]
    _, gradient, _ = by_hand(name, ratios, advantages, old_probability=0.5)
    assert (gradient == 0).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_weight_is_capped_and_a_capped_token_keeps_its_gradient(name, by_hand):
    ratios, advantages = [[19.0, 21.0, 4.0, 6.0]], [[-1.0, -1.0, 1.0, 1.0]]
    _, gradient, metrics = by_hand(name, ratios, advantages, old_probability=1e-3)
    assert gradient[0].tolist() == pytest.approx([19.0, 20.0, -4.0, -6.0], rel=1e-12)
    assert metrics["weight_clip_fraction"] == 1
    _, gradient, metrics = by_hand(name, ratios, advantages, old_probability=1e-3, clip_ratio_c=5.0)
    assert gradient[0].tolist() == pytest.approx([5.0, 5.0, -4.0, -5.0], rel=1e-12)
    assert metrics["weight_clip_fraction"] == 3
    knobs = {"clip_ratio_c": 5.0, "delta_low": 0.0, "delta_high": 0.0}
    assert by_hand(name, ratios, advantages, old_probability=1e-3, **knobs)[2]["weight_clip_fraction"] == 2
    assert by_hand(name, ratios, advantages, old_probability=1e-3, **knobs)[2]["clip_fraction"] == 2


def total_variation(p, q):
    return abs(q - p)


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(("name", "distance"), [("dppo_tv", total_variation), ("dppo_kl", binary_kl)])
def test_dppo_equals_an_oracle_token_by_token(name, distance, against):
    def oracle(new, old, a, **_):
        r, limit = math.exp(new - old), 0.07 if a > 0 else 0.04
        p, q = math.exp(old), min(math.exp(new), 1 - 1e-15)
        away = q > p if a > 0 else q < p
        dropped = away and distance(p, q) > limit
        weight = 0.0 if dropped else a * min(r, 2.0)
        return -weight * new, -weight, (a > 0, away, dropped)

    knobs = {"delta_low": 0.04, "delta_high": 0.07, "clip_ratio_c": 2.0}
    seen = against(name, oracle, length=40, **knobs)
    assert seen == {(s, away, dropped) for s in (True, False) for away, dropped in ((0, 0), (1, 0), (1, 1))}


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_D9_certain_and_impossible_tokens_stay_finite(name, dtype):
    ends = torch.tensor([0.0, -1e-9, -1.0, -50.0, -1e3, 5.0], dtype=dtype)
    log_probs, old = (grid.reshape(1, -1).clone() for grid in torch.meshgrid(ends, ends, indexing="ij"))
    for advantage in (1.0, -1.0):
        leaf = log_probs.clone().requires_grad_()
        losses, metrics = POLICY_LOSSES.get(name)(leaf, old, torch.full_like(old, advantage), torch.ones_like(old))
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()
        assert all(value.isfinite() for value in metrics.values())
        same = (log_probs == old)[0]
        assert gradient[0][same].tolist() == pytest.approx([-advantage] * len(ends))
        lost = (log_probs == (0.0 if advantage > 0 else -50.0)) & (old == -1.0)
        assert gradient[lost].tolist() == [0.0]  # the probability moved from 0.37 to 1 or to 0, which is too far


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("knob", ["delta_low", "delta_high"])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_delta_that_drops_everything_is_refused(name, knob, value, by_hand):
    with pytest.raises(ValueError, match=f"{knob}={value} must be >= 0"):
        by_hand(name, [[1.0]], [[1.0]], **{knob: value})


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_cap_that_acts_at_ratio_one_is_refused(name, value, by_hand):
    with pytest.raises(ValueError, match=f"clip_ratio_c={value} must be > 1"):
        by_hand(name, [[1.0]], [[1.0]], clip_ratio_c=value)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(("new", "advantage"), [(0.7, 1.0), (0.3, -1.0)])
def test_a_token_that_has_moved_exactly_to_the_bound_is_kept(name, new, advantage, by_hand):
    old, log_ratio = (torch.tensor(value, dtype=torch.float64).log() for value in (0.5, new / 0.5))
    moved = abs((old + log_ratio).exp() - old.exp()) if name == "dppo_tv" else dppo_kl.binary_kl(old, old + log_ratio)
    for delta, dropped in ((moved.item(), False), (math.nextafter(moved.item(), 0), True)):
        knobs = {"delta_low": delta, "delta_high": delta}
        _, gradient, _ = by_hand(name, [[new / 0.5]], [[advantage]], old_probability=0.5, **knobs)
        assert bool(gradient == 0) == dropped
