"""Tests of REINFORCE, REINFORCE++ and ReMax, which are advantage estimators based on token returns."""

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS

reinforce = ADVANTAGE_ESTIMATORS.get("reinforce")
reinforce_plus_plus = ADVANTAGE_ESTIMATORS.get("reinforce_plus_plus")
reinforce_plus_plus_baseline = ADVANTAGE_ESTIMATORS.get("reinforce_plus_plus_baseline")
remax = ADVANTAGE_ESTIMATORS.get("remax")

REWARDS = torch.tensor([[0.0, 9.0, 1.0], [2.0, 4.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])
VALID = torch.tensor([True, True])


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def returns_oracle(rewards, mask, valid, gamma):
    """Compute discounted returns with a loop over trained tokens, from the last token to the first."""
    returns = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        later = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t] and valid[row]:
                later = rewards[row, t].item() + gamma * later
                returns[row, t] = later
    return returns


def whitened_oracle(values, counted):
    """Return (x - mean) / (std + 1e-6) of the counted tokens, with mean and std computed by plain loops."""
    kept = [float(x) for x, keep in zip(values.flatten(), counted.flatten(), strict=True) if keep]
    mean = sum(kept) / len(kept)
    std = (sum((x - mean) ** 2 for x in kept) / (len(kept) - 1)) ** 0.5
    return torch.where(counted, (values - mean) / (std + 1e-6), torch.zeros_like(values))


def test_reinforce_on_a_case_worked_by_hand():
    wanted = tensor([0.5, 0.0, 1.0], [4.0, 4.0, 0.0])
    advantages, returns = reinforce(REWARDS, MASK, VALID, gamma=0.5)
    assert torch.equal(advantages, wanted)
    assert torch.equal(returns, wanted)
    assert torch.equal(reinforce(REWARDS, MASK, VALID)[0], tensor([1.0, 0.0, 1.0], [6.0, 4.0, 0.0]))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.97, 1.0])
def test_reinforce_and_its_whitened_form_equal_a_loop_over_tokens(gamma, make_batch):
    batch = make_batch(seed=5, length=33)
    rewards, mask, valid = batch["token_level_rewards"], batch["response_mask"], batch["valid"]
    wanted = returns_oracle(rewards, mask, valid, gamma)
    assert torch.allclose(reinforce(rewards, mask, valid, gamma=gamma)[0], wanted, rtol=1e-12, atol=1e-14)
    advantages, returns = reinforce_plus_plus(rewards, mask, valid, gamma=gamma)
    assert torch.allclose(returns, wanted, rtol=1e-12, atol=1e-14)
    assert torch.allclose(advantages, whitened_oracle(wanted, mask & valid[:, None]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", [reinforce, reinforce_plus_plus])
@pytest.mark.parametrize("gamma", [1.1, -0.1, torch.nan])
def test_a_discount_outside_0_to_1_is_refused(function, gamma):
    with pytest.raises(ValueError, match=f"gamma={gamma} must be in"):
        function(REWARDS, MASK, VALID, gamma=gamma)


def test_reinforce_plus_plus_on_a_case_worked_by_hand():
    # the returns 1, 1, 6, 4 have mean 3 and variance (4 + 4 + 9 + 1) / (n - 1) = 18 / 3 = 6
    std = 6**0.5 + 1e-6
    advantages, returns = reinforce_plus_plus(REWARDS, MASK, VALID)
    assert torch.allclose(advantages, tensor([-2 / std, 0, -2 / std], [3 / std, 1 / std, 0]), rtol=1e-12)
    assert torch.equal(returns, tensor([1.0, 0.0, 1.0], [6.0, 4.0, 0.0]))


def test_C3_reinforce_plus_plus_of_equal_returns_is_exactly_zero():
    rewards = torch.zeros(2, 3).index_fill(1, torch.tensor([2]), 0.3)
    advantages, returns = reinforce_plus_plus(rewards, torch.ones(2, 3), VALID)
    assert torch.equal(advantages, torch.zeros(2, 3))
    assert torch.equal(returns, torch.full((2, 3), 0.3))


def test_reinforce_plus_plus_with_baseline_on_a_case_worked_by_hand():
    rewards = tensor([1.0, 0, 0], [0, 0, 3], [5.0, 0, 0])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    advantages, returns = reinforce_plus_plus_baseline(rewards, mask, torch.tensor([4, 4, 7]), torch.ones(3))
    # After the group means are subtracted, the scores are -1 on one token and +1 on three tokens of group 4, and 0 on
    # the two tokens of group 7. The six tokens have mean 2/6 and variance (4 - 4/6) / 5.
    mean, std = 1 / 3, (2 / 3) ** 0.5 + 1e-6
    wanted = tensor([-1 - mean, 0, 0], [1 - mean] * 3, [-mean, -mean, 0]) / std
    assert torch.allclose(advantages, wanted, rtol=1e-12)
    assert torch.equal(returns, advantages)


def test_reinforce_plus_plus_with_baseline_equals_a_slow_oracle(make_batch):
    batch = make_batch(seed=6)
    mask, uid = batch["response_mask"], batch["uid"].tolist()
    counted = [bool(batch["valid"][i] and mask[i].any()) for i in range(8)]
    scores = [
        sum(float(r) for r, m in zip(batch["token_level_rewards"][i], mask[i], strict=True) if m) for i in range(8)
    ]
    deviations = torch.zeros_like(batch["token_level_rewards"])
    for i in range(8):
        peers = [scores[j] for j in range(8) if counted[j] and uid[j] == uid[i]]
        deviations[i] = scores[i] - sum(peers) / len(peers) if len(peers) > 1 else 0
    wanted = whitened_oracle(deviations, mask & torch.tensor(counted)[:, None])
    columns = batch["token_level_rewards"], mask, batch["uid"], batch["valid"]
    assert torch.allclose(reinforce_plus_plus_baseline(*columns)[0], wanted, rtol=1e-10, atol=1e-12)


def test_remax_on_a_case_worked_by_hand():
    advantages, returns = remax(REWARDS, MASK, VALID, tensor(0.5, 7.0))
    assert torch.equal(advantages, tensor([0.5, 0, 0.5], [-1, -3, 0]))
    assert torch.equal(returns, tensor([1.0, 0, 1], [6, 4, 0]))


def test_remax_equals_a_loop_over_tokens(make_batch):
    batch = make_batch(seed=7)
    rewards, mask, valid, baseline = (
        batch[name] for name in ("token_level_rewards", "response_mask", "valid", "baseline_rewards")
    )
    returns = returns_oracle(rewards, mask, valid, 1.0)
    wanted = torch.where(mask & valid[:, None], returns - baseline[:, None], torch.zeros_like(returns))
    for actual, expected in zip(remax(rewards, mask, valid, baseline), (wanted, returns), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("row", [0, 1])
def test_remax_without_a_greedy_score_gives_that_row_zero_and_leaves_the_other(row):
    baseline = tensor(0.5, 7.0)
    whole = remax(REWARDS, MASK, VALID, baseline)
    baseline[row] = torch.nan
    for actual, before in zip(remax(REWARDS, MASK, VALID, baseline), whole, strict=True):
        assert (actual[row] == 0).all()
        assert torch.equal(actual[1 - row], before[1 - row])
