"""Tests of decoupled GAE (VC-PPO) and of length-adaptive GAE (VAPO)."""

import math

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, aggregate_loss

gae = ADVANTAGE_ESTIMATORS.get("gae")
decoupled_gae = ADVANTAGE_ESTIMATORS.get("decoupled_gae")
length_adaptive_gae = ADVANTAGE_ESTIMATORS.get("length_adaptive_gae")

# Both rows have the same trained tokens. The tool tokens (99) are at the end of the first row, and between the trained
# tokens of the second row.
REWARDS = torch.tensor([[0.0, 0.0, 1.0, 99, 99], [0.0, 99, 0.0, 99, 1.0]], dtype=torch.float64)
VALUES = torch.tensor([[0.5, 0.25, 0.75, 99, 99], [0.5, 99, 0.25, 99, 0.75]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 0, 1]])
# With gamma 1, the TD errors are delta = (0.25 - 0.5, 0.75 - 0.25, 1 - 0.75) = (-0.25, 0.5, 0.25).


def spread(one, two, three):
    """Return the three numbers at the trained tokens of `MASK`, and 0 elsewhere."""
    return torch.tensor([[one, two, three, 0, 0], [one, 0, two, 0, three]], dtype=torch.float64)


def oracle(rewards, mask, values, *, gamma, lam_of, lam_critic):
    """Compute the sums of VC-PPO token by token, with lambda = `lam_of(length)` for the advantages."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(len(rewards)):
        trained = mask[row].nonzero()[:, 0].tolist()
        length = len(trained)
        later = [*(float(values[row, t]) for t in trained[1:]), 0.0][:length]
        errors = [
            float(rewards[row, t]) + gamma * after - float(values[row, t])
            for t, after in zip(trained, later, strict=True)
        ]
        for number, t in enumerate(trained):
            ahead = errors[number:]
            advantages[row, t] = sum((gamma * lam_of(length)) ** k * error for k, error in enumerate(ahead))
            returns[row, t] = values[row, t] + sum((gamma * lam_critic) ** k * error for k, error in enumerate(ahead))
    return advantages, returns


def test_B7_decoupled_gae_on_a_case_worked_by_hand():
    advantages, returns = decoupled_gae(REWARDS, MASK, VALUES, lam=0.5)
    # A_3 = 0.25; A_2 = 0.5 + 0.5 * 0.25; A_1 = -0.25 + 0.5 * 0.625
    assert torch.equal(advantages, spread(0.0625, 0.625, 0.25))
    assert torch.equal(returns, spread(1, 1, 1))  # with lam_critic 1, the returns are the reward at the end


def test_decoupled_gae_with_a_discount_and_a_lambda_of_the_critic_worked_by_hand():
    advantages, returns = decoupled_gae(REWARDS, MASK, VALUES, gamma=0.5, lam=0.0, lam_critic=0.5)
    # delta = (0.5 * 0.25 - 0.5, 0.5 * 0.75 - 0.25, 1 - 0.75) are the advantages, because lam is 0
    assert torch.equal(advantages, spread(-0.375, 0.125, 0.25))
    # R_2 = 0.25 + 0.125 + 0.25 * 0.25; R_1 = 0.5 - 0.375 + 0.25 * 0.125 + 0.0625 * 0.25
    assert torch.equal(returns, spread(0.171875, 0.4375, 1))


def test_B7_the_lambda_of_an_answer_comes_from_its_trained_tokens_alone():
    """alpha = 1/2 and three trained tokens give lambda = 1 - 1 / 1.5 = 1/3. Tool tokens do not change lambda."""
    advantages, returns = length_adaptive_gae(REWARDS, MASK, VALUES, alpha=0.5)
    # A_2 = 0.5 + 0.25 / 3; A_1 = -0.25 + 0.5 / 3 + 0.25 / 9
    assert torch.allclose(advantages, spread(-1 / 18, 7 / 12, 0.25), rtol=1e-14, atol=1e-15)
    assert torch.equal(returns, spread(1, 1, 1))


@pytest.mark.parametrize("alpha", [1 / 3, 0.05, 1e-3])
def test_in_an_answer_of_at_most_1_over_alpha_tokens_lambda_is_0(alpha):
    advantages, returns = length_adaptive_gae(REWARDS, MASK, VALUES, alpha=alpha)
    assert torch.equal(advantages, spread(-0.25, 0.5, 0.25))
    assert torch.equal(returns, spread(1, 1, 1))


def test_rows_of_different_lengths_have_lambdas_of_their_own():
    mask = torch.arange(200) < torch.tensor([[200], [100], [20], [1], [0]])
    rewards, values = torch.zeros(5, 200, dtype=torch.float64), torch.zeros(5, 200, dtype=torch.float64)
    for row, length in enumerate([200, 100, 20, 1]):
        rewards[row, length - 1] = 1.0
    advantages, returns = length_adaptive_gae(rewards, mask, values)
    # alpha * length is 10 in row 0 and 5 in row 1. The answers of at most 20 tokens have lambda 0.
    assert advantages[0, [199, 198, 100]].tolist() == pytest.approx([1, 0.9, 0.9**99], rel=1e-12)
    assert advantages[1, [99, 98, 0]].tolist() == pytest.approx([1, 0.8, 0.8**99], rel=1e-12)
    assert advantages[2].nonzero()[:, 0].tolist() == [19]
    assert (advantages[3, 0].item(), advantages[4].abs().sum().item()) == (1, 0)
    assert torch.equal(returns, mask.double() * torch.tensor([[1], [1], [1], [1], [0]]))


@pytest.mark.parametrize("length", [1, 2, 9, 64, 100])
@pytest.mark.parametrize(("gamma", "lam_critic"), [(1.0, 1.0), (0.99, 0.9), (0.5, 0.0), (0.0, 1.0)])
def test_both_estimators_equal_sums_over_trained_tokens(gamma, lam_critic, length, make_batch):
    batch = make_batch(seed=length, length=length)
    if length == 100:
        batch["response_mask"][1, 10:90] = False  # a long tool output
    columns = batch["token_level_rewards"], batch["response_mask"], batch["values"]
    knobs = {"gamma": gamma, "lam_critic": lam_critic}
    for lam in (0.0, 0.5, 0.95, 1.0):
        expected = oracle(*columns, lam_of=lambda _, lam=lam: lam, **knobs)
        assert_close(decoupled_gae(*columns, lam=lam, **knobs), expected)
    for alpha in (0.05, 0.3, 1.0, 7.0):
        expected = oracle(*columns, lam_of=lambda size, a=alpha: max(0.0, 1 - 1 / (a * size)), **knobs)
        assert_close(length_adaptive_gae(*columns, alpha=alpha, **knobs), expected)


def assert_close(found, expected):
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual - wanted).abs().max() <= 1e-12 * wanted.abs().max().clamp(min=1)


def test_with_equal_lambdas_decoupled_gae_is_gae(make_batch):
    batch = make_batch(length=40)
    columns = batch["token_level_rewards"], batch["response_mask"], batch["values"]
    assert_close(decoupled_gae(*columns, gamma=0.9, lam=0.8, lam_critic=0.8), gae(*columns, gamma=0.9, lam=0.8))


def test_the_policy_gradient_with_these_advantages_is_that_of_the_written_out_sums(make_batch):
    """At the old policy, the gradient of the mean policy loss with respect to a token's log-prob is -A_t / N."""
    batch = make_batch(length=60)
    mask, columns = batch["response_mask"], [batch[name] for name in ("token_level_rewards", "response_mask", "values")]
    log_probs = batch["old_log_probs"].clone().requires_grad_()
    advantages, _ = length_adaptive_gae(*columns, alpha=0.2)
    losses, _ = POLICY_LOSSES.get("vanilla")(log_probs, batch["old_log_probs"], advantages, mask)
    aggregate_loss(losses, mask, "token-mean").backward()
    expected, _ = oracle(*columns, gamma=1.0, lam_of=lambda size: max(0.0, 1 - 1 / (0.2 * size)), lam_critic=1.0)
    assert (log_probs.grad + expected / mask.sum()).abs().max() <= 1e-12


def test_a_long_answer_in_float32_is_as_exact_as_in_float64():
    """In an answer of 40,000 tokens, 1 - lambda is 5e-4, so rounding lambda to float32 would change the result."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.zeros(1, 40_000), 0.1 * torch.randn(1, 40_000, generator=generator)
    rewards[0, -1], mask = 1.0, torch.ones(1, 40_000, dtype=torch.bool)
    single = length_adaptive_gae(rewards, mask, values)
    double = length_adaptive_gae(rewards.double(), mask, values.double())
    for actual, wanted in zip(single, double, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("estimator", "knobs", "complaint"),
    [
        (decoupled_gae, {"gamma": 1.1}, "gamma=1.1"),
        (decoupled_gae, {"lam": -0.1}, "lam=-0.1"),
        (decoupled_gae, {"lam_critic": 2.0}, "lam_critic=2.0"),
        (length_adaptive_gae, {"gamma": math.nan}, "gamma=nan"),
        (length_adaptive_gae, {"lam_critic": 1.5}, "lam_critic=1.5"),
        (length_adaptive_gae, {"alpha": 0.0}, "alpha=0.0 must be finite and > 0"),
        (length_adaptive_gae, {"alpha": -1.0}, "alpha=-1.0 must be finite and > 0"),
        (length_adaptive_gae, {"alpha": float("inf")}, "alpha=inf must be finite and > 0"),
        (length_adaptive_gae, {"alpha": math.nan}, "alpha=nan must be finite and > 0"),
    ],
)
def test_a_knob_out_of_range_is_refused(estimator, knobs, complaint):
    with pytest.raises(ValueError, match=complaint):
        estimator(REWARDS, MASK, VALUES, **knobs)
