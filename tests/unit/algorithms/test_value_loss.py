import math

import pytest
import torch

from rltrain.algorithms import value_loss

# each case with clip range 0.5 is (value, old value, return, loss, gradient, number of clipped tokens)
CASES = [
    (1.0, 1.0, 3.0, 2.0, -2.0, 0),
    (1.2, 1.0, 3.0, 1.62, -1.8, 0),
    # the value moved too far towards the return, so the clipped error (1.5 - 3)^2 is larger than (2 - 3)^2
    (2.0, 1.0, 3.0, 1.125, 0.0, 1),
    # the value moved too far down towards the return, so the clipped error (0.5 + 2)^2 is larger than (0 + 2)^2
    (0.0, 1.0, -2.0, 3.125, 0.0, 1),
    (0.0, 1.0, 3.0, 4.5, -3.0, 0),  # the value moved away from the return, so its unclipped error is larger
    # the value overshot the return, so its error (5 - 3)^2 is larger than the clipped error (1.5 - 3)^2
    (5.0, 1.0, 3.0, 2.0, 2.0, 0),
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "gradient", "clipped"), CASES)
def test_the_clipped_error_and_its_gradient_by_hand(value, old, target, loss, gradient, clipped):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([[number]], dtype=torch.float64) for number in (old, target))
    losses, metrics = value_loss(values, *others, torch.ones(1, 1), clip_range_value=0.5)
    (actual,) = torch.autograd.grad(losses.sum(), values)
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert actual.item() == pytest.approx(gradient, rel=1e-12, abs=0)
    assert metrics["clip_fraction"].item() == clipped
    assert metrics["value_mean"].item() == value
    assert metrics["return_mean"].item() == target


def test_the_gradient_passes_gradcheck_and_goes_to_the_values_alone(make_batch):
    batch = make_batch()
    values, old, returns, mask = (
        batch[c].requires_grad_(c != "response_mask") for c in ("values", "old_values", "returns", "response_mask")
    )
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old.detach(), returns.detach(), mask)[0], values)
    losses, _ = value_loss(values, old, returns, mask)
    assert torch.autograd.grad(losses.sum(), (old, returns), allow_unused=True) == (None, None)


def test_D1_at_the_old_values_nothing_is_clipped_in_any_precision():
    generator = torch.Generator().manual_seed(0)
    values, returns = (10 * torch.randn(64, 64, generator=generator) for _ in range(2))
    _, metrics = value_loss(values + 0.1 * torch.rand(64, 64, generator=generator), values, returns, torch.ones(64, 64))
    assert metrics["clip_fraction"].item() == 0


def test_an_infinite_range_is_the_plain_squared_error(make_batch):
    batch = make_batch()
    values, old, returns, mask = (batch[c] for c in ("values", "old_values", "returns", "response_mask"))
    losses, metrics = value_loss(values, old, returns, mask, clip_range_value=math.inf)
    assert torch.allclose(losses, (values - returns).square() / 2 * mask, rtol=1e-12)
    assert metrics["clip_fraction"].item() == 0


@pytest.mark.parametrize("width", [0.0, -1.0, math.nan])
def test_a_range_in_which_nothing_moves_is_refused(width):
    with pytest.raises(ValueError, match=f"clip_range_value={width} must be > 0"):
        value_loss(*torch.zeros(4, 1, 1), clip_range_value=width)
