import math

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS

otb = ADVANTAGE_ESTIMATORS.get("optimal_token_baseline")
LOG = math.log


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_on_a_case_worked_by_hand():
    # Row 0 has the energies (1/2, 1/2), the cumulative energies (1/2, 1) and the returns (2, 2).
    # Row 1 has the energies (3/4, 1/4), the cumulative energies (3/4, 1) and the returns (4, 0).
    rewards = tensor([0, 2], [4, 0])
    log_probs = tensor([LOG(1 / 2), LOG(1 / 2)], [LOG(1 / 4), LOG(3 / 4)])
    advantages, returns = otb(rewards, torch.ones(2, 2), torch.tensor([6, 6]), torch.ones(2), log_probs)
    # The baselines of the two positions are (1/2 * 2 + 3/4 * 4) / (5/4) = 3.2 and (1 * 2 + 1 * 0) / 2 = 1.
    assert torch.allclose(advantages, tensor([-1.2, 1], [0.8, -1]), rtol=1e-12)
    assert torch.equal(returns, tensor([2, 2], [4, 0]))


def test_rows_meet_at_the_how_manieth_trained_token_and_the_tail_of_the_longest_gets_zero():
    rewards = tensor([1, 9, 1, 9, 1], [9, 0, 0, 9, 9])
    mask = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]])
    log_probs = torch.full((2, 5), LOG(1 / 2), dtype=torch.float64)
    advantages, returns = otb(rewards, mask, torch.tensor([0, 0]), torch.ones(2), log_probs)
    assert torch.allclose(advantages, tensor([1.5, 0, 1, 0, 0], [0, -1.5, -1, 0, 0]), rtol=1e-12)
    assert torch.equal(returns, tensor([3, 0, 2, 0, 1], [0, 0, 0, 0, 0]))
    assert advantages[0, 4] == 0


def test_a_policy_without_chance_has_the_mean_as_baseline():
    log_probs = torch.zeros(3, 2, dtype=torch.float64)
    rewards = tensor([0, 1], [0, 2], [0, 6])
    advantages, _ = otb(rewards, torch.ones(3, 2), torch.zeros(3).long(), torch.ones(3), log_probs)
    assert torch.allclose(advantages, tensor([-2, -2], [-1, -1], [3, 3]), rtol=1e-12)


@pytest.mark.parametrize("certain", [0.0, 1e-3])
def test_a_row_without_energy_leaves_the_baseline_to_the_others(certain):
    """A log-prob that rounding errors raised above 0 has energy 0, not a negative energy."""
    log_probs = tensor([certain, certain], [LOG(1 / 2), LOG(1 / 2)])
    advantages, _ = otb(tensor([0, 1], [0, 5]), torch.ones(2, 2), torch.zeros(2).long(), torch.ones(2), log_probs)
    assert torch.equal(advantages, tensor([-4, -4], [0, 0]))


def test_equals_a_slow_oracle(make_batch):
    batch = make_batch(seed=12)
    batch["valid"][2] = False
    mask, uid, valid = batch["response_mask"], batch["uid"].tolist(), batch["valid"].tolist()
    tokens = [[t for t in range(mask.shape[1]) if mask[i, t]] if valid[i] else [] for i in range(8)]
    to_go, weight = [], []
    for i in range(8):
        rewards = [float(batch["token_level_rewards"][i, t]) for t in tokens[i]]
        energy = [1 - math.exp(float(batch["old_log_probs"][i, t])) for t in tokens[i]]
        to_go.append([sum(rewards[n:]) for n in range(len(rewards))])
        weight.append([sum(energy[: n + 1]) for n in range(len(energy))])
    wanted = torch.zeros_like(batch["advantages"])
    for i in range(8):
        for n, t in enumerate(tokens[i]):
            peers = [j for j in range(8) if uid[j] == uid[i] and len(tokens[j]) > n]
            baseline = sum(weight[j][n] * to_go[j][n] for j in peers) / sum(weight[j][n] for j in peers)
            wanted[i, t] = to_go[i][n] - baseline if len(peers) > 1 else 0
    columns = [batch[name] for name in ("token_level_rewards", "response_mask", "uid", "valid", "old_log_probs")]
    advantages, returns = otb(*columns)
    assert torch.allclose(advantages, wanted, rtol=1e-10, atol=1e-12)
    for i in range(8):
        assert returns[i, tokens[i]].tolist() == pytest.approx(to_go[i])


def test_the_energy_has_the_mean_of_the_papers():
    """If tokens y are drawn from the policy, the mean of pi(y) is the sum of all squared probabilities.

    The test enumerates all tokens, so the mean is exact.
    """
    probabilities = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    here = 1 - probabilities
    paper = 1 - 2 * probabilities + probabilities.square().sum()
    # row y holds the gradient of log pi(y) with respect to the logits
    gradients = torch.eye(7, dtype=torch.float64) - probabilities
    assert torch.allclose(gradients.square().sum(-1), paper)
    assert (probabilities * here).sum().item() == pytest.approx((probabilities * paper).sum().item(), rel=1e-12)


def test_float32_is_computed_in_float64(make_batch):
    batch = make_batch(seed=18, length=64)
    narrow = {name: column.float() if column.is_floating_point() else column for name, column in batch.items()}
    wide = {name: column.double() if column.is_floating_point() else column for name, column in narrow.items()}
    names = ("token_level_rewards", "response_mask", "uid", "valid", "old_log_probs")
    actual, wanted = (otb(*(of[name] for name in names)) for of in (narrow, wide))
    assert all(torch.equal(*pair) for pair in zip(actual, (w.float() for w in wanted), strict=True))


def test_rewards_in_float32_are_summed_in_float64():
    """The intermediate sum 2^24 + 1 cannot be represented in float32."""
    rewards = torch.tensor([[2.0**24, 1.0, -(2.0**24)], [0.0, 0.0, 0.0]])
    advantages, _ = otb(rewards, torch.ones(2, 3), torch.zeros(2).long(), torch.ones(2), torch.full((2, 3), -1.0))
    assert advantages.dtype == torch.float32
    assert advantages[:, 0].tolist() == [0.5, -0.5]
