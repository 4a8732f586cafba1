import math

import pytest
import torch

from rltrain.algorithms import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedEntropyController,
    FixedKLController,
)


def test_the_fixed_kl_controller_stays():
    controller = FixedKLController(0.2)
    controller.update(100.0, 1000)
    assert controller.value == 0.2


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 0.1),
        (5.4, 1 - 0.1 * 0.1),
        (600.0, 1 + 0.2 * 0.1),
        (0.0, 1 - 0.2 * 0.1),
        (torch.tensor(600.0), 1.02),
    ],
)
def test_the_adaptive_kl_controller_moves_in_proportion_clipped_to_a_fifth(kl, factor):
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.2 * factor, rel=1e-12)


def test_the_adaptive_kl_controller_brings_a_responding_kl_to_its_target():
    controller = AdaptiveKLController(0.01, target=2.0, horizon=100)
    for _ in range(500):
        # the simulated policy has a KL that is inversely proportional to the coefficient
        controller.update(1 / controller.value, 50)
    assert 1 / controller.value == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("make", [lambda: FixedKLController(0.1), lambda: AdaptiveKLController(0.1, 6.0, 1000)])
def test_a_kl_controller_restores_bit_for_bit(make):
    controller, other = make(), make()
    for kl in (1.0, 9.0, 7.3):
        controller.update(kl, 64)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value
    for each in (controller, other):
        each.update(3.3, 64)
    assert other.value == controller.value


@pytest.mark.parametrize(("kl_coef", "target", "horizon"), [(0.0, 6.0, 10), (0.1, 0.0, 10), (0.1, 6.0, 0)])
def test_an_adaptive_kl_controller_that_could_not_move_is_refused(kl_coef, target, horizon):
    with pytest.raises(ValueError, match=f"kl_coef={kl_coef}, target={target}, horizon={horizon}"):
        AdaptiveKLController(kl_coef, target, horizon)


@pytest.mark.parametrize(
    ("kl", "n_steps", "complaint"),
    [
        (math.nan, 1, "kl=nan: the controller needs a finite KL"),
        (math.inf, 1, "kl=inf: the controller needs a finite KL"),
        (1.0, 50, r"n_steps=50 with horizon=10: n_steps must be under 5 \* horizon, .* use a horizon above 10"),
    ],
)
def test_a_kl_update_that_would_break_the_coefficient_is_refused(kl, n_steps, complaint):
    controller = AdaptiveKLController(0.1, 6.0, 10)
    with pytest.raises(ValueError, match=complaint):
        controller.update(kl, n_steps)
    assert controller.value == 0.1


def test_the_largest_step_that_cannot_turn_the_coefficient_negative_is_taken():
    controller = AdaptiveKLController(0.1, 6.0, 10)
    controller.update(0.0, 49)
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 4.9))


def test_a_kl_checkpoint_holds_the_coefficient():
    assert FixedKLController(1).state_dict() == {"kl_coef": 1.0}
    assert AdaptiveKLController(0.1, 6.0, 10).state_dict() == {"kl_coef": 0.1}


def test_the_fixed_entropy_controller_stays():
    controller = FixedEntropyController(0.25)
    for entropy in (0.0, 100.0, math.nan):
        controller.update(entropy)
    assert controller.value == 0.25
    assert controller.state_dict() == {"value": 0.25}
    assert FixedEntropyController(0).value == 0.0


# each step is (measured entropy, new coefficient, applied coefficient), for target 0.5, start 0.25 and step size 0.125
ENTROPY_STEPS = [
    (0.4, 0.375, 0.375),  # entropy below the target: the coefficient rises, and the bonus is on
    (0.4, 0.5, 0.5),
    (0.5, 0.5, 0.5),  # entropy at the target: the coefficient stays, and the bonus is on
    (0.6, 0.375, 0.0),  # entropy above the target: the coefficient falls, and the bonus is off
    (0.5, 0.375, 0.375),  # entropy at the target again: the bonus is on, with an unchanged coefficient
    (torch.tensor(9.0), 0.25, 0.0),  # the coefficient moves by one step, however far the entropy is from the target
    (9.0, 0.125, 0.0),
    (9.0, 0.0, 0.0),
    (9.0, 0.0, 0.0),  # the coefficient never falls below 0
    (0.0, 0.125, 0.125),
]


def test_the_entropy_bonus_grows_while_entropy_is_low_and_is_off_while_it_is_high():
    controller = AdaptiveEntropyController(0.25, target=0.5, step=0.125, maximum=9.0)
    assert controller.value == 0.25
    for entropy, entropy_coef, value in ENTROPY_STEPS:
        controller.update(entropy)
        assert (controller.entropy_coef, controller.value) == (entropy_coef, value)
        assert isinstance(controller.value, float)


def test_the_adaptive_entropy_controller_keeps_a_responding_entropy_from_collapsing():
    controller, entropy, lowest = AdaptiveEntropyController(0.0, target=1.0, step=0.005, maximum=0.1), 3.0, math.inf
    for step in range(2000):
        entropy *= 0.98  # without a bonus, training lowers the entropy
        entropy += controller.value
        controller.update(entropy)
        if step > 500:
            lowest = min(lowest, entropy)
    assert lowest > 0.9
    assert entropy < 1.2


def test_a_target_that_cannot_be_reached_raises_the_coefficient_to_its_maximum_and_no_further():
    controller = AdaptiveEntropyController(0.0, target=0.2, step=0.0001, maximum=0.005)
    for _ in range(1000):
        controller.update(0.01)
    assert (controller.entropy_coef, controller.value) == (0.005, 0.005)
    controller.update(0.3)
    controller.update(0.1)
    assert controller.value == 0.005


def test_a_coefficient_above_the_maximum_is_loaded_as_the_maximum():
    controller = AdaptiveEntropyController(0.0, target=0.2, step=0.001, maximum=0.005)
    controller.load_state_dict({"value": 0.4, "entropy_coef": 0.4})
    assert controller.state_dict() == {"value": 0.005, "entropy_coef": 0.005}
    controller.update(0.1)
    assert controller.value == 0.005


@pytest.mark.parametrize("maximum", [0.2, math.nan, math.inf])
def test_a_maximum_below_the_start_or_without_end_is_refused(maximum):
    with pytest.raises(ValueError, match=f"maximum={maximum} must be finite and at least entropy_coef=0.25, where"):
        AdaptiveEntropyController(0.25, target=0.5, step=0.1, maximum=maximum)


@pytest.mark.parametrize(
    "make",
    [lambda: FixedEntropyController(0.1), lambda: AdaptiveEntropyController(0.1, target=0.5, step=0.03, maximum=0.14)],
)
@pytest.mark.parametrize("entropies", [(), (0.1, 0.2), (0.1, 0.9), (0.9, 0.1, 0.9)])
def test_an_entropy_controller_restores_bit_for_bit(make, entropies):
    controller, other = make(), make()
    for entropy in entropies:
        controller.update(entropy)
    other.load_state_dict(controller.state_dict())
    assert other.state_dict() == controller.state_dict()
    assert other.value == controller.value
    for each in (controller, other):
        each.update(0.2)
    assert other.value == controller.value


@pytest.mark.parametrize("entropy_coef", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("make", [FixedEntropyController, lambda c: AdaptiveEntropyController(c, 0.5, 0.1, 1.0)])
def test_an_entropy_coefficient_that_is_no_bonus_is_refused(make, entropy_coef):
    with pytest.raises(ValueError, match=f"entropy_coef={entropy_coef} must be finite and >= 0: .* use 0 for no bonus"):
        make(entropy_coef)


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["target", "step"])
def test_an_adaptive_entropy_controller_that_could_not_move_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be finite and > 0, .* or a fixed coefficient"):
        AdaptiveEntropyController(0.1, **{"target": 0.5, "step": 0.1, "maximum": 1.0, name: value})


@pytest.mark.parametrize("entropy", [math.nan, math.inf, -math.inf])
def test_an_entropy_that_is_not_finite_is_refused_and_changes_nothing(entropy):
    controller = AdaptiveEntropyController(0.25, target=0.5, step=0.1, maximum=1.0)
    with pytest.raises(ValueError, match=f"entropy={entropy}: the controller needs a finite entropy; look for"):
        controller.update(entropy)
    assert controller.state_dict() == {"value": 0.25, "entropy_coef": 0.25}
