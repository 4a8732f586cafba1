"""Tests of the estimators that weight credit by the entropy of the policy: GTPO and GRPO-S, arXiv 2508.04349."""

import math
import statistics

import pytest
import torch

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, aggregate_loss, columns_of

gtpo, grpo_s = ADVANTAGE_ESTIMATORS.get("gtpo"), ADVANTAGE_ESTIMATORS.get("grpo_s")
NAN = torch.nan


def columns(entropies, successes, *, mask=None, uid=None, valid=None):
    """Return the columns that both estimators read, with rewards that neither may read."""
    entropies = torch.tensor(entropies, dtype=torch.float64)
    rows = len(entropies)
    return (
        torch.full_like(entropies, NAN),
        torch.ones_like(entropies, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool),
        torch.tensor(uid or [0] * rows),
        torch.tensor(valid or [True] * rows),
        torch.tensor(successes, dtype=torch.float64),
        entropies,
    )


def normalized(values):
    mean, std = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / (std + 1e-6) for value in values]


def flat(tensor, mask):
    return tensor[torch.as_tensor(mask, dtype=torch.bool)].tolist()


# At t = 0, the two correct answers have the entropies 3 and 1, so their shares are 3 / 4 and 1 / 4, times 2 answers. At
# t = 1, only the first correct answer has a token. The wrong answers have 1 / H = 0.25 and 1 at t = 0, so their shares
# are 0.2 and 0.8, times 2 answers.
ENTROPIES = [[3.0, 5.0], [1.0, 9.0], [4.0, 2.0], [1.0, 2.0]]
MASK = [[1, 1], [1, 0], [1, 1], [1, 1]]
SUCCESSES = [1.0, 1.0, 0.0, 0.0]
REWARDS = [1.15, 1.1, 1.05, -1.04, -1.1, -1.16, -1.1]


def test_gtpo_on_a_case_worked_by_hand():
    advantages, returns = gtpo(*columns(ENTROPIES, SUCCESSES, mask=MASK))
    assert flat(returns, MASK) == pytest.approx(REWARDS, rel=1e-7)
    assert flat(advantages, MASK) == pytest.approx(normalized(REWARDS), rel=1e-6)
    assert advantages[1, 1] == returns[1, 1] == 0


def test_separate_normalises_the_tokens_of_correct_and_of_wrong_answers_by_themselves():
    advantages, _ = gtpo(*columns(ENTROPIES, SUCCESSES, mask=MASK), separate=True)
    assert flat(advantages, MASK) == pytest.approx([*normalized(REWARDS[:3]), *normalized(REWARDS[3:])], rel=1e-5)


def test_grpo_s_on_a_case_worked_by_hand():
    # The mean entropies are 4, 1, 3 and 1.5. The two correct answers have the shares 0.8 and 0.2, times 2 answers. The
    # two wrong answers have 1 / H = 1/3 and 2/3, so their shares are 1/3 and 2/3, times 2 answers.
    rewards = [1.16, 1.04, -(1 + 0.2 / 3), -(1 + 0.4 / 3)]
    advantages, returns = grpo_s(*columns(ENTROPIES, SUCCESSES, mask=MASK))
    wanted = torch.tensor(normalized(rewards), dtype=torch.float64)[:, None] * torch.tensor(MASK)
    assert torch.allclose(advantages, wanted, rtol=1e-6)
    assert torch.equal(advantages, returns)


def oracle(name, batch, first, second, separate):
    """Compute the advantages from the paper's equations with loops, as a dict from (row, slot) to the advantage."""
    mask, entropies, successes = batch["response_mask"], batch["entropies"], batch["successes"]
    slots = {i: mask[i].nonzero()[:, 0].tolist() for i in range(len(mask)) if batch["valid"][i] and mask[i].any()}
    found = {}
    for uid in set(batch["uid"].tolist()):
        rows = [i for i in slots if batch["uid"][i] == uid]
        if len({bool(successes[i]) for i in rows}) < 2:
            continue
        reward = {}
        for good in (True, False):
            ours = [i for i in rows if bool(successes[i]) is good]
            sign, power = (1, 1) if good else (-1, -1)
            if name == "gtpo":
                for t in range(max(len(slots[i]) for i in ours)):
                    running = {i: entropies[i, slots[i][t]].item() ** power for i in ours if t < len(slots[i])}
                    for i, weight in running.items():
                        share = weight / math.fsum(running.values()) * len(running)
                        reward[i, slots[i][t]] = sign * (first + second * share)
            else:
                weights = {i: statistics.mean(entropies[i, slots[i]].tolist()) ** power for i in ours}
                for i, weight in weights.items():
                    reward[i] = sign * (first + second * weight / math.fsum(weights.values()) * len(ours))
        parts = [list(reward)]
        if separate:
            parts = [[key for key in reward if bool(successes[key[0]]) is good] for good in (True, False)]
        for keys in parts:
            values = normalized([reward[key] for key in keys]) if len(keys) > 1 else [0.0]
            found |= dict(zip(keys, values, strict=True))
    if name == "grpo_s":
        found = {(i, t): value for i, value in found.items() for t in slots[i]}
    return found


CASES = [("gtpo", ("alpha_1", "alpha_2"), False), ("gtpo", ("alpha_1", "alpha_2"), True)]
CASES.append(("grpo_s", ("beta_1", "beta_2"), False))


@pytest.mark.parametrize(("name", "knobs", "separate"), CASES)
@pytest.mark.parametrize("weights", [(1.0, 0.1), (0.3, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_the_estimators_equal_loops_over_the_papers_equations(name, knobs, separate, weights, seed, make_batch, call):
    batch = make_batch(seed=seed)
    batch["entropies"] = batch["entropies"] + 0.01
    batch["successes"] = torch.tensor([1.0, 1, 0, 0, 1, 0, 1, 0], dtype=torch.float64).roll(seed)
    batch["successes"][[0, 2]] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    given = dict(zip(knobs, weights, strict=True)) | ({"separate": True} if separate else {})
    advantages, _ = call(ADVANTAGE_ESTIMATORS.get(name), batch, **given)
    wanted = oracle(name, batch, *weights, separate)
    assert len(wanted) > 8
    dense = torch.zeros_like(advantages)
    for slot, value in wanted.items():
        dense[slot] = value
    assert torch.allclose(advantages, dense, rtol=1e-5, atol=1e-6)  # the estimators add 1e-8 to entropies


def test_the_gradient_of_gtpo_is_that_of_its_objective():
    """On policy, eq. 7 of arXiv 2508.04349 is the mean over all tokens of the advantage times the ratio."""
    logits = torch.linspace(-1, 1, 4 * 2 * 3, dtype=torch.float64).view(4, 2, 3).requires_grad_()
    log_pi = logits.log_softmax(-1)
    entropies = -(log_pi.exp() * log_pi).sum(-1)
    given = (*columns(ENTROPIES, SUCCESSES, mask=MASK)[:-1], entropies)
    advantages, _ = gtpo(*given)
    chosen, mask = log_pi[..., 0], torch.tensor(MASK, dtype=torch.bool)
    loss = aggregate_loss(-advantages * (chosen - chosen.detach()).exp(), mask, "token-mean")
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    batch = {"response_mask": mask, "entropies": entropies.detach(), "successes": given[4], "valid": given[3]}
    wanted = oracle("gtpo", {**batch, "uid": given[2]}, 1.0, 0.1, separate=False)
    objective = sum(value * chosen[slot] for slot, value in wanted.items()) / len(wanted)
    (expected,) = torch.autograd.grad(-objective, logits)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("estimator", [gtpo, grpo_s])
def test_a_group_with_one_outcome_teaches_nothing_whatever_its_entropies(estimator):
    given = columns([[3.0, 1.0], [1.0, 2.0], [1.0, 2.0], [5.0, 2.0]], [1.0, 1.0, 0.0, 0.0], uid=[1, 1, 2, 2])
    assert all((output == 0).all() for output in estimator(*given))


@pytest.mark.parametrize("estimator", [gtpo, grpo_s])
def test_an_undecided_answer_is_as_good_as_absent(estimator):
    entropies, successes = [*ENTROPIES, [7.0, NAN]], [*SUCCESSES, NAN]
    advantages, _ = estimator(*columns(entropies, successes, mask=[*MASK, [1, 1]]))
    without, _ = estimator(*columns(ENTROPIES, SUCCESSES, mask=MASK))
    assert torch.equal(advantages[:4], without)
    assert (advantages[4] == 0).all()


@pytest.mark.parametrize("estimator", [gtpo, grpo_s])
def test_entropies_of_zero_give_equal_shares(estimator):
    # rounding can turn an entropy of 0 into a small negative number such as -1e-9
    advantages, _ = estimator(*columns([[0.0, -1e-9], [0.0, 0.0], [0.0, 0.0]], [1.0, 0.0, 0.0]))
    assert advantages[0].tolist() == [advantages[0, 0].item()] * 2
    assert torch.equal(advantages[1], advantages[2])
    assert advantages[0, 0] > 0 > advantages[1, 0]


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e12])
@pytest.mark.parametrize("estimator", [gtpo, grpo_s])
def test_extreme_entropies_stay_finite(estimator, scale):
    given = columns([[scale, 1.0], [1.0, scale], [scale, 1.0], [1.0, scale]], SUCCESSES)
    for dtype in (torch.float32, torch.float64):
        advantages, _ = estimator(*given[:-1], given[-1].to(dtype))
        assert advantages.isfinite().all()
        assert (advantages[:2] > 0).all()
        assert (advantages[2:] < 0).all()


@pytest.mark.parametrize("estimator", [gtpo, grpo_s])
@pytest.mark.parametrize("broken", [NAN, torch.inf])
def test_an_entropy_that_is_no_number_never_becomes_an_advantage_of_zero(estimator, broken):
    advantages, _ = estimator(*columns([[3.0, broken], *ENTROPIES[1:]], SUCCESSES, mask=MASK))
    assert not advantages[0].isfinite().any()


def test_gtpo_rewards_at_each_token_sum_to_the_number_of_answers_if_the_weights_sum_to_one(make_batch, call):
    batch = make_batch()
    batch["response_mask"], batch["uid"] = torch.ones_like(batch["response_mask"]), torch.zeros(8, dtype=torch.int64)
    _, rewards = call(gtpo, batch, alpha_1=0.9, alpha_2=0.1)
    correct = (batch["successes"] > 0) & batch["valid"]
    assert torch.allclose(rewards[correct].sum(0), torch.full((9,), float(correct.sum()), dtype=torch.float64))
    wrong = (batch["successes"] == 0) & batch["valid"]
    assert torch.allclose(rewards[wrong].sum(0), torch.full((9,), -float(wrong.sum()), dtype=torch.float64))


@pytest.mark.parametrize(("estimator", "first"), [(gtpo, "alpha"), (grpo_s, "beta")])
def test_weights_that_teach_nothing_and_batches_without_a_decided_answer_are_refused(estimator, first):
    given = columns(ENTROPIES, SUCCESSES)
    for weight in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"^{first}_2={weight} must be finite and >= 0; "):
            estimator(*given, **{f"{first}_2": weight})
    with pytest.raises(ValueError, match=rf"^{first}_1=0, {first}_2=0: every reward would be 0"):
        estimator(*given, **{f"{first}_1": 0, f"{first}_2": 0})
    with pytest.raises(ValueError, match=r"^successes=NaN in all rows: no reward function decides"):
        estimator(*columns(ENTROPIES, [NAN] * 4))


def test_both_estimators_read_the_same_columns():
    assert columns_of(gtpo) == columns_of(grpo_s)


@pytest.mark.parametrize("estimator", [gtpo, grpo_s])
def test_the_shares_of_a_group_do_not_depend_on_other_groups(estimator):
    others = [[6.0, 1.0], [0.5, 3.0], [2.0, 2.0], [8.0, 0.25]]
    alone = [estimator(*columns(rows, SUCCESSES))[0] for rows in (ENTROPIES, others)]
    together, _ = estimator(*columns(ENTROPIES + others, SUCCESSES * 2, uid=[0] * 4 + [1] * 4))
    assert torch.allclose(together, torch.cat(alone), rtol=1e-9)
