"""Tests of the negative log-likelihood loss on correct answers (VAPO, arXiv 2504.05118, section 4.3)."""

import torch

from rltrain.algorithms import positive_nll


def test_the_loss_on_a_case_worked_by_hand():
    log_probs = torch.tensor([[-1.0, -9.0, -2.0], [-9.0, -9.0, -9.0], [-3.0, -9.0, -9.0]]).requires_grad_()
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 0, 0]])
    positive = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 1]])
    loss = positive_nll(log_probs, mask, positive)
    loss.backward()
    assert loss.item() == 2.0  # (1 + 2 + 3) / 3, the mean over the three trained tokens of rows 0 and 2
    third = -1 / 3
    assert torch.allclose(log_probs.grad, torch.tensor([[third, 0, third], [0, 0, 0], [third, 0, 0]]), rtol=1e-6)
    assert positive_nll(log_probs, mask, positive, num_positive_tokens=12).item() == 0.5


def test_the_loss_and_its_gradient_are_zero_without_a_correct_answer():
    log_probs = torch.tensor([[-1.0, -2.0]]).requires_grad_()
    loss = positive_nll(log_probs, torch.ones(1, 2), torch.zeros(1, 2))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(log_probs.grad, torch.zeros(1, 2))


def test_micro_batches_add_up_to_the_whole_mini_batch():
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand((4, 5), generator=generator, dtype=torch.float64)
    mask, positive = (torch.rand((4, 5), generator=generator) < 0.6 for _ in range(2))
    count = int((mask & positive).sum())
    parts = [
        positive_nll(log_probs[i : i + 2], mask[i : i + 2], positive[i : i + 2], num_positive_tokens=count)
        for i in (0, 2)
    ]
    expected = -log_probs[mask & positive].sum() / count
    assert torch.allclose(sum(parts), expected, rtol=0, atol=1e-15)
    assert torch.allclose(positive_nll(log_probs, mask, positive), expected, rtol=0, atol=1e-15)
