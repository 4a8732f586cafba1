import pytest
import torch

from rltrain.algorithms import aggregate_loss
from rltrain.algorithms.aggregation import LOSS_AGG_MODES

LOSSES = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0], [99.0, 99.0, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3) / 3),
        ("token-sum", 6.0),
        ("seq-mean-token-sum", (3 + 3) / 2),
        ("seq-mean-token-mean", (1.5 + 3) / 2),
        ("seq-mean-token-sum-norm", 6 / (2 * 10)),
    ],
)
def test_each_mode_on_a_case_worked_by_hand(mode, expected):
    assert aggregate_loss(LOSSES, MASK, mode, max_response_length=10).item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 6 / 12),
        ("token-sum", 6.0),
        ("seq-mean-token-sum", 6 / 4),
        ("seq-mean-token-mean", 4.5 / 4),
        ("seq-mean-token-sum-norm", 6 / 40),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_counts_of_the_whole_mini_batch_replace_those_of_the_call(mode, expected, as_tensor):
    tokens, sequences = (torch.tensor(12), torch.tensor(4)) if as_tensor else (12, 4)
    loss = aggregate_loss(LOSSES, MASK, mode, num_tokens=tokens, num_sequences=sequences, max_response_length=10)
    assert loss.item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_A6_no_trained_token_gives_zero_loss_and_zero_gradient(mode):
    losses = torch.full((2, 3), torch.nan, dtype=torch.float64, requires_grad=True)
    for counts in ({}, {"num_tokens": 0, "num_sequences": 0}):
        loss = aggregate_loss(losses, torch.zeros(2, 3), mode, max_response_length=3, **counts)
        (gradient,) = torch.autograd.grad(loss, losses)
        assert loss.item() == 0
        assert torch.equal(gradient, torch.zeros(2, 3, dtype=torch.float64))


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"loss_agg_mode='mean' is not known; use one of: token-mean, token-sum"):
        aggregate_loss(LOSSES, MASK, "mean")


@pytest.mark.parametrize("length", [None, 0])
def test_the_normalised_mode_asks_for_its_length(length):
    with pytest.raises(ValueError, match="max_response_length"):
        aggregate_loss(LOSSES, MASK, "seq-mean-token-sum-norm", max_response_length=length)
