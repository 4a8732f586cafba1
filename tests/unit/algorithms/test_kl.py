import math

import pytest
import torch

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
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
    # L1 distance of the two distributions, which is twice the total variation
    "variation": lambda pi, ref: (pi.exp() - ref.exp()).abs().sum(),
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
    """Return the estimator's expected gradient over tokens sampled from `old` if given, else from pi.

    The expectation is exact, because it sums over all tokens of the vocabulary.
    """
    pi = theta.log_softmax(-1)
    estimate = kl_estimate(pi, ref, name, old_log_probs=old)
    sampler = pi if old is None else old
    return torch.autograd.grad((sampler.detach().exp() * estimate).sum(), theta)[0]


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_each_estimator_on_a_case_worked_by_hand(name):
    pi = torch.tensor([[0.25, 0.5]], dtype=torch.float64).log()
    ref = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    assert kl_estimate(pi, ref, name).tolist()[0] == pytest.approx(VALUES[name.rstrip("+")], rel=1e-12)
    old = torch.tensor([[0.125, 0.5]], dtype=torch.float64).log()  # the ratios pi / pi_old are 2 and 1
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


@pytest.mark.parametrize(
    ("name", "weighted"), [*((name, False) for name in FROM_PI), *((name, True) for name in FROM_OLD)]
)
def test_D4_a_step_lowers_the_divergence_that_the_docstring_names(name, weighted):
    """A gradient step lowers the divergence that an estimator's docstring names.

    The estimator k1 without importance weights is not tested, because its expected gradient is 0.
    """
    theta, ref = logits(0).requires_grad_(), logits(1).log_softmax(-1)
    old = logits(2).log_softmax(-1) if weighted else None
    divergence = DIVERGENCES[(FROM_OLD if weighted else FROM_PI)[name]]
    after = theta - 0.05 * expected_gradient(name, theta, ref, old)
    assert divergence(after.log_softmax(-1), ref) < divergence(theta.log_softmax(-1), ref) - 1e-4


def test_the_divergences_named_here_cover_every_estimator():
    assert {"k1", *FROM_PI} == set(FROM_OLD) == set(KL_ESTIMATORS.names())


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_times_the_ratio_the_mean_of_an_older_policys_samples_is_that_of_samples_from_pi(name):
    pi, ref, old = (logits(seed).log_softmax(-1) for seed in range(3))
    weighted = (old.exp() * kl_estimate(pi, ref, name, old_log_probs=old)).sum()
    assert weighted.item() == pytest.approx((pi.exp() * kl_estimate(pi, ref, name)).sum().item(), rel=1e-12)


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
    # the log-ratios are clamped, because k3 is not differentiable at its bound
    ref = log_probs.detach() + (ref - log_probs.detach()).clamp(-2.5, 2.5)
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
            assert (gradient[distance.abs() > 12] == 0).all()


def test_a_broken_log_prob_stays_visible_in_a_trained_token():
    log_probs = torch.tensor([[-1.0, torch.nan]])
    estimate = kl_estimate(log_probs, torch.tensor([[-1.5, -1.5]]), "k3")
    assert aggregate_loss(estimate, torch.tensor([[1, 0]]), "token-mean").isfinite()
    assert aggregate_loss(estimate, torch.tensor([[1, 1]]), "token-mean").isnan()


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_where_an_input_is_broken_the_estimate_is_nan_and_no_gradient_goes_back(broken, value):
    inputs = [torch.tensor([[-1.0, -2.0]], dtype=torch.float64) for _ in range(3)]
    inputs[broken][0, 1] = value
    new, ref, old = inputs
    new.requires_grad_()
    estimate = kl_estimate(new, ref - 0.5, "k1", old_log_probs=old)
    (gradient,) = torch.autograd.grad(estimate.nansum(), new)
    assert estimate.isnan().tolist() == [[False, True]]
    # the estimate is r d with the importance ratio r, and its derivative is r (1 + d)
    assert gradient.tolist() == [[1.5, 0.0]]


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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_D5_the_coefficient_in_the_loss_acts_in_proportion(name, weighted, make_batch, call):
    batch = make_batch()
    log_probs, mask = batch["log_probs"].requires_grad_(), batch["response_mask"]
    old = batch["old_log_probs"] if weighted else None

    def gradient(kl_coef):
        policy, _ = call(POLICY_LOSSES.get("vanilla"), batch)
        kl = kl_estimate(log_probs, batch["ref_log_probs"], name, old_log_probs=old)
        loss = aggregate_loss(policy, mask, "token-mean") + kl_coef * aggregate_loss(kl, mask, "token-mean")
        return torch.autograd.grad(loss, log_probs)[0]

    off, small, large = gradient(0.0), gradient(0.01), gradient(0.03)
    assert (small - off).abs().max() > 1e-4
    assert torch.allclose(large - off, 3 * (small - off), rtol=1e-9, atol=1e-15)


def one_step_of_grpo(name, kl_coef):
    """Return the loss, gradient and inputs of one on-policy GRPO step on two groups of two rows.

    The rows have 3, 1, 2 and 4 tokens.
    """
    mask = torch.arange(4) < torch.tensor([[3], [1], [2], [4]])
    generator = torch.Generator().manual_seed(0)
    old, ref = (-torch.rand(4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    scores = torch.zeros(4, 4, dtype=torch.float64)
    # the first group has the rows 0 and 2, and the second group has the rows 1 and 3
    scores[:, 0] = torch.tensor([1.0, 0.0, 0.3, 2.0])
    uid, valid = torch.tensor([7, 3, 7, 3]), torch.ones(4, dtype=torch.bool)
    advantages, _ = ADVANTAGE_ESTIMATORS.get("grpo")(scores, mask, uid, valid)
    log_probs = old.clone().requires_grad_()
    policy, _ = POLICY_LOSSES.get("vanilla")(log_probs, old, advantages, mask)
    kl = kl_estimate(log_probs, ref, name)
    loss = aggregate_loss(policy + kl_coef * kl, mask, "seq-mean-token-mean")
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient, advantages, old, ref, mask


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_D7_on_policy_grpo_with_whole_groups_has_the_loss_beta_times_kl(name):
    loss, _, advantages, old, ref, mask = one_step_of_grpo(name, 0.04)
    per_row = [kl_estimate(old[i], ref[i], name)[mask[i]].mean().item() for i in range(4)]
    assert advantages.abs().max() > 0.5  # the advantages are far from 0, but the policy losses of a group cancel
    assert loss == pytest.approx(0.04 * sum(per_row) / 4, rel=1e-10)


def test_D7_the_gradient_of_a_token_of_grpo_with_k3_is_the_papers():
    """The gradient averages -(A + beta (pi_ref / pi - 1)) grad log pi over tokens, then rows (arXiv 2402.03300)."""
    _, gradient, advantages, old, ref, mask = one_step_of_grpo("k3", 0.04)
    for i, t in mask.nonzero().tolist():
        push = advantages[i, t].item() + 0.04 * (math.exp(ref[i, t] - old[i, t]) - 1)
        assert gradient[i, t].item() == pytest.approx(-push / (mask[i].sum().item() * 4), rel=1e-10)
    assert (gradient[~mask] == 0).all()


# Each case is (d = log pi - log ref, k3, gradient of k3).
# Where k3 is below 10, the gradient is 1 - e^-d. Elsewhere, k3 is 10 and the gradient is 0.
BOUNDED_K3 = [
    (-1000.0, 10.0, 0.0),
    (-12.0, 10.0, 0.0),
    (-2.7, 10.0, 0.0),
    (-2.5, math.exp(2.5) - 3.5, 1 - math.exp(2.5)),
    (0.0, 0.0, 0.0),
    (10.9, 9.9 + math.exp(-10.9), 1 - math.exp(-10.9)),
    (11.1, 10.0, 0.0),
    (1000.0, 10.0, 0.0),
]


@pytest.mark.parametrize(("distance", "value", "gradient"), BOUNDED_K3)
def test_k3_is_at_most_10_a_token_and_has_no_gradient_beyond(distance, value, gradient):
    log_probs = torch.tensor([distance], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(log_probs, torch.zeros(1, dtype=torch.float64), "k3")
    (actual,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert estimate.item() == pytest.approx(value, rel=1e-12)
    assert actual.item() == pytest.approx(gradient, rel=1e-12)


@pytest.mark.parametrize(("distance", "value", "gradient"), BOUNDED_K3)
def test_k3_plus_reports_at_most_10_and_keeps_the_gradient_of_k2(distance, value, gradient):
    log_probs = torch.tensor([distance], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(log_probs, torch.zeros(1, dtype=torch.float64), "k3+")
    (actual,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert (estimate.item(), actual.item()) == (pytest.approx(value, rel=1e-12), distance)


@pytest.mark.parametrize(("distance", "value", "gradient"), BOUNDED_K3)
def test_k3_times_the_ratio_has_no_gradient_through_the_ratio_either_where_k3_is_at_its_bound(
    distance, value, gradient
):
    """The gradient is r d with the importance ratio r = 2 and d = log pi - log ref, and 0 where k3 is at its bound.

    At k3's bound of 10, the gradient 10 r of the ratio alone would drive log pi away from the reference.
    """
    log_probs = torch.tensor([distance], dtype=torch.float64, requires_grad=True)
    old = log_probs.detach() - LOG2
    estimate = kl_estimate(log_probs, torch.zeros(1, dtype=torch.float64), "k3", old_log_probs=old)
    (actual,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert estimate.item() == pytest.approx(2 * value, rel=1e-12)
    assert actual.item() == pytest.approx(2 * distance if gradient else 0.0, rel=1e-12)


def test_k3_in_the_reward_is_at_most_10_a_token_too():
    scores, mask = torch.zeros(1, 2), torch.ones(1, 2)
    distances = torch.tensor([[-12.0, 12.0]])
    rewards = apply_kl_in_reward(scores, distances, torch.zeros(1, 2), mask, kl_coef=0.5, kl_estimator="k3")
    assert rewards.tolist() == [[-5.0, -5.0]]


def test_the_penalty_in_the_reward_leaves_the_score_and_skips_masked_tokens():
    scores = torch.tensor([[0.0, 2.0, torch.nan]], dtype=torch.float64, requires_grad=True)
    pi = torch.tensor([[0.25, 0.5, torch.nan]], dtype=torch.float64).log()
    ref = torch.tensor([[0.5, 0.25, 1.0]], dtype=torch.float64).log()
    rewards = apply_kl_in_reward(scores, pi, ref, torch.tensor([[1, 1, 0]]), kl_coef=0.5, kl_estimator="k1")
    assert rewards.tolist()[0] == pytest.approx([0.5 * LOG2, 2 - 0.5 * LOG2, 0.0], rel=1e-12)
    assert not rewards.requires_grad
