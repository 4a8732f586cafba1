import math

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES

# each DRO case with beta = 0.5 is (log-ratio, advantage, loss, gradient)
CASES = [(0.0, 2.0, 0.0, -2.0), (1.0, 2.0, -1.75, -1.5), (4.0, 2.0, -4.0, 0.0), (-1.0, -2.0, -1.75, 1.5)]


@pytest.mark.parametrize(("log_ratio", "advantage", "loss", "gradient"), CASES)
def test_D2_the_quadratic_pull_by_hand(log_ratio, advantage, loss, gradient, by_hand):
    losses, actual, metrics = by_hand("dro", [[math.exp(log_ratio)]], [[advantage]], beta=0.5)
    assert losses.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert actual.item() == pytest.approx(gradient, rel=1e-12, abs=1e-12)
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_mean"] == pytest.approx(math.exp(log_ratio))


def test_the_gradient_is_that_of_the_papers_squared_loss(make_batch):
    batch = make_batch(spread=2.0)
    old, advantages, mask = batch["old_log_probs"], batch["advantages"], batch["response_mask"]
    ours, paper = (batch["log_probs"].clone().requires_grad_() for _ in range(2))
    losses, _ = POLICY_LOSSES.get("dro")(ours, old, advantages, mask)
    squared = (advantages - 0.1 * (paper - old)) ** 2 / (2 * 0.1)
    (gradient,) = torch.autograd.grad(losses.sum(), ours)
    (expected,) = torch.autograd.grad(squared[mask].sum(), paper)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-14)
    constant = (squared - losses)[mask] - advantages[mask] ** 2 / 0.2
    assert constant.abs().max() < 1e-12


def test_dro_passes_gradcheck(gradcheck):
    assert gradcheck("dro")


@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
def test_a_beta_that_does_not_pull_back_is_refused(value, by_hand):
    with pytest.raises(ValueError, match=f"beta={value} must be finite and > 0"):
        by_hand("dro", [[1.0]], [[1.0]], beta=value)
