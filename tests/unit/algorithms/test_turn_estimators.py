"""Tests of the advantage estimators that give credit to turns: hand-worked cases, slow references, exact gradients."""

import itertools
import math

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, turn_returns_to_go
from rltrain.algorithms.advantages.turns import Turns

turn_rloo, turn_gae, gigpo = (ADVANTAGE_ESTIMATORS.get(name) for name in ("turn_rloo", "turn_gae", "gigpo"))

# Two trajectories of one group. The first trajectory has three turns of 1, 2 and 1 tokens. The second trajectory has
# two turns of 1 token each. Between two turns, there is an observation of 1 token.
INDEX = torch.tensor([[0, -1, 1, 1, -1, 2], [0, -1, 1, -1, -1, -1]])
MASK = INDEX >= 0
REWARDS = torch.tensor([[1.0, 9, 0, 2, 9, 4], [3, 9, 5, 9, 9, 9]], dtype=torch.float64)
SAME, VALID = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)


def on_turns(*rows):
    """Return a matrix with the given values of each row's turns at the turns' tokens, and 0 in observations."""
    filled = torch.zeros(INDEX.shape, dtype=torch.float64)
    for row, values in enumerate(rows):
        for turn, value in enumerate(values):
            filled[row][INDEX[row] == turn] = value
    return filled


def close(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_turn_rloo_on_a_case_worked_by_hand():
    # The returns to go are 7, 6, 4 in row 0 and 8, 5 in row 1. The missing third turn of row 1 has return 0.
    advantages, returns = turn_rloo(REWARDS, MASK, SAME, VALID, INDEX)
    close(advantages, on_turns([-1, 1, 4], [1, -1]))
    close(returns, advantages)
    # With gamma 0.5, the returns to go are 1 + 0.5 (2 + 0.5 * 4) = 3, 4, 4 in row 0 and 3 + 0.5 * 5 = 5.5, 5 in row 1.
    close(turn_rloo(REWARDS, MASK, SAME, VALID, INDEX, gamma=0.5)[0], on_turns([-2.5, -1, 4], [2.5, 1]))


def test_returns_to_go_of_turns_on_a_case_worked_by_hand():
    wanted = on_turns([1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4], [3 + 0.5 * 5, 5])
    close(turn_returns_to_go(REWARDS, MASK, INDEX, gamma=0.5), wanted)
    with pytest.raises(ValueError, match=r"gamma=1\.5"):
        turn_returns_to_go(REWARDS, MASK, INDEX, gamma=1.5)


def test_turn_gae_on_a_case_worked_by_hand():
    values = torch.tensor([[2.0, 7, 1, 7, 7, 3], [4, 7, 6, 7, 7, 7]], dtype=torch.float64)
    # The TD errors r + gamma V' - V are 1 + 0.5 - 2, 2 + 1.5 - 1, 4 - 3 in row 0 and 3 + 3 - 4, 5 - 6 in row 1. The
    # product gamma lam is 0.25.
    wanted = on_turns([-0.5 + 0.25 * 2.75, 2.5 + 0.25, 1], [2 - 0.25, -1])
    advantages, returns = turn_gae(REWARDS, MASK, values, INDEX, gamma=0.5, lam=0.5)
    close(advantages, wanted)
    close(returns, on_turns([2 + wanted[0, 0], 1 + wanted[0, 2], 4], [4 + 1.75, 5]))
    close(turn_gae(REWARDS, MASK, values, INDEX)[0], on_turns([7 - 2, 6 - 1, 4 - 3], [8 - 4, 5 - 6]))


def test_gigpo_on_a_case_worked_by_hand():
    # The first turns of both rows start in state 8. The second turn of row 0 and the second of row 1 start in state 5.
    states = torch.tensor([[8, 0, 5, 5, 0, 6], [8, 0, 5, 0, 0, 0]])
    columns = REWARDS, MASK, SAME, VALID, INDEX, states
    # The sums of rewards are 7 and 8. With gamma 1, the returns to go are 7 and 8 in state 8, 6 and 5 in state 5, and 4
    # in state 6.
    plain = {"gamma": 1.0, "norm_by_std": False}
    close(gigpo(*columns, **plain)[0], on_turns([-0.5 - 0.5, -0.5 + 0.5, -0.5], [0.5 + 0.5, 0.5 - 0.5]))
    close(gigpo(*columns, **plain, step_weight=0.5)[0], on_turns([-0.75, -0.25, -0.5], [0.75, 0.25]))
    half = 0.5 / (math.sqrt(0.5) + 1e-6)  # The std of two values that are 1 apart is sqrt(0.5).
    close(gigpo(*columns, gamma=1.0)[0], on_turns([-2 * half, 0, -half], [2 * half, 0]))
    # With gamma 0.5, the returns to go are 3, 4, 4 in row 0 and 5.5, 5 in row 1.
    discounted = gigpo(*columns, gamma=0.5, norm_by_std=False)[0]
    close(discounted, on_turns([-0.5 - 1.25, -0.5 - 0.5, -0.5], [0.5 + 1.25, 0.5 + 0.5]))


def test_states_with_numbers_of_63_bits_are_told_apart():
    states = torch.tensor([[2**62, 0, 3, 3, 0, 6], [2**62 + 1, 0, 4, 0, 0, 0]])
    advantages = gigpo(REWARDS, MASK, SAME, VALID, INDEX, states, norm_by_std=False)[0]
    close(advantages, on_turns([-0.5, -0.5, -0.5], [0.5, 0.5]))


def turns_of(batch, row):
    """Return (tokens, sum of rewards, value at the first token, state) of each turn of a row with a trained token."""
    found = {}
    for slot in batch["response_mask"][row].nonzero()[:, 0].tolist():
        found.setdefault(int(batch["turn_index"][row, slot]), []).append(slot)
    return [
        (
            slots,
            sum(float(batch["token_level_rewards"][row, slot]) for slot in slots),
            float(batch["values"][row, slots[0]]),
            int(batch["turn_states"][row, slots[0]]),
        )
        for _, slots in sorted(found.items())
    ]


def to_go(turns, gamma):
    return [sum(gamma**n * turn[1] for n, turn in enumerate(turns[k:])) for k in range(len(turns))]


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_estimators_equal_slow_references(seed, gamma, make_batch, call):
    batch = make_batch(seed)
    rows = range(len(batch["uid"]))
    turns = [turns_of(batch, row) for row in rows]
    counted = [bool(batch["valid"][row]) and bool(turns[row]) for row in rows]
    group = {row: [j for j in rows if counted[j] and batch["uid"][j] == batch["uid"][row]] for row in rows}
    wanted = {name: torch.zeros_like(batch["values"]) for name in ("rloo", "gae", "returns", "gigpo")}
    for row in rows:
        own = to_go(turns[row], gamma)
        for k, (slots, _, value, state) in enumerate(turns[row]):
            deltas = [
                one[1] + gamma * (turns[row][n + 1][2] if n + 1 < len(turns[row]) else 0.0) - one[2]
                for n, one in enumerate(turns[row])
            ]
            advantage = sum((gamma * 0.8) ** n * delta for n, delta in enumerate(deltas[k:]))
            wanted["gae"][row, slots], wanted["returns"][row, slots] = advantage, advantage + value
            others = [j for j in group[row] if j != row]
            if not counted[row]:
                continue
            if others:
                at_k = [(to_go(turns[j], gamma) + [0.0] * 9)[k] for j in others]
                wanted["rloo"][row, slots] = own[k] - sum(at_k) / len(at_k)
            totals = [sum(turn[1] for turn in turns[j]) for j in group[row]]
            same = [g for j in group[row] for g, turn in zip(to_go(turns[j], gamma), turns[j], strict=True)
                    if turn[3] == state]  # fmt: skip
            mean = sum(turn[1] for turn in turns[row]) - sum(totals) / len(totals) if len(totals) > 1 else 0.0
            step = own[k] - sum(same) / len(same) if len(same) > 1 else 0.0
            wanted["gigpo"][row, slots] = mean + 0.5 * step
    close(call(turn_rloo, batch, gamma=gamma)[0], wanted["rloo"])
    advantages, returns = call(turn_gae, batch, gamma=gamma, lam=0.8)
    close(advantages, wanted["gae"])
    close(returns, wanted["returns"])
    close(call(gigpo, batch, gamma=gamma, step_weight=0.5, norm_by_std=False)[0], wanted["gigpo"])


@pytest.mark.parametrize(
    ("function", "knobs", "message"),
    [
        (turn_rloo, {"gamma": 1.5}, "gamma=1.5"),
        (turn_gae, {"gamma": -0.1}, "gamma=-0.1"),
        (turn_gae, {"lam": 2.0}, "lam=2.0"),
        (gigpo, {"gamma": math.nan}, "gamma=nan"),
    ],
)
def test_discounts_outside_their_range_are_refused(function, knobs, message, make_batch, call):
    with pytest.raises(ValueError, match=message):
        call(function, make_batch(), **knobs)


def test_a_batch_without_tokens_gives_empty_advantages():
    nothing = torch.zeros(2, 0)
    mask, index = nothing.bool(), nothing.long()
    assert turn_rloo(nothing, mask, SAME, VALID, index)[0].shape == (2, 0)
    assert turn_gae(nothing, mask, nothing, index)[0].shape == (2, 0)
    assert gigpo(nothing, mask, SAME, VALID, index, index)[0].shape == (2, 0)
    assert Turns(mask, index).present.tolist() == [[False], [False]]


# A small test problem with at most two turns: in turn 1 the policy stops or goes on, and if it goes on, it chooses one
# of two actions in turn 2.
GO, FIRST = 0.6, 0.3  # Probabilities of going on in turn 1, and of the first action in turn 2.
STOP_REWARD, GO_REWARD, ACTION_REWARDS = 1.0, 0.2, (1.5, 0.9)
# Each possible trajectory is (probability, rewards of the turns, gradients of the turns' log-probs with respect to the
# logits of GO and FIRST).
WAYS = [
    (1 - GO, [STOP_REWARD], [(-GO, 0.0)]),
    (GO * FIRST, [GO_REWARD, ACTION_REWARDS[0]], [(1 - GO, 0.0), (0.0, 1 - FIRST)]),
    (GO * (1 - FIRST), [GO_REWARD, ACTION_REWARDS[1]], [(1 - GO, 0.0), (0.0, -FIRST)]),
]
TRUTH = torch.tensor(
    [sum(p * sum(rewards) * sum(turn[n] for turn in grads) for p, rewards, grads in WAYS) for n in range(2)],
    dtype=torch.float64,
)


def expected_gradient(advantages_of, size):
    """Return the exact expectation of a policy gradient, (2,), by enumeration of all groups of `size` trajectories.

    Args:
        advantages_of: function from (rewards, mask, uid, valid, index, states), with one token per turn, to advantages.
        size: number of trajectories in a group.
    """
    total = torch.zeros(2, dtype=torch.float64)
    index, states = torch.arange(2).expand(size, 2), torch.tensor([7, 8]).expand(size, 2)
    uid, valid = torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool)
    for group in itertools.product(WAYS, repeat=size):
        rewards = torch.tensor([[*way[1], 0.0][:2] for way in group], dtype=torch.float64)
        mask = torch.tensor([[True, len(way[1]) == 2] for way in group])
        advantages = advantages_of(rewards, mask, uid, valid, index, states)
        grads = torch.tensor([[*way[2], (0.0, 0.0)][:2] for way in group], dtype=torch.float64)
        gradient = (advantages[..., None] * grads).sum((0, 1)) / size
        total += math.prod(way[0] for way in group) * gradient
    return total


@pytest.mark.parametrize("size", [2, 3])
def test_C10_turn_rloo_has_the_true_gradient(size):
    close(expected_gradient(lambda *columns: turn_rloo(*columns[:5])[0], size), TRUTH)


@pytest.mark.parametrize("values", [(0.0, 0.0), (0.7, -0.3)])
def test_C10_turn_gae_has_the_true_gradient_with_lam_1_and_the_bias_of_the_critic_below(values):
    def advantages(lam):
        return lambda rewards, mask, uid, valid, index, states: turn_gae(
            rewards, mask, torch.tensor(values, dtype=torch.float64).expand(rewards.shape), index, lam=lam
        )[0]

    close(expected_gradient(advantages(1.0), 2), TRUTH)
    # With lam 0, the estimator uses the critic's value of state 2 instead of the later reward. The gradient with
    # respect to the logit of GO is therefore wrong by GO (1 - GO) times the critic's error. No value is used after
    # state 2, so the gradient with respect to the logit of FIRST is exact.
    error = values[1] - (FIRST * ACTION_REWARDS[0] + (1 - FIRST) * ACTION_REWARDS[1])
    wanted = TRUTH + torch.tensor([GO * (1 - GO) * error, 0.0], dtype=torch.float64)
    close(expected_gradient(advantages(0.0), 2), wanted)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_C10_gigpo_without_std_has_the_bias_of_its_docstring(size, weight):
    knobs = {"gamma": 1.0, "step_weight": weight, "norm_by_std": False}
    found = expected_gradient(lambda *columns: gigpo(*columns, **knobs)[0], size)
    # The number of other trajectories that reach state 2, m - 1, has a binomial distribution.
    reaching = sum(
        math.comb(size - 1, others) * GO**others * (1 - GO) ** (size - 1 - others) * others / (others + 1)
        for others in range(size)
    )
    share = 1 - 1 / size
    close(found, TRUTH * torch.tensor([share + weight * share, share + weight * reaching], dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 3])
def test_C10_a_baseline_by_turn_index_has_the_wrong_sign(size):
    """If each turn's reward is centred over the trajectories that reach the turn, later rewards are worth 0 on average.

    In this problem, the reward of turn 2 makes it better to go on than to stop after turn 1. The centred rewards
    nevertheless teach the policy to stop.
    """

    def by_turn_index(rewards, mask, uid, valid, index, states):
        centred = torch.where(mask, rewards - rewards.where(mask, torch.nan).nanmean(0), 0.0)
        return centred.flip(1).cumsum(1).flip(1)

    assert TRUTH[0] > 0.05
    assert expected_gradient(by_turn_index, size)[0] < -0.05
