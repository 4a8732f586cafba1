import math

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("advantage", [2.0, -3.0, 0.0])
def test_D2_the_loss_is_minus_a_log_pi_by_hand(name, ratio, advantage, by_hand):
    losses, gradient, metrics = by_hand(name, [[ratio]], [[advantage]])
    assert losses.item() == pytest.approx(-advantage * math.log(0.1 * ratio), rel=1e-12)
    assert gradient.item() == pytest.approx(-advantage, rel=1e-12)
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_mean"] == pytest.approx(ratio)
    assert metrics["ppo_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_reinforce_equals_an_oracle_token_by_token(name, against, gradcheck):
    assert against(name, lambda new, a, **_: (-a * new, -a, "only")) == {"only"}
    assert gradcheck(name)


def test_both_names_have_one_function():
    assert POLICY_LOSSES.get("reinforce") is POLICY_LOSSES.get("gpg")


@pytest.mark.parametrize("name", ["reinforce", "cispo", "dppo_tv", "dppo_kl"])
def test_D9_a_token_that_became_impossible_counts_as_twenty_below_its_old_log_prob(name):
    log_probs = torch.tensor([[-torch.inf, 1e3]], dtype=torch.float64, requires_grad=True)
    old = torch.full_like(log_probs, -3.0).detach()
    losses, _ = POLICY_LOSSES.get(name)(log_probs, old, torch.ones_like(old), torch.tensor([[1, 0]]))
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    weight = 1.0 if name == "reinforce" else math.exp(-20)
    assert losses.tolist() == [[pytest.approx(23 * weight, rel=1e-12), 0]]
    assert gradient.tolist() == [[0, 0]]
