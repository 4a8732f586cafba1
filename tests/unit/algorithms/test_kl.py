import math

import pytest
import torch

from rltrain.algorithms import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    aggregate_loss,
    apply_kl_in_reward,
    kl_estimate,
)

BASES = ("k1", "k2", "k3", "abs")
# ref / pi = 2 for the first token and 1/2 for the second, so d = log pi - log ref is -log 2 and log 2
LOG2 = math.log(2)
VALUES = {"k1": [-LOG2, LOG2], "k2": [LOG2**2 / 2] * 2, "k3": [2 - 1 - LOG2, 0.5 - 1 + LOG2], "abs": [LOG2] * 2}


def logits(seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, generator=generator, dtype=torch.float64) + shift


def reverse(pi, ref):
    return (pi.exp() * (pi - ref)).sum()


DIVERGENCES = {
    "reverse": reverse,
    "forward": lambda pi, ref: reverse(ref, pi),
    "variation": lambda pi, ref: (pi.exp() - ref.exp()).abs().sum(),  # twice the total variation
    "mean k2": lambda pi, ref: (pi.exp() * (pi - ref).square() / 2).sum(),
    "mean abs": lambda pi, ref: (pi.exp() * (pi - ref).abs()).sum(),
}
FROM_PI = {"k2": "reverse", "k3": "forward", "abs": "variation", **{f"{base}+": "reverse" for base in BASES}}
FROM_OLD = {
    "k1": "reverse",
    "k3": "reverse",
    "k2": "mean k2",
    "abs": "mean abs",
    **{f"{base}+": "reverse" for base in BASES},
}


def expected_gradient(name, theta, ref, old=None):
    """Mean of the gradient of the estimator over every token, drawn from `old` if given, else from pi itself."""
    pi = theta.log_softmax(-1)
    estimate = kl_estimate(pi, ref, name, old_log_probs=old)
    sampler = pi if old is None else old
    return torch.autograd.grad((sampler.detach().exp() * estimate).sum(), theta)[0]


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_each_estimator_on_a_case_worked_by_hand(name):
    pi = torch.tensor([[0.25, 0.5]], dtype=torch.float64).log()
    ref = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    assert kl_estimate(pi, ref, name).tolist()[0] == pytest.approx(VALUES[name.rstrip("+")], rel=1e-12)
    old = torch.tensor([[0.125, 0.5]], dtype=torch.float64).log()  # ratios 2 and 1
    weighted = kl_estimate(pi, ref, name, old_log_probs=old).tolist()[0]
    first, second = VALUES[name.rstrip("+")]
    assert weighted == pytest.approx([2 * first, second], rel=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_the_reverse_divergence_on_average(name):
    pi, ref = logits(0).log_softmax(-1), logits(1).log_softmax(-1)
    assert (pi.exp() * kl_estimate(pi, ref, name)).sum().item() == pytest.approx(reverse(pi, ref).item(), rel=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
@pytest.mark.parametrize("seed", range(3))
def test_D6_sampled_from_pi_the_expected_gradient_is_what_the_docstring_says(name, seed):
    theta, ref = logits(seed).requires_grad_(), logits(10 + seed).log_softmax(-1)
    gradient = expected_gradient(name, theta, ref)
    if name == "k1":
        assert gradient.abs().max() < 1e-15
        return
    (wanted,) = torch.autograd.grad(DIVERGENCES[FROM_PI[name]](theta.log_softmax(-1), ref), theta)
    assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
@pytest.mark.parametrize("seed", range(3))
def test_D6_times_the_ratio_it_is_that_of_samples_from_an_older_policy(name, seed):
    theta, ref = logits(seed).requires_grad_(), logits(10 + seed).log_softmax(-1)
    old = logits(20 + seed).log_softmax(-1)
    (wanted,) = torch.autograd.grad(DIVERGENCES[FROM_OLD[name]](theta.log_softmax(-1), ref), theta)
    assert torch.allclose(expected_gradient(name, theta, ref, old), wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
@pytest.mark.parametrize("weighted", [False, True])
def test_D4_a_step_lowers_the_divergence_that_the_docstring_names(name, weighted):
    theta, ref = logits(0).requires_grad_(), logits(1).log_softmax(-1)
    if name == "k1" and not weighted:
        pytest.skip("k1 alone names none")
    old = logits(2).log_softmax(-1) if weighted else None
    divergence = DIVERGENCES[(FROM_OLD if weighted else FROM_PI)[name]]
    after = theta - 0.05 * expected_gradient(name, theta, ref, old)
    assert divergence(after.log_softmax(-1), ref) < divergence(theta.log_softmax(-1), ref) - 1e-4


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_D1_D7_at_the_reference_the_estimate_is_zero_and_only_k1_has_a_gradient(name):
    log_probs = logits(0).log_softmax(-1).detach().requires_grad_()
    for old in (None, log_probs.detach()):
        estimate = kl_estimate(log_probs, log_probs.detach(), name, old_log_probs=old)
        (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
        assert (estimate == 0).all()
        assert (gradient == (1 if name == "k1" else 0)).all()


@pytest.mark.parametrize("name", BASES)
def test_gradients_of_the_plain_estimators_pass_gradcheck(name, make_batch):
    batch = make_batch()
    log_probs = batch["log_probs"].requires_grad_()
    ref, old = batch["ref_log_probs"], batch["old_log_probs"]
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, name), log_probs)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, name, old_log_probs=old), log_probs)


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_D9_extreme_log_ratios_stay_finite(name, dtype):
    distance = torch.tensor([-1e3, -100, -21, -19, 0, 19, 21, 100, 1e3], dtype=dtype)
    for old in (None, torch.zeros_like(distance), 2 * distance):
        log_probs = distance.clone().requires_grad_()
        estimate = kl_estimate(log_probs, torch.zeros_like(distance), name, old_log_probs=old)
        (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
        assert estimate.isfinite().all()
        assert gradient.isfinite().all()
        if name == "k3":
            assert (gradient[distance.abs() > 20] == 0).all() or old is not None


def test_a_broken_log_prob_stays_visible_in_a_trained_token():
    log_probs = torch.tensor([[-1.0, torch.nan]])
    estimate = kl_estimate(log_probs, torch.tensor([[-1.5, -1.5]]), "k3")
    assert aggregate_loss(estimate, torch.tensor([[1, 0]]), "token-mean").isfinite()
    assert aggregate_loss(estimate, torch.tensor([[1, 1]]), "token-mean").isnan()


def test_the_reference_and_the_old_policy_get_no_gradient():
    new, ref, old = (logits(seed).requires_grad_() for seed in range(3))
    loss = kl_estimate(new, ref, "k3", old_log_probs=old).sum()
    assert torch.autograd.grad(loss, (ref, old), allow_unused=True) == (None, None)


def test_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"kl_estimator='k4'.*use one of: abs, abs\+, k1"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


def test_D5_the_coefficient_in_the_reward_acts():
    scores, mask = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1, 1]])
    pi = torch.tensor([[0.25, 0.5]], dtype=torch.float64).log().requires_grad_()
    ref = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    for name in KL_ESTIMATORS.names():
        rewards = apply_kl_in_reward(scores, pi, ref, mask, kl_coef=0.5, kl_estimator=name)
        assert rewards.tolist()[0] == pytest.approx([-0.5 * v for v in VALUES[name.rstrip("+")]], rel=1e-12)
        assert not rewards.requires_grad


def test_the_fixed_controller_stays():
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
def test_the_adaptive_controller_moves_in_proportion_clipped_to_a_fifth(kl, factor):
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.2 * factor, rel=1e-12)


def test_the_adaptive_controller_brings_a_responding_kl_to_its_target():
    controller = AdaptiveKLController(0.01, target=2.0, horizon=100)
    for _ in range(500):
        controller.update(1 / controller.value, 50)  # a policy whose KL is inverse to the coefficient
    assert 1 / controller.value == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("make", [lambda: FixedKLController(0.1), lambda: AdaptiveKLController(0.1, 6.0, 1000)])
def test_a_controller_restores_bit_for_bit(make):
    controller, other = make(), make()
    for kl in (1.0, 9.0, 7.3):
        controller.update(kl, 64)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value
    for each in (controller, other):
        each.update(3.3, 64)
    assert other.value == controller.value


@pytest.mark.parametrize(("kl_coef", "target", "horizon"), [(0.0, 6.0, 10), (0.1, 0.0, 10), (0.1, 6.0, 0)])
def test_an_adaptive_controller_that_could_not_move_is_refused(kl_coef, target, horizon):
    with pytest.raises(ValueError, match=f"kl_coef={kl_coef}, target={target}, horizon={horizon}"):
        AdaptiveKLController(kl_coef, target, horizon)


@pytest.mark.parametrize(("kl", "n_steps", "complaint"), [(math.nan, 1, "kl=nan"), (1.0, 50, "horizon above 10")])
def test_an_update_that_would_break_the_coefficient_is_refused(kl, n_steps, complaint):
    controller = AdaptiveKLController(0.1, 6.0, 10)
    with pytest.raises(ValueError, match=complaint):
        controller.update(kl, n_steps)
    assert controller.value == 0.1
