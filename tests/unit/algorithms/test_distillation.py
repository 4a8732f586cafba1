"""Tests of the teacher's log-ratio as an advantage, and of the sampled reverse KL to a teacher as a loss."""

import math

import pytest
import torch

from rltrain.algorithms import distilled_advantages, full_kl, sampled_teacher_kl
from rltrain.algorithms.policy_losses.reinforce import reinforce

MASK = torch.tensor([[True, True, False], [False, False, False]])
OLD = torch.tensor([[0.5, 0.25, 0.5], [0.5, 0.5, 0.5]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.25, 0.5, 0.5], [0.9, 0.9, 0.9]], dtype=torch.float64).log()
LOG_2 = math.log(2)


def policy(seed, shape=(6, 5)):
    """Return logits of a policy (contexts, words) in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_token_earns_its_log_ratio_of_teacher_and_policy_in_addition_to_the_outcome():
    advantages = torch.tensor([[1.0, -2.0, 3.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    found = distilled_advantages(advantages, OLD, TEACHER, MASK, coef=2.0, outcome_coef=0.5)
    assert found.tolist() == [
        pytest.approx([0.5 - 2 * LOG_2, -1 + 2 * LOG_2, 1.5]),
        pytest.approx([0.5, 0.5, 0.5]),
    ]
    pure = distilled_advantages(advantages, OLD, TEACHER, MASK, outcome_coef=0.0)
    assert pure.tolist() == [pytest.approx([-LOG_2, LOG_2, 0.0]), [0.0, 0.0, 0.0]]


def test_the_sampled_loss_is_the_weighted_log_ratio_and_pushes_towards_the_teacher():
    log_probs = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    losses = sampled_teacher_kl(log_probs, OLD, TEACHER, MASK)
    # The ratios pi / pi_old are 1 and 2, and the log-ratios log(pi / pi_T) are log 2 and 0.
    assert losses.tolist() == [pytest.approx([LOG_2, 0.0, 0.0]), [0.0, 0.0, 0.0]]
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert gradient.tolist() == [pytest.approx([LOG_2, 0.0, 0.0]), [0.0, 0.0, 0.0]]
    log_probs = torch.tensor([[0.5, 1.0, 0.5]] * 2, dtype=torch.float64).log().requires_grad_()
    (gradient,) = torch.autograd.grad(sampled_teacher_kl(log_probs, OLD, TEACHER, MASK).sum(), log_probs)
    assert gradient[0].tolist() == pytest.approx([LOG_2, 4 * LOG_2, 0.0])


def reverse_kl(logits, teacher):
    """Compute sum_v pi_v (log pi_v - log pi_T_v) of each context with operations that autograd can differentiate."""
    log_pi, log_teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    return (log_pi.exp() * (log_pi - log_teacher)).sum(-1)


def by_enumeration(term, logits, sampler):
    """Return the exact expectation of `term` in each context, if the tokens are sampled from `sampler`."""
    contexts, words = logits.shape
    tokens = torch.arange(words).expand(contexts, words)
    return (sampler.softmax(-1) * term(tokens)).sum(-1)


@pytest.mark.parametrize("behind", [0.0, 0.4])
def test_D6_the_expected_value_and_gradient_of_the_sampled_loss_are_those_of_the_reverse_kl(behind):
    """The tokens are drawn from the policy before the update, which differs from the current policy if `behind` > 0."""
    logits, teacher = policy(0).requires_grad_(), policy(1)
    old = (logits + behind * policy(2)).detach()
    everywhere = torch.ones(6, 5, dtype=torch.bool)

    def term(tokens):
        chosen = (one.log_softmax(-1).gather(-1, tokens) for one in (logits, old, teacher))
        return sampled_teacher_kl(*chosen, everywhere)

    expected = reverse_kl(logits, teacher)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    found = by_enumeration(term, logits, old)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert torch.allclose(found, expected, rtol=1e-10)
    assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-12)


def test_D6_the_expected_gradient_of_the_log_ratio_as_an_advantage_is_that_of_the_reverse_kl():
    logits, teacher = policy(0).requires_grad_(), policy(1)
    everywhere, coef = torch.ones(6, 5, dtype=torch.bool), 0.7

    def term(tokens):
        log_probs = logits.log_softmax(-1).gather(-1, tokens)
        old = log_probs.detach()
        advantages = distilled_advantages(
            torch.zeros(6, 5, dtype=torch.float64),
            old,
            teacher.log_softmax(-1).gather(-1, tokens),
            everywhere,
            coef=coef,
        )
        return reinforce(log_probs, old, advantages, everywhere)[0]

    (wanted,) = torch.autograd.grad(coef * reverse_kl(logits, teacher).sum(), logits)
    (gradient,) = torch.autograd.grad(by_enumeration(term, logits, logits.detach()).sum(), logits)
    assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-12)


def test_D6_the_exact_kl_as_an_advantage_would_have_no_gradient_which_is_why_it_is_refused():
    logits, teacher = policy(0).requires_grad_(), policy(1)
    exact = -reverse_kl(logits, teacher).detach()[:, None].expand(6, 5)
    found = by_enumeration(lambda tokens: -exact * logits.log_softmax(-1).gather(-1, tokens), logits, logits.detach())
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.abs().max() < 1e-12


def test_the_exact_and_the_sampled_loss_agree_for_a_teacher_of_another_width():
    generator = torch.Generator().manual_seed(3)
    hidden, head, own, its_head = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (7, 3), (4, 5), (7, 5))
    )
    exact = full_kl(hidden, head, own, its_head, temperature=0.7)
    assert torch.allclose(exact, reverse_kl(hidden @ head.T / 0.7, own @ its_head.T / 0.7), rtol=1e-10)


@pytest.mark.parametrize("bad", [1e4, math.inf, -math.inf, math.nan])
def test_B2_what_tokens_without_a_teacher_hold_changes_nothing(bad):
    log_probs = OLD.clone().requires_grad_()
    clean = sampled_teacher_kl(log_probs, OLD, TEACHER, MASK)
    (wanted,) = torch.autograd.grad(clean.sum(), log_probs)
    spoilt = [torch.where(MASK, one.detach(), bad) for one in (log_probs, OLD, TEACHER)]
    again = spoilt[0].requires_grad_()
    losses = sampled_teacher_kl(again, *spoilt[1:], MASK)
    (gradient,) = torch.autograd.grad(losses.sum(), again)
    assert torch.equal(losses, clean)
    assert torch.equal(gradient, wanted)
    advantages = distilled_advantages(torch.zeros_like(OLD), *spoilt[1:], MASK)
    assert torch.equal(advantages, distilled_advantages(torch.zeros_like(OLD), OLD, TEACHER, MASK))


@pytest.mark.parametrize("gap", [-1e3, -30.0, 30.0, 1e3, -math.inf])
def test_D9_extreme_log_ratios_are_clamped_and_still_point_to_the_teacher(gap):
    old, mask = torch.full((1, 1), -1.0, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    now, limit = old.clone().requires_grad_(), math.copysign(20.0, gap)
    losses = sampled_teacher_kl(now, old, old + gap, mask)
    (gradient,) = torch.autograd.grad(losses.sum(), now)
    assert (losses.item(), gradient.item()) == (-limit, -limit)
    assert distilled_advantages(torch.zeros(1, 1), old, old + gap, mask).item() == limit


def test_both_coefficients_act_and_nothing_has_a_gradient_in_the_advantage():
    advantages = torch.ones_like(OLD).requires_grad_()
    base = distilled_advantages(advantages, OLD, TEACHER, MASK)
    assert not base.requires_grad
    assert not torch.equal(base, distilled_advantages(advantages, OLD, TEACHER, MASK, coef=0.9))
    assert not torch.equal(base, distilled_advantages(advantages, OLD, TEACHER, MASK, outcome_coef=0.9))
    assert base.dtype == torch.float64
    assert distilled_advantages(advantages.bfloat16(), OLD.bfloat16(), TEACHER.bfloat16(), MASK).dtype == torch.float32
