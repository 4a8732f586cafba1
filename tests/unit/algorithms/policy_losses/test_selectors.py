"""Tests of the selectors, which choose the tokens of a mini-batch that the column `selected` marks."""

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES, TOKEN_SELECTORS, aggregate_loss, knobs_of
from rltrain.algorithms.policy_losses.selection import smallest

NAMES = TOKEN_SELECTORS.names()
# for each selector, knob values that select some but not all tokens of a random batch
SOME = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "m2po": {"m2_threshold": 0.04},
    "top_entropy": {"entropy_fraction": 0.3},
}


@pytest.fixture
def select(call):
    return lambda name, batch, **knobs: call(TOKEN_SELECTORS.get(name), batch, **{**SOME[name], **knobs})


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# covariance terms (log pi - mean) (A - mean) of the trained tokens, where the mask excludes the NaN token:
#   row 0: (-2)(-2) = 4    (2)(2) = 4      (0)(1) = 0
#   row 1: (-1)(-2) = 2    (1)(1) = 1      masked
LOG_PROBS, ADVANTAGES = table([-5, -1, -3], [-4, -2, torch.nan]), table([-1, 3, 2], [-1, 2, torch.nan])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
DRAWS = table([0.5, 0.9, 0.0], [0.3, 0.7, 0.1])


def picked(selected):
    return [tuple(index) for index in selected.nonzero().tolist()]


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        # The count floor(2e-4 * 5) = 0 is raised to 1.
        # Of the four tokens with covariance in the interval [1, 5], token (1, 0) has the smallest draw.
        ({}, [(1, 0)]),
        ({"clip_cov_ratio": 0.4}, [(0, 0), (1, 0)]),
        ({"clip_cov_ratio": 0.59}, [(0, 0), (1, 0)]),  # floor(2.95)
        ({"clip_cov_ratio": 0.6}, [(0, 0), (1, 0), (1, 1)]),
        # all four covariances lie in the default interval [1, 5], which includes its end points
        ({"clip_cov_ratio": 1.0}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ({"clip_cov_ratio": 1.0, "clip_cov_lb": 1.01}, [(0, 0), (0, 1), (1, 0)]),
        ({"clip_cov_ratio": 1.0, "clip_cov_ub": 4.0}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ({"clip_cov_ratio": 1.0, "clip_cov_ub": 3.9}, [(1, 0), (1, 1)]),
        ({"clip_cov_ratio": 1.0, "clip_cov_lb": 3.0}, [(0, 0), (0, 1)]),
        ({"clip_cov_lb": 4.5}, []),
    ],
)
def test_clip_cov_draws_among_the_tokens_in_range(knobs, expected):
    selector = TOKEN_SELECTORS.get("clip_cov")
    assert picked(selector(LOG_PROBS, ADVANTAGES, MASK, DRAWS, **knobs)) == expected


def test_clip_cov_draws_two_in_ten_thousand_by_default(make_batch):
    batch = make_batch(length=4000)
    columns = [batch[c] for c in ("old_log_probs", "advantages", "response_mask", "random_draws")]
    selected = TOKEN_SELECTORS.get("clip_cov")(*columns, clip_cov_lb=0.0)
    assert selected.sum() == int(2e-4 * int(batch["response_mask"].sum())) > 2


@pytest.mark.parametrize(("covariance", "inside"), [(0.99, False), (1.0, True), (5.0, True), (5.01, False)])
def test_clip_cov_looks_at_covariances_from_one_to_five_by_default(covariance, inside):
    # Each token differs by 2 from the mean log-prob and by covariance / 2 from the mean advantage, so the product of
    # the two differences is `covariance`.
    log_probs, advantages = table([-4, 0]), table([-covariance, 0])
    selected = TOKEN_SELECTORS.get("clip_cov")(log_probs, advantages, torch.ones(1, 2), torch.zeros(1, 2))
    assert selected.tolist() == [[inside, inside]]


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, [(0, 0)]),  # of the two tokens with covariance 4, the token with the smaller draw is selected
        ({"kl_cov_ratio": 0.4}, [(0, 0), (0, 1)]),
        ({"kl_cov_ratio": 0.6}, [(0, 0), (0, 1), (1, 0)]),
        ({"kl_cov_ratio": 0.8}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        # the token with covariance 0 is not selected, because it does not lower the entropy
        ({"kl_cov_ratio": 1.0}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
)
def test_kl_cov_takes_the_largest_covariances(knobs, expected):
    assert picked(TOKEN_SELECTORS.get("kl_cov")(LOG_PROBS, ADVANTAGES, MASK, DRAWS, **knobs)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [0.0, 0.1, -1 / 3])
def test_kl_cov_selects_nothing_where_all_advantages_are_equal(advantage, dtype):
    """Rounding makes the float32 mean of 1,000 values of 0.1 differ from 0.1, which must not count as covariance."""
    log_probs = -torch.rand(10, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    columns = log_probs, torch.full_like(log_probs, advantage), torch.ones(10, 100), torch.rand(10, 100)
    assert not TOKEN_SELECTORS.get("kl_cov")(*columns, kl_cov_ratio=0.1).any()
    equal = torch.full_like(log_probs, advantage)
    assert not TOKEN_SELECTORS.get("kl_cov")(equal, *columns[:1], *columns[2:], kl_cov_ratio=0.1).any()


def test_kl_cov_takes_its_share_of_tokens_that_tie_by_their_draws_and_whatever_the_order_of_rows():
    """The 90 tokens of the nine right answers have probability 1, and therefore tie for the largest covariance."""
    log_probs, advantages = torch.zeros(10, 10).double(), torch.ones(10, 10).double()
    # unlikely tokens of a right answer and likely tokens of a wrong answer have covariances below 0
    log_probs[9, :5], advantages[9, 5:] = -3.0, -9.0
    mask, draws = torch.ones(10, 10), torch.rand(10, 10, generator=torch.Generator().manual_seed(1)).double()
    draws[9] = 0.0
    selected = TOKEN_SELECTORS.get("kl_cov")(log_probs, advantages, mask, draws, kl_cov_ratio=0.05)
    wanted = draws[:9].flatten().sort().values[4]
    assert selected.sum() == 5
    assert torch.equal(selected[:9], draws[:9] <= wanted)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(2))
    moved = [column[order] for column in (log_probs, advantages, mask, draws)]
    assert torch.equal(TOKEN_SELECTORS.get("kl_cov")(*moved, kl_cov_ratio=0.05), selected[order])


def test_kl_cov_takes_two_in_a_thousand_by_default(make_batch):
    batch = make_batch(length=600)
    columns = [batch[c] for c in ("old_log_probs", "advantages", "response_mask", "random_draws")]
    assert TOKEN_SELECTORS.get("kl_cov")(*columns).sum() == int(2e-3 * int(batch["response_mask"].sum())) > 3


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.33, 0.5, 1.0])
def test_top_entropy_takes_what_reaches_the_quantile_of_the_trained_tokens(fraction, make_batch):
    batch = make_batch(length=30)
    mask, entropies = batch["response_mask"], batch["entropies"]
    threshold = torch.quantile(entropies[mask], 1 - fraction)
    selected = TOKEN_SELECTORS.get("top_entropy")(entropies, mask, entropy_fraction=fraction)
    assert torch.equal(selected, mask & (entropies >= threshold))
    if fraction == 0.2:
        assert torch.equal(selected, TOKEN_SELECTORS.get("top_entropy")(entropies, mask))


def test_top_entropy_by_hand():
    entropies, mask = table([0.1, 0.5, 9.0, 0.3], [0.4, 0.2, 0.5, 0.0]), torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
    selector = TOKEN_SELECTORS.get("top_entropy")
    assert picked(selector(entropies, mask)) == [(0, 1), (1, 2)]  # the default picks 1 + floor(0.2 * 5) = 2 tokens
    # the count is 1, but two tokens are selected, because they tie for the highest entropy
    assert picked(selector(entropies, mask, entropy_fraction=0.19)) == [(0, 1), (1, 2)]
    # the fraction 0.34 selects 1 + floor(0.34 * 5) = 1 + floor(1.7) = 2 tokens
    assert picked(selector(entropies, mask, entropy_fraction=0.34)) == [(0, 1), (1, 2)]
    assert picked(selector(entropies, mask, entropy_fraction=0.4)) == [(0, 1), (1, 0), (1, 2)]


def test_the_smallest_few_with_ties_and_with_fewer_candidates_than_asked_for():
    values, everything = table([3, 1, 2, 1, 5]), torch.ones(1, 5, dtype=torch.bool)
    assert smallest(values, everything, 1).tolist() == [[False, True, False, True, False]]
    assert smallest(values, everything, 3).tolist() == [[False, True, True, True, False]]
    assert smallest(values, everything, 9).tolist() == [[True] * 5]
    assert smallest(values, values > 2, 1).tolist() == [[True, False, False, False, False]]
    assert smallest(values, values > 9, 1).tolist() == [[False] * 5]


@pytest.mark.parametrize("name", NAMES)
def test_A5_the_order_of_rows_does_not_matter(name, select, make_batch, take_rows):
    batch = make_batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    selected = select(name, batch)
    assert torch.equal(select(name, take_rows(batch, order)), selected[order])
    assert 0 < selected.sum() < batch["response_mask"].sum()


@pytest.mark.parametrize("garbage", [1e4, -1e4, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", NAMES)
def test_B2_what_masked_slots_hold_changes_nothing_and_they_are_never_selected(name, garbage, select, make_batch):
    batch = make_batch()
    mask = batch["response_mask"]
    dirty = {
        key: value.masked_fill(~mask, garbage) if value.shape == mask.shape and value.is_floating_point() else value
        for key, value in batch.items()
    }
    selected = select(name, dirty)
    assert torch.equal(selected, select(name, batch))
    assert selected.dtype == torch.bool
    assert not (selected & ~mask).any()
    assert torch.equal(select(name, {**batch, "response_mask": mask.long()}), selected)


@pytest.mark.parametrize("name", NAMES)
def test_A6_nothing_is_selected_where_nothing_is_trained_and_one_token_at_least_elsewhere(name, select, make_batch):
    """With a single trained token, kl_cov selects nothing, because the token's covariance is 0.

    m2po has no fraction of tokens to select, but a limit on the second moment. The token (2, 1) is not a candidate of
    m2po. With a small limit, m2po selects all candidates.
    """
    batch = make_batch()
    nothing = torch.zeros_like(batch["response_mask"])
    assert not select(name, {**batch, "response_mask": nothing}).any()
    one = nothing.clone()
    one[2, 1] = True
    knobs = {"clip_cov_lb": 0.0, "clip_cov_ub": 0.0} if name == "clip_cov" else {}  # a single token has covariance 0
    assert torch.equal(select(name, {**batch, "response_mask": one}, **knobs), one & (name not in ("kl_cov", "m2po")))
    small = {knob: 1e-9 for knob in SOME[name] if "lb" not in knob and "ub" not in knob}
    moved = batch["advantages"] * (batch["old_log_probs"] - batch["rollout_log_probs"]) > 0
    everything = int((moved & batch["response_mask"]).sum())
    assert select(name, batch, **small).sum() == (everything if name == "m2po" else 1)


@pytest.mark.parametrize("name", NAMES)
def test_selections_carry_no_gradient_and_work_in_bfloat16(name, select, make_batch):
    batch = make_batch()
    narrow = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    wide = {k: v.float() if v.is_floating_point() else v for k, v in narrow.items()}
    assert torch.equal(select(name, narrow), select(name, wide))
    leaves = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in batch.items()}
    assert not select(name, leaves).requires_grad


CHANGES = [
    ("clip_cov", {}, {"clip_cov_ratio": 0.1}),
    # With ratio 1, every token within the covariance bounds is selected, so other bounds select other tokens.
    ("clip_cov", {"clip_cov_ratio": 1.0}, {"clip_cov_lb": 0.5}),
    ("clip_cov", {"clip_cov_ratio": 1.0}, {"clip_cov_ub": 0.6}),
    ("kl_cov", {}, {"kl_cov_ratio": 0.1}),
    ("m2po", {}, {"m2_threshold": 0.2}),
    ("top_entropy", {}, {"entropy_fraction": 0.15}),
]


@pytest.mark.parametrize(("name", "base", "changed"), CHANGES)
def test_H1_every_knob_of_every_selector_changes_what_it_selects(name, base, changed, select, make_batch):
    batch = make_batch(length=64)
    assert not torch.equal(select(name, batch, **base), select(name, batch, **base, **changed))


@pytest.mark.parametrize("name", NAMES)
def test_H1_all_knobs_of_a_selector_are_tested_and_none_is_a_knob_of_its_loss_too(name):
    knobs = set(knobs_of(TOKEN_SELECTORS.get(name)))
    assert {knob for changes in CHANGES if changes[0] == name for knob in changes[2]} == knobs
    assert not knobs & set(knobs_of(POLICY_LOSSES.get(name)))


SHARES = [("clip_cov", "clip_cov_ratio"), ("kl_cov", "kl_cov_ratio"), ("top_entropy", "entropy_fraction")]


@pytest.mark.parametrize(("name", "knob"), SHARES)
@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(name, knob, value, select, make_batch):
    with pytest.raises(ValueError, match=f"{knob}={value} must be > 0 and <= 1"):
        select(name, make_batch(), **{knob: value})


@pytest.mark.parametrize("lower", [2.1, float("nan")])
def test_an_empty_range_of_covariances_is_refused_and_a_point_is_a_range(lower, select, make_batch):
    with pytest.raises(ValueError, match=f"clip_cov_lb={lower} must be <= clip_cov_ub=2"):
        select("clip_cov", make_batch(), clip_cov_lb=lower)
    assert not select("clip_cov", make_batch(), clip_cov_lb=2.0).any()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_A1_selecting_before_splitting_gives_the_whole_gradient_and_after_it_does_not(
    name, size, select, make_batch, call, take_rows
):
    batch = make_batch(spread=0.3)
    mask = batch["response_mask"]
    counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum()}

    def gradient(sizes, selected):
        log_probs = batch["log_probs"].clone().requires_grad_()
        for rows in torch.arange(8).split(sizes):
            micro = take_rows({**batch, "log_probs": log_probs}, rows)
            micro["selected"] = select(name, micro) if selected is None else selected[rows]
            losses, _ = call(POLICY_LOSSES.get(name), micro)
            aggregate_loss(losses, micro["response_mask"], "token-mean", **counts).backward()
        return log_probs.grad

    whole = gradient(8, select(name, batch))
    assert torch.allclose(gradient(size, select(name, batch)), whole, rtol=1e-10, atol=1e-14)
    assert (gradient(size, None) - whole).abs().max() > 1e-3
