"""Tests of how rows may affect each other's advantages, for every registered estimator.

Each estimator's registration declares the rows that share statistics: a group, the batch, or none.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, columns_of


def with_statistics(*levels):
    return [n for n in ADVANTAGE_ESTIMATORS.names() if ADVANTAGE_ESTIMATORS.metadata(n)["statistics"] in levels]


ALL, GROUPED, ALONE = with_statistics("group", "batch", "none"), with_statistics("group"), with_statistics("none")
EXCLUDING = [n for n in ALL if "valid" in columns_of(ADVANTAGE_ESTIMATORS.get(n))]
BY_ROW = [
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_s",
    "maxrl",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "w_reinforce",
]
WITH_GROUP_BASELINE = sorted({*GROUPED, *BY_ROW} - {"w_reinforce"})


def advantages_of(name, batch, call):
    return call(ADVANTAGE_ESTIMATORS.get(name), batch)[0]


def with_scores(batch, scores, uid, valid=None):
    """Return the batch with all tokens trained and with `scores` as the rewards.

    The score of a row is the reward of the row's last token, and all reward components of the row equal the score. An
    answer is correct if its score is above 0.
    """
    rewards = torch.zeros_like(batch["token_level_rewards"], dtype=scores.dtype)
    rewards[:, -1] = scores
    return {
        **batch,
        "token_level_rewards": rewards,
        "reward_components": scores[:, None].expand(-1, 2),
        "successes": (scores > 0).to(scores.dtype),
        "response_mask": torch.ones_like(batch["response_mask"]),
        "turn_states": batch["turn_index"],
        "uid": torch.as_tensor(uid),
        "valid": torch.ones(8, dtype=torch.bool) if valid is None else torch.as_tensor(valid),
    }


def test_every_estimator_without_a_critic_knows_which_rows_count():
    with_critic = ["decoupled_gae", "gae", "length_adaptive_gae", "turn_gae"]
    assert sorted(set(ALL) - set(EXCLUDING)) == with_critic
    assert sorted(ALONE) == sorted([*with_critic, "reinforce", "remax", "w_reinforce"])


@pytest.mark.parametrize("name", ALL)
def test_C1_the_order_of_rows_does_not_matter(name, make_batch, call, take_rows):
    batch = make_batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(4))
    permuted = advantages_of(name, take_rows(batch, order), call)
    assert torch.allclose(permuted, advantages_of(name, batch, call)[order], rtol=1e-10)


@pytest.mark.parametrize("name", EXCLUDING)
def test_C1_C4_an_invalid_row_is_as_good_as_absent_and_gets_zero(name, make_batch, call, take_rows):
    function, batch = ADVANTAGE_ESTIMATORS.get(name), make_batch()
    batch["valid"][1] = False
    for column in ("token_level_rewards", "reward_components"):
        batch[column][[1, 6]] = torch.tensor([[1e6], [torch.nan]], dtype=torch.float64)
    batch["entropies"][[1, 6]], batch["successes"][5] = torch.nan, 1.0
    keep = torch.tensor([0, 2, 3, 4, 5, 7])
    advantages, returns = call(function, batch)
    assert torch.allclose(advantages[keep], call(function, take_rows(batch, keep))[0], rtol=1e-10)
    assert (advantages[[1, 6]] == 0).all()
    assert (returns[[1, 6]] == 0).all()
    assert (advantages[keep] != 0).any()


@pytest.mark.parametrize("name", EXCLUDING)
def test_C4_a_batch_without_a_valid_row_gives_zero(name, make_batch, call):
    batch = make_batch()
    batch["valid"][:] = False
    for output in call(ADVANTAGE_ESTIMATORS.get(name), batch):
        assert (output == 0).all()


@pytest.mark.parametrize("name", GROUPED)
def test_C1_one_group_never_moves_another(name, make_batch, call):
    batch = make_batch()
    other = {**batch, **{name: batch[name].clone() for name in ("token_level_rewards", "successes")}}
    group = batch["uid"] == 9
    other["successes"][group] = 1.0
    # The scores are squared, because multiplying all scores by a factor does not change some estimators' advantages.
    other["token_level_rewards"][group] = 1e3 * other["token_level_rewards"][group].square()
    before, after = advantages_of(name, batch, call), advantages_of(name, other, call)
    assert torch.equal(before[~group], after[~group])
    assert not torch.equal(before[group], after[group])


@pytest.mark.parametrize("name", ALONE)
def test_C1_without_statistics_no_row_moves_another(name, make_batch, call, take_rows):
    batch = make_batch()
    whole = advantages_of(name, batch, call)
    for row in range(8):
        alone = advantages_of(name, take_rows(batch, torch.tensor([row])), call)
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("name", sorted(set(ALL) - {*GROUPED, *ALONE}))
def test_C1_batch_statistics_are_shared_by_all_groups(name, make_batch, call):
    batch = make_batch()
    other = with_scores(batch, torch.tensor([1.0, 0, 2, 1, 4, 1, 3, 2]), batch["uid"])
    # the batch `moved` differs from `other` only in the score of row 1, which makes all scores of group 9 equal
    moved = with_scores(batch, torch.tensor([1.0, 1, 2, 1, 4, 1, 3, 2]), batch["uid"])
    before, after = advantages_of(name, other, call), advantages_of(name, moved, call)
    assert not torch.allclose(before[batch["uid"] == 5], after[batch["uid"] == 5])


@pytest.mark.parametrize("name", WITH_GROUP_BASELINE)
@pytest.mark.parametrize("reward", [0.3, 0.1, 1 / 3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_C3_a_constant_group_and_a_group_of_one_give_exactly_zero(name, reward, dtype, make_batch, call):
    scores = torch.tensor([reward] * 7 + [1.0], dtype=dtype)
    batch = with_scores(make_batch(), scores, [1] * 7 + [2])
    assert (advantages_of(name, batch, call) == 0).all()


@pytest.mark.parametrize("name", GROUPED)
def test_C3_a_group_left_with_one_valid_row_gives_zero(name, make_batch, call):
    batch = make_batch()
    batch["valid"] = torch.tensor([True, True, False, True, False, True, False, True])
    batch["turn_states"] = batch["turn_index"]  # No two turns of a row begin in the same state.
    advantages = advantages_of(name, batch, call)
    assert (advantages[batch["uid"] == 5] == 0).all()
    assert (advantages[batch["uid"] == 9] != 0).any()


@pytest.mark.parametrize("name", WITH_GROUP_BASELINE)
def test_C3_C4_an_invalid_row_does_not_make_a_constant_group_vary(name, make_batch, call):
    scores = torch.tensor([0.3, 0.3, 0.3, 7.0, -2.0, -2.0, -2.0, 5.0])
    valid = [True, True, True, False] * 2
    assert (advantages_of(name, with_scores(make_batch(), scores, [1] * 4 + [2] * 4, valid), call) == 0).all()


@pytest.mark.parametrize("name", sorted({*GROUPED, "gpg"}))
def test_C3_beside_a_group_that_varies_a_constant_one_is_still_exactly_zero(name, make_batch, call):
    scores = torch.tensor([0.3, 0.3, 0.3, 0.3, -2.0, -2.0, 1.0, 5.0])
    advantages = advantages_of(name, with_scores(make_batch(), scores, [1] * 4 + [2] * 4), call)
    assert (advantages[:4] == 0).all()
    assert (advantages[7] > 0).all()


@pytest.mark.parametrize("name", BY_ROW)
def test_all_trained_tokens_of_a_row_get_its_advantage_and_no_other(name, make_batch, call):
    batch = make_batch()
    advantages, returns = call(ADVANTAGE_ESTIMATORS.get(name), batch)
    assert torch.equal(advantages, returns)
    assert advantages is not returns
    for row, trained in enumerate(batch["response_mask"]):
        assert advantages[row, trained].unique().numel() <= 1
        assert (advantages[row, ~trained] == 0).all()


@pytest.mark.parametrize("name", EXCLUDING)
def test_a_row_without_a_trained_token_is_in_no_statistic(name, make_batch, call):
    batch, other = make_batch(), make_batch()
    other["token_level_rewards"][3], other["reward_components"][3], other["baseline_rewards"][3] = 1e6, 1e6, 1e6
    assert torch.equal(advantages_of(name, batch, call), advantages_of(name, other, call))
    assert (advantages_of(name, batch, call)[3] == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_B7_tool_tokens_are_transparent_to_every_estimator(name, make_batch, call):
    """Removing untrained tokens from a row does not change the advantages of its trained tokens."""
    batch = make_batch()
    mask, packed = batch["response_mask"], make_batch()
    packed["response_mask"] = torch.arange(mask.shape[1]) < mask.sum(-1, keepdim=True)
    for column in ("token_level_rewards", "values", "old_log_probs", "entropies", "turn_index", "turn_states"):
        packed[column][packed["response_mask"]] = batch[column][mask]
    before, after = advantages_of(name, batch, call), advantages_of(name, packed, call)
    assert torch.allclose(after[packed["response_mask"]], before[mask], rtol=1e-10, atol=1e-12)
    assert (before[mask] != 0).any()


@pytest.mark.parametrize("name", ALL)
def test_no_gradient_leaves_an_estimator(name, make_batch, call):
    batch = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in make_batch().items()}
    for output in call(ADVANTAGE_ESTIMATORS.get(name), batch):
        assert not output.requires_grad


class CountOperations(TorchDispatchMode):
    """Counts the tensor operations that run while this context manager is active."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(name, rows, length, make_batch, call, take_rows):
    batch = take_rows(make_batch(length=length), torch.arange(rows) % 8)
    batch["uid"] = torch.arange(rows) // 4
    with CountOperations() as operations:
        call(ADVANTAGE_ESTIMATORS.get(name), batch)
    return operations.count


@pytest.mark.parametrize("name", ALL)
def test_no_estimator_loops_over_tokens_or_groups(name, make_batch, call, take_rows):
    """Parallel scans double their span at each step, so twice the length adds only a few tensor operations."""
    shapes = make_batch, call, take_rows
    few = operations(name, 8, 16, *shapes)
    assert operations(name, 256, 16, *shapes) == few
    assert operations(name, 8, 1024, *shapes) <= few + 60
