"""Estimators that compare whole responses: OPO, GPG, GRPO for pass@k, MaxRL, and GDPO."""

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, columns_of

opo = ADVANTAGE_ESTIMATORS.get("opo")
gpg = ADVANTAGE_ESTIMATORS.get("gpg")
grpo_passk = ADVANTAGE_ESTIMATORS.get("grpo_passk")
maxrl = ADVANTAGE_ESTIMATORS.get("maxrl")
gdpo = ADVANTAGE_ESTIMATORS.get("gdpo")
NAN = torch.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def rows(scores, uid, valid=None, lengths=None):
    """Return the columns that an outcome estimator reads, with each row's score on its last trained token."""
    lengths = lengths or [3] * len(scores)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards = torch.full(mask.shape, torch.nan, dtype=torch.float64).masked_fill(mask, 0)
    rewards[torch.arange(len(scores)), torch.tensor(lengths) - 1] = tensor(*scores)
    return rewards, mask, torch.tensor(uid), torch.tensor(valid or [True] * len(scores))


def per_row(function, *columns, **knobs):
    return function(*columns, **knobs)[0][:, 0]


def parts(batch):
    """Return four lists over rows: score, length, whether the row counts, and the counted rows of its group."""
    mask, uid = batch["response_mask"], batch["uid"].tolist()
    counted = [bool(batch["valid"][i] and mask[i].any()) for i in range(8)]
    scores = [float(batch["token_level_rewards"][i][mask[i]].sum()) for i in range(8)]
    peers = [[j for j in range(8) if counted[j] and uid[j] == uid[i]] for i in range(8)]
    return scores, mask.sum(-1).tolist(), counted, peers


def assert_rows(advantages, mask, wanted):
    assert torch.allclose(advantages, mask * tensor(*wanted)[:, None], rtol=1e-10, atol=1e-12)
    assert (advantages.abs() > 1e-3).any()


def outcome_columns(batch):
    return [batch[name] for name in ("token_level_rewards", "response_mask", "uid", "valid")]


def test_opo_on_a_case_worked_by_hand():
    columns = rows([1.0, 5.0, 9.0, 2.0], [0, 0, 3, 0], [True, True, True, False], lengths=[3, 1, 2, 2])
    # Group 0 has the length-weighted baseline (3 * 1 + 1 * 5) / 4 = 2.
    # Row 2 is alone in its group, and row 3 is invalid.
    assert torch.equal(per_row(opo, *columns), tensor(-1, 3, 0, 0))


def test_opo_equals_a_slow_oracle(make_batch):
    batch = make_batch(seed=8)
    scores, lengths, counted, peers = parts(batch)
    wanted = []
    for i in range(8):
        weight = sum(lengths[j] for j in peers[i])
        baseline = sum(lengths[j] * scores[j] for j in peers[i]) / max(weight, 1)
        wanted.append(scores[i] - baseline if counted[i] and len(peers[i]) > 1 else 0)
    assert_rows(opo(*outcome_columns(batch))[0], batch["response_mask"], wanted)


def test_opo_with_equal_lengths_is_the_deviation_from_the_mean():
    columns = rows([1.0, 5.0, 0.0], [0, 0, 0])
    assert torch.allclose(per_row(opo, *columns), tensor(-1, 3, -2), rtol=1e-14)


def test_gpg_on_a_case_worked_by_hand():
    columns = rows([1, 3, 4, 4, 4, 7, 100], [0, 0, 1, 1, 1, 2, 0], [True] * 6 + [False])
    # of six counted rows, two are in a group with differing scores, so alpha = 6 / 2 = 3
    assert torch.equal(per_row(gpg, *columns), tensor(-3, 3, 0, 0, 0, 0, 0))
    assert torch.equal(per_row(gpg, *columns, norm_factor=2.0), tensor(-1.5, 1.5, 0, 0, 0, 0, 0))


def test_gpg_equals_a_slow_oracle(make_batch):
    batch = make_batch(seed=9)
    scores, _, counted, peers = parts(batch)
    varied = [counted[i] and len({scores[j] for j in peers[i]}) > 1 for i in range(8)]
    alpha = sum(counted) / sum(varied)
    assert alpha > 1
    wanted = [alpha * (scores[i] - sum(scores[j] for j in peers[i]) / len(peers[i])) * varied[i] for i in range(8)]
    assert_rows(gpg(*outcome_columns(batch))[0], batch["response_mask"], wanted)


def test_the_gradient_of_gpg_does_not_shrink_with_groups_that_teach_nothing():
    alone = per_row(gpg, *rows([1, 3], [0, 0]))
    beside = per_row(gpg, *rows([1, 3, 4, 4], [0, 0, 1, 1]))
    assert beside.sum() == alone.sum() == 0
    # the advantages are divided by the number of rows, because the loss is a mean over rows
    assert torch.equal(beside[:2] / 4, alone / 2)


@pytest.mark.parametrize("norm_factor", [0.0, -1.0, NAN, torch.inf])
def test_gpg_refuses_to_divide_by_what_is_not_positive_or_not_finite(norm_factor):
    with pytest.raises(ValueError, match=f"^norm_factor={norm_factor} must be finite and > 0; "):
        gpg(*rows([1, 3], [0, 0]), norm_factor=norm_factor)


def test_grpo_passk_on_a_case_worked_by_hand():
    columns = rows([1, 2, 5, 4, 4, 9, 50, -3, -1], [0, 0, 0, 1, 1, 2, 0, 3, 3], [True] * 6 + [False] + [True] * 2)
    raw = per_row(grpo_passk, *columns, norm_by_std=False)
    assert torch.equal(raw, tensor(0, 0, 3, 0, 0, 0, 0, 0, 2))
    # The scores 1, 2, 5 have mean 8/3 and variance (25 + 4 + 49) / 9 / 2.
    # The scores -3, -1 have mean -2 and variance 2.
    stds = [(13 / 3) ** 0.5, 2**0.5]
    wanted = tensor(0, 0, 3 / (stds[0] + 1e-6), 0, 0, 0, 0, 0, 2 / (stds[1] + 1e-6))
    assert torch.allclose(per_row(grpo_passk, *columns), wanted, rtol=1e-12)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo_passk_equals_a_slow_oracle(norm_by_std, make_batch):
    batch = make_batch(seed=10)
    scores, _, counted, peers = parts(batch)
    wanted = []
    for i in range(8):
        others = [scores[j] for j in peers[i] if j != i]
        gain = max(0.0, scores[i] - max(others)) if counted[i] and others else 0.0
        std = tensor(*(scores[j] for j in peers[i])).std().item() if gain else 0
        wanted.append(gain / (std + 1e-6) if norm_by_std else gain)
    assert_rows(grpo_passk(*outcome_columns(batch), norm_by_std=norm_by_std)[0], batch["response_mask"], wanted)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_two_best_rows_of_a_group_add_nothing_to_its_maximum(norm_by_std):
    assert (per_row(grpo_passk, *rows([1, 5, 5, 0], [0] * 4), norm_by_std=norm_by_std) == 0).all()


def test_maxrl_on_a_case_worked_by_hand():
    columns = rows([1, 0, 0, 0, 1, 1, 0, 0, 5, 1], [0] * 4 + [1] * 2 + [2] * 2 + [3, 0], [True] * 9 + [False])
    # Group 0 has the mean 1/4. All answers of group 1 are correct, and all answers of group 2 are wrong.
    # Row 8 is alone in its group, and row 9 is invalid.
    assert torch.equal(per_row(maxrl, *columns), tensor(3, -1, -1, -1, 0, 0, 0, 0, 0, 0))


def test_maxrl_gives_exactly_zero_where_the_mean_is_zero_or_below():
    columns = rows([1, -1, -3, 1, 2, 4], [0, 0, 1, 1, 2, 2])
    assert torch.equal(per_row(maxrl, *columns), tensor(0, 0, 0, 0, -1 / 3, 1 / 3))


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_maxrl_equals_a_slow_oracle(seed, make_batch):
    batch = make_batch(seed=seed)
    batch["token_level_rewards"] = batch["token_level_rewards"].abs()
    scores, _, counted, peers = parts(batch)
    means = [sum(scores[j] for j in peers[i]) / max(len(peers[i]), 1) for i in range(8)]
    wanted = [scores[i] / means[i] - 1 if counted[i] and len(peers[i]) > 1 else 0 for i in range(8)]
    assert_rows(maxrl(*outcome_columns(batch))[0], batch["response_mask"], wanted)


@pytest.mark.parametrize("correct", [1, 2, 3])
def test_the_gradient_of_maxrl_is_the_mean_log_likelihood_of_the_correct_answers_minus_that_of_all(correct):
    logits = tensor(0.3, -0.2, 0.9, 0.1).requires_grad_()
    log_probs = logits.log_softmax(0)
    advantages = per_row(maxrl, *rows([1.0] * correct + [0.0] * (4 - correct), [0] * 4))
    (found,) = torch.autograd.grad((advantages * log_probs).mean(), logits, retain_graph=True)
    # arXiv 2602.02710: the mean gradient of log pi over the correct answers, minus the mean over all answers
    (wanted,) = torch.autograd.grad(log_probs[:correct].mean() - log_probs.mean(), logits)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-15)
    assert found.abs().max() > 0.1


def gdpo_columns(components, uid, valid=None):
    count = len(components)
    ignored, mask, uid, valid = rows([NAN] * count, uid, valid)
    return ignored, mask, uid, valid, tensor(*components)


def test_gdpo_on_a_case_worked_by_hand():
    # in a group of two rows, each component is 1/sqrt 2 stds away from the group's mean, whatever its scale
    columns = gdpo_columns([[0, 10], [1, 30], [5, 7], [5, 6], [99, 99]], [0, 0, 1, 1, 0], [True] * 4 + [False])
    away = [0.5 / (0.5**0.5 + 1e-6), 10 / (200**0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)]
    sums = tensor(-away[0] - away[1], away[0] + away[1], away[2], -away[2])
    std = (sums.square().sum() / 3).sqrt()  # the sums of the normalised components have mean 0
    wanted = torch.cat([sums / (std + 1e-6), torch.zeros(1)])
    assert torch.allclose(per_row(gdpo, *columns), wanted, rtol=1e-12)


def test_gdpo_weighs_its_components():
    columns = gdpo_columns([[0, 1], [1, 0], [0, 0]], [0, 0, 0])
    first, both = per_row(gdpo, *columns, weights=(1.0, 0.0)), per_row(gdpo, *columns)
    assert torch.allclose(first, per_row(gdpo, *columns[:4], columns[4][:, :1]), rtol=1e-10)
    assert torch.equal(both, per_row(gdpo, *columns, weights=(1.0, 1.0)))
    assert torch.equal(both, per_row(gdpo, *columns, weights=[1.0, 1.0]))
    assert not torch.allclose(first, both)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0)])
def test_gdpo_wants_a_weight_for_each_component(weights):
    with pytest.raises(
        ValueError, match=rf"weights has shape \({len(weights)},\) for 2 components; give one weight per component"
    ):
        gdpo(*gdpo_columns([[0, 1], [1, 0]], [0, 0]), weights=weights)


@pytest.mark.parametrize("weights", [(), (0.5, 2.0)])
def test_gdpo_equals_a_slow_oracle(weights, make_batch):
    batch = make_batch(seed=11)
    components = batch["reward_components"]
    components[0, 0], components[5] = NAN, NAN
    _, _, counted, _ = parts(batch)
    counted[5] = False
    uid, sums = batch["uid"].tolist(), []
    for i in range(8):
        total = 0.0
        for k, weight in enumerate(weights or (1.0, 1.0)):
            peers = [float(components[j, k]) for j in range(8) if counted[j] and uid[j] == uid[i]]
            peers = [x for x in peers if x == x]
            if components[i, k] == components[i, k] and len(peers) > 1 and counted[i]:
                mean = sum(peers) / len(peers)
                std = (sum((x - mean) ** 2 for x in peers) / (len(peers) - 1)) ** 0.5
                total += weight * (float(components[i, k]) - mean) / (std + 1e-6)
        sums.append(total)
    kept = tensor(*(s for s, keep in zip(sums, counted, strict=True) if keep))
    wanted = [
        (s - float(kept.mean())) / (float(kept.std()) + 1e-6) * keep for s, keep in zip(sums, counted, strict=True)
    ]
    columns = outcome_columns(batch)
    assert_rows(gdpo(*columns, components, weights=weights)[0], batch["response_mask"], wanted)


def test_gdpo_gives_zero_to_a_row_without_any_component_and_counts_it_nowhere():
    with_row = per_row(gdpo, *gdpo_columns([[0, 1], [1, 3], [NAN, NAN], [2, 0]], [0, 0, 0, 0]))
    without = per_row(gdpo, *gdpo_columns([[0, 1], [1, 3], [2, 0]], [0, 0, 0]))
    assert with_row[2] == 0
    assert torch.equal(with_row[[0, 1, 3]], without)


def test_gdpo_refuses_weights_that_are_all_zero(make_batch, call):
    with pytest.raises(ValueError, match=r"weights=\[0.0, 0.0\]: if all weights are 0, nothing is learnt"):
        call(ADVANTAGE_ESTIMATORS.get("gdpo"), make_batch(), weights=(0.0, 0.0))


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk", "maxrl", "gpg", "opo"])
def test_rows_whose_rewards_have_equal_sums_have_no_advantage_in_any_order_and_with_any_padding(name):
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    tokens = [0.1, -0.025, 0.7, 0.3, -0.0125, 1e-3, 1e3]
    rows = [tokens, tokens[::-1], tokens[3:] + tokens[:3]]
    for padding in range(12):
        rewards = torch.tensor([[*row, *[0.0] * padding] for row in rows])
        mask = torch.arange(rewards.size(1)).expand(rewards.shape) < len(tokens)
        columns = {
            "token_level_rewards": rewards, "response_mask": mask, "uid": torch.zeros(3, dtype=torch.int64),
            "valid": torch.ones(3, dtype=torch.bool),
        }  # fmt: skip
        assert not estimator(*[columns[column] for column in columns_of(estimator)])[0].any()
