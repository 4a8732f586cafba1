"""Estimators that read whether an answer is correct: W-REINFORCE, with NSR and PSR as special cases."""

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS

w_reinforce = ADVANTAGE_ESTIMATORS.get("w_reinforce")
NAN = torch.nan


def columns(successes, valid=None, mask=None):
    """Return the columns of `w_reinforce`, with rewards that the estimator must not read."""
    mask = torch.ones(len(successes), 2, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    rewards = torch.full(mask.shape, NAN, dtype=torch.float64)
    return rewards, mask, torch.tensor(valid or [True] * len(successes)), torch.tensor(successes)


def test_w_reinforce_on_a_case_worked_by_hand():
    mask = [[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]]
    advantages, returns = w_reinforce(*columns([1.0, 0.0, NAN, 1.0, 0.0], [True, True, True, False, True], mask))
    wanted = [[0.1, 0.1, 0], [-1, 0, -1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert advantages.tolist() == returns.tolist() == wanted


@pytest.mark.parametrize(
    ("weights", "correct", "wrong"),
    [({"positive_weight": 0.0}, 0.0, -1.0), ({"positive_weight": 1.0, "negative_weight": 0.0}, 1.0, 0.0)],
    ids=["NSR", "PSR"],
)
def test_nsr_learns_from_wrong_answers_only_and_psr_from_correct_ones_only(weights, correct, wrong):
    advantages, _ = w_reinforce(*columns([1.0, 0.0]), **weights)
    assert advantages.tolist() == [[correct] * 2, [wrong] * 2]


def test_the_gradient_of_w_reinforce_is_that_of_its_weighted_likelihoods():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    advantages = w_reinforce(*columns([1.0, 0.0, 0.0]))[0][:, 0]
    (found,) = torch.autograd.grad(-(advantages * log_probs).sum(), logits, retain_graph=True)
    # The objective of arXiv 2506.01347 is lambda log pi for a correct answer, and -log pi for a wrong answer.
    (wanted,) = torch.autograd.grad(-0.1 * log_probs[0] + log_probs[1] + log_probs[2], logits)
    assert torch.allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("name", ["positive_weight", "negative_weight"])
@pytest.mark.parametrize("weight", [-0.1, NAN, torch.inf])
def test_a_weight_that_is_negative_or_not_finite_is_refused(name, weight):
    with pytest.raises(ValueError, match=rf"^{name}={weight} must be finite and >= 0; "):
        w_reinforce(*columns([1.0]), **{name: weight})


def test_two_weights_of_zero_are_refused():
    with pytest.raises(ValueError, match=r"^positive_weight=0 with negative_weight=0: nothing is learnt; "):
        w_reinforce(*columns([1.0]), positive_weight=0.0, negative_weight=0.0)


def test_a_batch_without_any_decided_answer_is_refused():
    with pytest.raises(ValueError, match=r"^successes=NaN in all rows: no reward function decides"):
        w_reinforce(*columns([NAN, NAN, 1.0], [True, True, False]))
