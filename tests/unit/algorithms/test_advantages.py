import time

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS

gae = ADVANTAGE_ESTIMATORS.get("gae")
grpo = ADVANTAGE_ESTIMATORS.get("grpo")
rloo = ADVANTAGE_ESTIMATORS.get("rloo")


def gae_oracle(rewards, mask, values, gamma, lam):
    """Compute GAE with the textbook recursion, one trained token at a time, from the last to the first."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        advantage = next_value = 0.0
        for t in reversed(range(rewards.shape[1])):
            if not mask[row, t]:
                continue
            delta = rewards[row, t] + gamma * next_value - values[row, t]
            advantage = delta + gamma * lam * advantage
            next_value = values[row, t]
            advantages[row, t], returns[row, t] = advantage, advantage + values[row, t]
    return advantages, returns


def gae_loop(rewards, mask, values, gamma, lam):
    """Compute GAE with a loop over columns, as the baseline for the speed of the parallel form."""
    advantage, next_value = torch.zeros(rewards.shape[0]), torch.zeros(rewards.shape[0])
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        trained = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(trained, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(trained, values[:, t], next_value)
        advantages[:, t] = advantage
    return torch.where(mask, advantages, 0)


def as_rewards(scores, mask):
    """Put each row's score on its last trained token."""
    rewards = torch.zeros(mask.shape, dtype=scores.dtype)
    for row, trained in enumerate(mask):
        if trained.any():
            rewards[row, trained.nonzero().max()] = scores[row]
    return rewards


def groups(scores, uid, valid=None, dtype=torch.float64, length=3):
    scores = torch.as_tensor(scores, dtype=dtype)
    mask = torch.ones(len(scores), length, dtype=torch.bool)
    valid = torch.ones(len(scores), dtype=torch.bool) if valid is None else torch.as_tensor(valid)
    return as_rewards(scores, mask), mask, torch.as_tensor(uid), valid


def test_B7_tool_tokens_cost_no_discount():
    rewards, mask, values = torch.tensor([[0.0, 0, 1]]), torch.tensor([[1, 0, 1]]), torch.zeros(1, 3)
    advantages, returns = gae(rewards, mask, values, gamma=0.5, lam=1.0)
    assert torch.equal(returns, torch.tensor([[0.5, 0, 1]]))
    assert torch.equal(advantages, returns)


def test_gae_on_a_case_worked_by_hand():
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    advantages, returns = gae(rewards, torch.ones(1, 2), values, gamma=0.5, lam=0.5)
    # delta_2 = 1 - .25 = .75; delta_1 = .5 * .25 - .5 = -.375; A_1 = -.375 + .25 * .75
    assert torch.equal(advantages, torch.tensor([[-0.1875, 0.75]]))
    assert torch.equal(returns, torch.tensor([[0.3125, 1.0]]))


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.5), (0.9, 0.0), (0.0, 0.9), (0.999, 0.999)]
)
@pytest.mark.parametrize("length", [1, 2, 9, 64, 100])
def test_gae_equals_the_recursion_over_trained_tokens(gamma, lam, length, make_batch):
    batch = make_batch(seed=length, length=length)
    if length == 100:
        batch["response_mask"][1, 10:90] = False  # row 1 contains a long tool output
    columns = batch["token_level_rewards"], batch["response_mask"], batch["values"]
    for actual, wanted in zip(gae(*columns, gamma=gamma, lam=lam), gae_oracle(*columns, gamma, lam), strict=True):
        assert (actual - wanted).abs().max() <= 1e-12 * wanted.abs().max().clamp(min=1)


def test_B7_gae_with_tool_tokens_is_gae_without_them(make_batch):
    batch = make_batch()
    columns = batch["token_level_rewards"], batch["response_mask"], batch["values"]
    advantages, _ = gae(*columns, gamma=0.9, lam=0.8)
    for row, trained in enumerate(batch["response_mask"]):
        cut = [column[row, trained][None] for column in columns]
        assert torch.allclose(advantages[row, trained], gae(*cut, gamma=0.9, lam=0.8)[0][0], rtol=1e-12, atol=1e-14)


def test_gae_is_five_times_as_fast_as_a_loop_over_steps_and_equal():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(64, 32768, generator=generator), torch.randn(64, 32768, generator=generator)
    mask = torch.rand(64, 32768, generator=generator) < 0.8
    wanted, loop_s = timed(lambda: gae_loop(rewards, mask, values, 0.999, 0.99))
    runs = [timed(lambda: gae(rewards, mask, values, gamma=0.999, lam=0.99)) for _ in range(5)]
    (advantages, _), parallel_s = min(runs, key=lambda run: run[1])
    assert (advantages - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert loop_s >= 5 * parallel_s, f"{loop_s:.3f} s against {parallel_s:.3f} s"


def timed(function):
    """Return a function's result, and the CPU seconds of all threads, which a busy machine hardly increases."""
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


@pytest.mark.parametrize(("gamma", "lam", "complaint"), [(1.1, 1.0, "gamma=1.1"), (1.0, -0.1, "lam=-0.1")])
def test_gae_refuses_a_discount_outside_0_to_1(gamma, lam, complaint):
    with pytest.raises(ValueError, match=complaint):
        gae(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), gamma=gamma, lam=lam)


def test_grpo_on_a_case_worked_by_hand():
    columns = groups([1, 4, 3, 0], [7, 2, 7, 2])
    # Group 7 has scores (1, 3), mean 2 and std sqrt 2. Group 2 has scores (4, 0), mean 2 and std 2 sqrt 2.
    # Every score is 1/sqrt 2 stds away from the mean of its group.
    away = 2**-0.5
    wanted = torch.tensor([-away, away, away, -away], dtype=torch.float64)[:, None].expand(4, 3)
    advantages, returns = grpo(*columns)
    assert torch.allclose(advantages, wanted, rtol=1e-5)
    assert torch.equal(advantages, returns)
    assert torch.equal(grpo(*columns, norm_by_std=False)[0][:, 0], torch.tensor([-1.0, 2, 1, -2]).double())


def test_rloo_on_a_case_worked_by_hand():
    advantages, _ = rloo(*groups([1, 2, 6], [0, 0, 0]))
    assert torch.allclose(advantages[:, 0], torch.tensor([1 - 4.0, 2 - 3.5, 6 - 1.5]).double(), rtol=1e-14)


@pytest.mark.parametrize(("function", "knobs"), [(grpo, {}), (grpo, {"norm_by_std": False}), (rloo, {})])
def test_group_estimators_equal_a_slow_oracle(function, knobs, make_batch):
    batch = make_batch(seed=3)
    mask, uid, valid = batch["response_mask"], batch["uid"].tolist(), batch["valid"].tolist()
    scores = [float(batch["token_level_rewards"][i][mask[i]].sum()) for i in range(8)]
    counted = [valid[i] and bool(mask[i].any()) for i in range(8)]
    advantages, _ = function(batch["token_level_rewards"], mask, batch["uid"], batch["valid"], **knobs)
    for i in range(8):
        peers = [j for j in range(8) if counted[j] and uid[j] == uid[i]]
        wanted = 0.0
        if counted[i] and len(peers) > 1:
            own = torch.tensor([scores[j] for j in peers], dtype=torch.float64)
            if function is rloo:
                wanted = scores[i] - (own.sum().item() - scores[i]) / (len(peers) - 1)
            else:
                wanted = (scores[i] - own.mean().item()) / (own.std().item() + 1e-6 if not knobs else 1)
        assert torch.allclose(advantages[i], mask[i].double() * wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "knobs", "degree"), [(grpo, {}, 0), (grpo, {"norm_by_std": False}, 1), (rloo, {}, 1)]
)
def test_C2_centred_shift_invariant_and_scaled_as_the_mode_says(function, knobs, degree):
    scores = torch.tensor([0.3, 2.0, -1.0, 5.0, 4.0, 4.5], dtype=torch.float64)
    uid = [0, 1, 0, 1, 0, 1]

    def advantages(of):
        return function(*groups(of, uid), **knobs)[0][:, 0]

    base = advantages(scores)
    assert base.abs().min() > 0.1
    assert base[::2].sum().abs() < 1e-12
    assert base[1::2].sum().abs() < 1e-12
    assert torch.allclose(advantages(scores + 3), base, rtol=1e-10)
    assert torch.allclose(advantages(4 * scores), base * 4**degree, rtol=1e-5)


def test_C6_rloo_is_k_over_k_minus_one_times_the_deviation():
    scores = torch.tensor([0.3, 2.0, -1.0, 5.0], dtype=torch.float64)
    advantages, _ = rloo(*groups(scores, [0] * 4))
    assert torch.allclose(advantages[:, 0], 4 / 3 * (scores - scores.mean()), rtol=1e-12)


def test_a_row_without_a_trained_token_has_no_score_and_is_in_no_statistic():
    rewards, mask, uid, valid = groups([1.0, 3.0, 100.0], [0, 0, 0])
    mask[2] = False
    advantages, _ = grpo(rewards, mask, uid, valid, norm_by_std=False)
    assert torch.equal(advantages[:, 0], torch.tensor([-1.0, 1, 0]).double())
