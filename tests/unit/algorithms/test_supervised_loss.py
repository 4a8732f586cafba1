"""Tests of the cross-entropy of supervised answers."""

import math

import torch

from rltrain.algorithms import aggregate_loss, supervised_loss


def test_the_mean_cross_entropy_of_two_answers_by_hand():
    """The first answer has two tokens with the probabilities 1/2 and 1/4.

    The second answer has one token with the probability 1/8. The third answer is not trained on.
    """
    probs = torch.tensor([[0.5, 0.25], [0.125, 1.0], [0.1, 0.1]], dtype=torch.float64)
    log_probs = probs.log().requires_grad_()
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    losses = supervised_loss(log_probs, mask)
    expected = [[math.log(2), math.log(4)], [math.log(8), 0], [0, 0]]
    assert torch.allclose(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-14)
    mean = aggregate_loss(losses, mask, "token-mean")
    assert math.isclose(mean.item(), 2 * math.log(2), rel_tol=1e-14)  # (1 + 2 + 3) log 2 / 3
    (gradient,) = torch.autograd.grad(mean, log_probs)
    assert torch.allclose(gradient, torch.tensor([[-1, -1], [-1, 0], [0, 0]]).double() / 3, rtol=1e-14)


def test_masked_slots_have_no_loss_and_no_gradient_whatever_they_hold():
    for garbage in (1e4, -math.inf, math.inf, math.nan):
        log_probs = torch.tensor([[-1.0, garbage, -2.0]], requires_grad=True)
        losses = supervised_loss(log_probs, torch.tensor([[1, 0, 1]]))
        assert losses.tolist() == [[1.0, 0.0, 2.0]]
        assert torch.autograd.grad(losses.sum(), log_probs)[0].tolist() == [[-1.0, 0.0, -1.0]]


def test_an_answer_that_is_almost_impossible_has_a_finite_loss_with_the_same_gradient_as_any_other():
    log_probs = torch.tensor([[-1e3, -1e-3]], dtype=torch.float64, requires_grad=True)
    losses = supervised_loss(log_probs, torch.ones(1, 2))
    assert losses.tolist() == [[1e3, 1e-3]]
    assert torch.autograd.grad(losses.sum(), log_probs)[0].tolist() == [[-1.0, -1.0]]


def test_float64_stays_and_bfloat16_becomes_float32():
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        assert supervised_loss(torch.zeros(1, 1, dtype=dtype), torch.ones(1, 1)).dtype == expected
