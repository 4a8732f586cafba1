import math

import pytest
import torch

from rltrain.algorithms import (
    POLICY_LOSSES,
    aggregate_loss,
    effective_sample_size,
    rollout_correction,
    rollout_diagnostics,
    rollout_rejection,
)

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")
# The bounds are 0.5 and 2. Row 0 has a ratio within the bounds, a ratio above, a ratio below and a masked token. All
# ratios of row 1 are within the bounds.
RATIOS = torch.tensor([[1.5, 4.0, 0.25, 9.0], [1.25, 1.0, 0.8, 1.0], [0.1, 0.1, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])


def correct(ratios=RATIOS, mask=MASK, advantages=None, *, level="token", mode="mask", lower=0.5, upper=2.0):
    rollout = torch.full_like(ratios, -2.0)
    return rollout_correction(
        rollout + ratios.log(), rollout, mask, advantages, level=level, mode=mode, lower=lower, upper=upper
    )


# The trained tokens' ratios have the products 1.5, 1.0, .01 and the geometric means 1.5^(1/3), 1, .1 in the three rows.
EXPECTED = {
    ("token", "truncate"): ([[1.5, 2, 0.5, 0], [1.25, 1, 0.8, 1], [0.5, 0.5, 0, 0]], MASK.tolist()),
    ("token", "mask"): ([[1.5, 0, 0, 0], [1.25, 1, 0.8, 1], [0] * 4], [[1, 0, 0, 0], [1] * 4, [0] * 4]),
    ("sequence", "truncate"): ([[1.5, 1.5, 1.5, 0], [1] * 4, [0.5, 0.5, 0, 0]], MASK.tolist()),
    ("sequence", "mask"): ([[1.5, 1.5, 1.5, 0], [1] * 4, [0] * 4], [[1, 1, 1, 0], [1] * 4, [0] * 4]),
    ("geometric", "truncate"): ([[1.5 ** (1 / 3)] * 3 + [0], [1] * 4, [0.5, 0.5, 0, 0]], MASK.tolist()),
    ("geometric", "mask"): ([[1.5 ** (1 / 3)] * 3 + [0], [1] * 4, [0] * 4], [[1, 1, 1, 0], [1] * 4, [0] * 4]),
}


@pytest.mark.parametrize(("level", "mode"), EXPECTED)
def test_each_level_and_mode_on_a_case_worked_by_hand(level, mode):
    weights, mask, metrics = correct(level=level, mode=mode)
    wanted_weights, wanted_mask = EXPECTED[level, mode]
    assert torch.allclose(weights, torch.tensor(wanted_weights, dtype=torch.float64), rtol=1e-12)
    assert torch.equal(mask, torch.tensor(wanted_mask) == 1)
    assert metrics["weight_mean"].item() == pytest.approx(weights.sum().item())
    assert metrics["dropped_fraction"].item() == MASK.sum() - mask.sum()
    assert metrics["outside_fraction"].item() == (4 if level == "token" else 2)
    kl = (RATIOS - 1 - RATIOS.log())[MASK == 1].sum().item()
    assert metrics["rollout_kl"].item() == pytest.approx(kl)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_D8_where_rollout_and_trainer_agree_every_weight_is_one_and_nothing_is_dropped(level, mode):
    weights, mask, metrics = correct(torch.ones_like(RATIOS), level=level, mode=mode)
    assert torch.equal(weights, MASK.double())
    assert torch.equal(mask, MASK == 1)
    assert metrics["rollout_kl"].item() == metrics["outside_fraction"].item() == metrics["dropped_fraction"].item() == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("one_sided", [False, True])
def test_D8_weights_are_detached_bounded_and_finite(level, mode, one_sided):
    generator = torch.Generator().manual_seed(0)
    log_ratio = 1e3 * torch.randn(16, 5, generator=generator, dtype=torch.float64)
    log_ratio[::2] /= 1e4
    old = log_ratio.requires_grad_()
    advantages = torch.randn(16, 5, generator=generator) if one_sided else None
    weights, mask, metrics = rollout_correction(
        old, torch.zeros_like(log_ratio), torch.ones(16, 5), advantages, level=level, mode=mode, lower=0.5, upper=2.0
    )
    assert not weights.requires_grad
    assert ((weights[mask] >= 0.5) & (weights[mask] <= 2)).all()
    assert (weights[~mask] == 0).all()
    assert mask.any()
    assert all(value.isfinite() and not value.requires_grad for value in metrics.values())


def test_D8_behaviour_is_the_policy_that_sampled():
    """Truncated weights turn the mean reward under the rollout policy into the mean under the trained policy.

    The test enumerates all tokens, so both means are exact.
    """
    rollout, trainer = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    weights, _, _ = rollout_correction(
        trainer.log()[None], rollout.log()[None], torch.ones(1, 3), level="token", mode="truncate", lower=0, upper=None
    )
    reward = torch.tensor([1.0, -2.0, 5.0]).double()
    assert (rollout * weights[0] * reward).sum().item() == pytest.approx((trainer * reward).sum().item())


@pytest.mark.parametrize("level", LEVELS)
def test_D9_without_a_cap_a_long_row_far_off_still_has_finite_weights(level):
    far = torch.full((1, 1000), 50.0)
    weights, _, _ = rollout_correction(
        far, -far, torch.ones(1, 1000), level=level, mode="truncate", lower=None, upper=None
    )
    assert torch.allclose(weights, torch.tensor(20.0).exp())
    weights, _, _ = rollout_correction(
        -far, far, torch.ones(1, 1000), level=level, mode="truncate", lower=None, upper=None
    )
    assert torch.allclose(weights, torch.tensor(-20.0).exp(), rtol=1e-5, atol=0)


def test_a_cap_alone_is_truncated_importance_sampling():
    weights, _, _ = correct(mode="truncate", lower=None)
    assert torch.allclose(weights, RATIOS.clamp(max=2) * MASK, rtol=1e-12)


def test_with_advantages_only_bad_tokens_are_dropped():
    advantages = torch.tensor([[1.0, 1.0, -1.0, 0], [-1.0] * 4, [1.0, -1.0, 0, 0]])
    weights, mask, _ = correct(advantages=advantages, mode="mask")
    assert torch.equal(mask, torch.tensor([[1, 1, 0, 0], [1] * 4, [1, 0, 0, 0]]) == 1)
    assert weights[0, 1].item() == 2  # the weight of a kept token is capped at 2
    _, mask, _ = correct(advantages=advantages.abs(), mode="mask")
    assert torch.equal(mask, MASK == 1)
    for mode in MODES:
        assert torch.equal(correct(advantages=0 * advantages, mode=mode)[1], MASK == 1)


# Each mask marks the kept tokens of two answers of four tokens.
# HALVES drops half of each answer, ONE_ROW drops one answer, and TWO_TOKENS drops two of the eight tokens.
HALVES = [[1, 1, 0, 0], [1, 1, 0, 0]]
ONE_ROW = [[1, 1, 1, 1], [0, 0, 0, 0]]
TWO_TOKENS = [[1, 1, 1, 0], [1, 1, 1, 0]]
# The number by which each aggregation mode divides the loss of a token, for 2 answers of 4 tokens and a maximum length
# of 16 tokens.
DENOMINATORS = {
    "token-mean": 8, "token-sum": 1, "seq-mean-token-sum": 2, "seq-mean-token-mean": 8, "seq-mean-token-sum-norm": 32,
}  # fmt: skip


def kept_gradient(drop, agg_mode):
    """Return the gradient of the loss with respect to log pi, at advantage 1 and ratio 1.

    The function `drop` returns the tokens' weights and the mask of the tokens whose policy loss is kept.
    """
    log_probs = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
    everything = torch.ones(2, 4)
    losses, _ = POLICY_LOSSES.get("vanilla")(log_probs, log_probs.detach(), everything, everything)
    weights, mask, _ = drop(log_probs.detach(), everything)
    losses = torch.where(mask, weights * losses, 0)
    loss = aggregate_loss(losses, everything, agg_mode, max_response_length=16)
    return torch.autograd.grad(loss, log_probs)[0]


def far_where(kept):
    """Return log-ratios log(pi_rollout / pi_actor) that are 0 for kept tokens and 2 for dropped tokens."""
    return 2.0 * (1 - torch.tensor(kept, dtype=torch.float64))


@pytest.mark.parametrize("agg_mode", DENOMINATORS)
@pytest.mark.parametrize("kept", [HALVES, ONE_ROW, TWO_TOKENS], ids=["halves", "one row", "two tokens"])
def test_A4_a_kept_token_has_the_gradient_that_it_has_where_nothing_is_dropped(kept, agg_mode):
    def drop(log_probs, mask):
        rollout = log_probs + far_where(kept)
        return rollout_correction(log_probs, rollout, mask, level="token", mode="mask", lower=0.5, upper=5.0)

    expected = torch.tensor(kept) / -DENOMINATORS[agg_mode]
    assert torch.allclose(kept_gradient(drop, agg_mode), expected.double(), rtol=1e-12)


@pytest.mark.parametrize("agg_mode", DENOMINATORS)
@pytest.mark.parametrize(("level", "kept"), [("token", HALVES), ("max", HALVES), ("sequence", ONE_ROW)])
def test_A4_a_rejected_token_leaves_every_count_as_it_was(level, kept, agg_mode):
    def drop(log_probs, mask):
        bounds = {"kl_estimator": "k1", "level": level, "upper": 0.5}
        found, _ = rollout_rejection(log_probs, log_probs + far_where(kept), mask, **bounds)
        return torch.ones_like(log_probs), found, None

    # with level "max", one distant token drops its whole row
    expected = torch.tensor(kept) * (level != "max") / -DENOMINATORS[agg_mode]
    assert torch.allclose(kept_gradient(drop, agg_mode), expected.double(), rtol=1e-12)


def test_a_weight_of_a_whole_row_is_the_product_over_tokens_that_are_dropped_too():
    """In truncated importance sampling by sequence, a row's weight is the product over all its trained tokens.

    Tokens that rejection drops still contribute to the weight of their row.
    """
    weights, _, _ = correct(level="sequence", mode="truncate", upper=None)
    kept, _ = rollout_rejection(
        RATIOS.log() - 2, torch.full_like(RATIOS, -2), MASK, kl_estimator="abs", level="token", upper=0.5
    )
    assert kept[0].tolist() == [True, False, False, False]
    assert (weights * kept)[0].tolist() == pytest.approx([1.5, 0, 0, 0])


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"level": "word"}, "level='word' is not known; use one of: token, sequence, geometric"),
        ({"mode": "drop"}, "mode='drop' is not known; use one of: truncate, mask"),
        ({"lower": 1.5}, "lower=1.5, upper=2.0"),
        ({"upper": 0.9}, "upper=0.9"),
        ({"lower": -0.1}, "lower=-0.1"),
        ({"upper": math.nan}, "upper=nan"),
        ({"lower": 1.5, "upper": None}, "0 <= lower <= 1 <= upper must hold"),
    ],
)
def test_what_cannot_be_done_is_refused(knobs, complaint):
    with pytest.raises(ValueError, match=complaint):
        correct(**knobs)


@pytest.mark.parametrize("level", LEVELS)
def test_a_ratio_on_the_bound_is_inside(level):
    _, mask, metrics = correct(torch.ones(2, 1), torch.ones(2, 1), level=level, mode="mask", lower=1.0, upper=1.0)
    assert mask.all()
    assert metrics["outside_fraction"].item() == 0


def test_D8_the_decoupled_objective_has_the_gradient_of_samples_from_the_policy_itself():
    """The gradient of the decoupled objective (arXiv 2110.00641, 2505.24298) is the on-policy gradient of pi.

    The behaviour policy mu samples, pi_old is the proximal policy, and pi is trained.

    By enumeration,

    E_mu[(pi_old / mu) (pi / pi_old) A grad log pi] = E_pi[A grad log pi] where nothing is clipped.
    """
    generator = torch.Generator().manual_seed(0)
    mu, old, noise, advantages = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(4))
    mu, old, theta = mu.log_softmax(-1), old.log_softmax(-1), (old + 0.05 * noise).requires_grad_()
    pi = theta.log_softmax(-1)
    ones = torch.ones(6, 1)  # each word of the vocabulary is a row of a single token
    weights, mask, _ = rollout_correction(
        old[:, None], mu[:, None], ones, level="token", mode="truncate", lower=None, upper=None
    )
    losses, metrics = POLICY_LOSSES.get("vanilla")(pi[:, None], old[:, None], advantages[:, None], mask)
    assert metrics["clip_fraction"].item() == 0
    assert (weights - 1).abs().max() > 0.5  # mu differs from pi_old
    assert (pi - old).abs().max() > 0.01  # pi_old differs from pi
    (decoupled,) = torch.autograd.grad((mu.exp() * (weights * losses)[:, 0]).sum(), theta, retain_graph=True)
    (on_policy,) = torch.autograd.grad(-(pi.detach().exp() * advantages * pi).sum(), theta)
    assert (decoupled - on_policy).abs().max() <= 1e-10 * on_policy.abs().max()


ESTIMATORS = {  # KL estimators as functions of d = log pi_rollout - log pi_old
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": lambda d: abs(d),
}
# Values of d. Row 0 sums to 0, row 1 has one distant token, row 2 is far below 0 and has a masked token, and row 3 has
# no trained token.
DISTANCES = torch.tensor([[0.5, -0.5, 0.0], [1.5, 0.0, 0.0], [-1.0, -1.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
TRAINED = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]])
NONE, ALL = [0, 0, 0], [1, 1, 1]


def reject(distances=DISTANCES, mask=TRAINED, advantages=None, **knobs):
    old = torch.full_like(distances, -2.0)
    return rollout_rejection(old, old + distances, mask, advantages, **knobs)


# k2 of the trained tokens of each row: .125 .125 0 | 1.125 0 0 | .5 .5
# k3 of the trained tokens of each row: e^-.5-.5=.107 e^.5-1.5=.149 0 | e^-1.5+.5=.723 0 0 | e-2=.718 .718
REJECTIONS = [
    ("k1", "token", {"upper": 0.4}, [[0, 1, 1], [0, 1, 1], [1, 1, 0], NONE]),
    ("k1", "token", {"lower": -0.4}, [[1, 0, 1], ALL, [0, 0, 0], NONE]),
    ("k1", "sequence", {"upper": 0.4}, [ALL, NONE, [1, 1, 0], NONE]),  # the rows' means of k1 are 0, .5, -1
    ("k1", "sequence", {"lower": -0.4, "upper": 0.6}, [ALL, ALL, NONE, NONE]),
    ("k1", "max", {"upper": 1.0}, [ALL, NONE, [1, 1, 0], NONE]),
    ("k1", "max", {"lower": -0.6, "upper": 2.0}, [ALL, ALL, NONE, NONE]),
    ("k2", "token", {"upper": 0.3}, [ALL, [0, 1, 1], NONE, NONE]),
    ("k2", "sequence", {"upper": 0.4}, [ALL, ALL, NONE, NONE]),  # the rows' means of k2 are .083, .375, .5
    ("k2", "max", {"upper": 1.0}, [ALL, NONE, [1, 1, 0], NONE]),
    ("k3", "token", {"upper": 0.72}, [ALL, [0, 1, 1], [1, 1, 0], NONE]),
    ("k3", "sequence", {"upper": 0.3}, [ALL, ALL, NONE, NONE]),  # the rows' means of k3 are .085, .241, .718
    ("k3", "max", {"upper": 0.72}, [ALL, NONE, [1, 1, 0], NONE]),
    ("abs", "token", {"upper": 0.4}, [[0, 0, 1], [0, 1, 1], NONE, NONE]),
    ("abs", "sequence", {"upper": 0.4}, [ALL, NONE, NONE, NONE]),  # the rows' means of |d| are .333, .5, 1
    ("abs", "max", {"upper": 1.2}, [ALL, NONE, [1, 1, 0], NONE]),
]


@pytest.mark.parametrize(("kl_estimator", "level", "bounds", "expected"), REJECTIONS)
def test_each_estimator_and_level_of_rejection_on_a_case_worked_by_hand(kl_estimator, level, bounds, expected):
    mask, metrics = reject(kl_estimator=kl_estimator, level=level, **bounds)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == expected
    assert metrics["dropped_fraction"].item() == TRAINED.sum() - mask.sum()
    assert metrics["outside_fraction"].item() == TRAINED.sum() - mask.sum()
    values = [ESTIMATORS[kl_estimator](d) for d in DISTANCES[TRAINED == 1].tolist()]
    assert metrics["divergence"].item() == pytest.approx(sum(values), rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "max"])
def test_a_value_on_the_bound_is_kept(level):
    distances = torch.tensor([[0.5], [-0.25]], dtype=torch.float64)
    mask, _ = reject(distances, torch.ones(2, 1), kl_estimator="k1", level=level, lower=-0.25, upper=0.5)
    assert mask.all()
    mask, _ = reject(distances, torch.ones(2, 1), kl_estimator="k1", level=level, lower=-0.24, upper=0.49)
    assert not mask.any()


@pytest.mark.parametrize("kl_estimator", ESTIMATORS)
@pytest.mark.parametrize("level", ["token", "sequence", "max"])
def test_D8_where_engine_and_actor_agree_even_bounds_of_zero_reject_nothing(kl_estimator, level):
    lower = 0.0 if kl_estimator == "k1" else None
    mask, metrics = reject(0 * DISTANCES, kl_estimator=kl_estimator, level=level, lower=lower, upper=0.0)
    assert torch.equal(mask, TRAINED == 1)
    assert all(value.item() == 0 for value in metrics.values())


# At the levels "sequence" and "max", row 1 exceeds the bound, and is dropped if its mean advantage is negative.
# The mean advantage of a row is taken over its unmasked tokens.
@pytest.mark.parametrize(
    ("advantages", "by_row", "by_token"),
    [
        # the mean advantage is -1/3, and the distant token's advantage is negative
        ([-1.0, 2.0, -2.0], NONE, [0, 1, 1]),
        ([-1.0, 2.0, 0.0], ALL, [0, 1, 1]),  # mean 1/3
        ([2.0, -1.0, -2.0], NONE, ALL),  # the mean advantage is -1/3, and the distant token's advantage is positive
        ([0.0, 0.0, 0.0], ALL, ALL),
    ],
)
def test_with_advantages_only_what_is_bad_is_rejected(advantages, by_row, by_token):
    columns = torch.tensor([[-1.0] * 3, advantages, [1.0, 0.5, -9.0], [-1.0] * 3])
    for level, expected in (("sequence", by_row), ("max", by_row), ("token", by_token)):
        upper = 0.4 if level == "sequence" else 1.0
        mask, metrics = reject(advantages=columns, kl_estimator="k1", level=level, lower=-0.6, upper=upper)
        assert mask.int().tolist() == [ALL, expected, [1, 1, 0], NONE]
        # outside_fraction counts rows 1 and 2, which are outside the bound, even if they are kept
        assert metrics["outside_fraction"].item() == (3 if level == "token" else 5)
        assert metrics["dropped_fraction"].item() == 3 - sum(expected)


def test_k1_of_sequences_with_an_upper_bound_is_off_policy_sequence_masking():
    """arXiv 2512.02556 eq. 9: a row is dropped where A < 0 and its mean of log pi_rollout / pi exceeds delta."""
    generator = torch.Generator().manual_seed(0)
    rollout, actor = (-torch.rand(64, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(64, 5, generator=generator) < 0.7
    advantages = torch.randn(64, 1, generator=generator).expand(64, 5)
    kept, _ = rollout_rejection(actor, rollout, mask, advantages, kl_estimator="k1", level="sequence", upper=0.1)
    dropped = 0
    for i in range(64):
        tokens = [t for t in range(5) if mask[i, t]]
        mean = sum((rollout[i, t] - actor[i, t]).item() for t in tokens) / max(len(tokens), 1)
        gone = advantages[i, 0] < 0 and mean > 0.1
        dropped += bool(gone)
        assert kept[i].tolist() == [bool(mask[i, t]) and not gone for t in range(5)]
    assert 5 < dropped < 30


def test_no_gradient_goes_through_what_is_rejected_or_weighed():
    log_probs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    mask, metrics = rollout_rejection(
        log_probs, torch.ones(1, 2), torch.ones(1, 2), kl_estimator="k1", level="token", upper=0.5
    )
    assert not mask.any()
    assert not metrics["divergence"].requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "max"])
def test_B2_D9_rejection_ignores_masked_garbage_and_stays_finite(level):
    far = torch.tensor([[1e3, -1e3, 0.0], [1e-3, 0.0, 0.0]], dtype=torch.float64)
    masks = torch.tensor([[1, 1, 0], [1, 1, 0]])
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e4):
        dirty = far.clone()
        dirty[:, 2] = garbage
        columns = torch.full_like(dirty, -1.0)
        columns[:, 2] = garbage
        mask, metrics = reject(dirty, masks, columns, kl_estimator="k3", level=level, upper=0.1)
        assert mask[1].tolist() == [True, True, False]
        assert mask[0].tolist() == [False, False, False]
        assert all(value.isfinite() and not value.requires_grad for value in metrics.values())


def test_a_broken_log_prob_in_a_trained_token_is_not_swept_away():
    broken = torch.tensor([[torch.nan, 0.0]], dtype=torch.float64)
    for level in ("token", "sequence", "max"):
        mask, metrics = reject(broken, torch.ones(1, 2), kl_estimator="k3", level=level, upper=0.1)
        assert mask.all()
        assert metrics["divergence"].isnan()


REFUSALS = [
    (
        {},
        "lower=None, upper=None: one of them must be a number, or nothing is ever rejected; use upper=0.1, for example",
    ),
    ({"upper": -0.1}, "lower=None, upper=-0.1: lower <= 0 <= upper must hold"),
    ({"lower": 0.1}, "lower=0.1, upper=None: lower <= 0 <= upper must hold"),
    ({"upper": math.nan}, "lower=None, upper=nan: lower <= 0 <= upper must hold"),
    ({"lower": 0.0, "kl_estimator": "k2"}, "lower=0.0 with kl_estimator='k2': the estimator is never negative"),
    ({"lower": -1.0, "upper": 1.0, "kl_estimator": "k3"}, "lower=-1.0 with kl_estimator='k3'"),
    ({"lower": -1.0, "upper": 1.0, "kl_estimator": "abs"}, "lower=-1.0 with kl_estimator='abs'"),
    ({"upper": 1.0, "kl_estimator": "k1+"}, "kl_estimator='k1\\+' is not known; use one of: k1, k2, k3, abs"),
    ({"upper": 1.0, "level": "geometric"}, "level='geometric' is not known; use one of: token, sequence, max"),
]


@pytest.mark.parametrize(("knobs", "complaint"), REFUSALS)
def test_a_rejection_that_cannot_be_done_is_refused(knobs, complaint):
    with pytest.raises(ValueError, match=complaint):
        reject(**{"kl_estimator": "k1", "level": "token", **knobs})


def test_the_diagnostics_are_sums_over_trained_tokens():
    sums = rollout_diagnostics(RATIOS.log() - 2.0, torch.full_like(RATIOS, -2.0), MASK)
    ratios = RATIOS[MASK == 1].tolist()
    expected = {
        "kl": sum(-math.log(w) for w in ratios),
        "k3": sum(w - 1 - math.log(w) for w in ratios),
        "abs": sum(abs(math.log(w)) for w in ratios),
        "weight": sum(ratios),
        "weight_squared": sum(w * w for w in ratios),
    }
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        assert sums[name].item() == pytest.approx(value, rel=1e-12), name
        assert sums[name].shape == ()
    _, _, metrics = correct()
    assert torch.equal(metrics["rollout_kl"], sums["k3"])


def test_the_bound_of_k3_as_a_penalty_hides_nothing_from_a_measurement_and_dulls_no_threshold():
    """A token with log pi_rollout - log pi_old = -5 has k3 = e^5 - 6 = 142.4.

    The KL penalty caps k3 at 10, but the diagnostics and the thresholds of rejection use the exact value.
    """
    old, rollout, mask = torch.zeros(1, 1).double(), torch.full((1, 1), -5.0).double(), torch.ones(1, 1)
    exact = math.exp(5) - 6
    assert rollout_diagnostics(old, rollout, mask)["k3"].item() == pytest.approx(exact, rel=1e-12)
    for upper, kept in ((100.0, False), (200.0, True)):
        trained, metrics = rollout_rejection(old, rollout, mask, kl_estimator="k3", level="token", upper=upper)
        assert (trained.item(), metrics["divergence"].item()) == (kept, pytest.approx(exact, rel=1e-12))


def test_the_diagnostics_estimate_the_divergence_of_the_engine_from_the_actor():
    generator = torch.Generator().manual_seed(0)
    rollout, old = (torch.randn(1, 6, generator=generator).double().log_softmax(-1) for _ in range(2))
    exact = (rollout.exp() * (rollout - old)).sum().item()
    for name, wanted in (("kl", exact), ("k3", exact), ("weight", 1.0)):
        each = [rollout_diagnostics(old[:, [y]], rollout[:, [y]], torch.ones(1, 1))[name].item() for y in range(6)]
        assert sum(p * v for p, v in zip(rollout[0].exp().tolist(), each, strict=True)) == pytest.approx(
            wanted, rel=1e-10
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_B2_D9_the_diagnostics_are_finite_detached_and_blind_to_masked_slots(dtype):
    old = torch.tensor([[1e3, -1e3, torch.nan, torch.inf]], dtype=dtype, requires_grad=True)
    sums = rollout_diagnostics(old, torch.zeros_like(old), torch.tensor([[1, 1, 0, 0]]))
    for value in sums.values():
        assert value.isfinite()
        assert not value.requires_grad
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert sums["kl"].item() == 0
    assert sums["abs"].item() == 40
    assert sums["weight"].item() == pytest.approx(math.exp(20), rel=1e-6)
    assert sums["weight_squared"].item() == pytest.approx(math.exp(40), rel=1e-6)


def test_the_effective_sample_size_by_hand():
    assert effective_sample_size(4.0, 10.0, 2) == pytest.approx(0.8)  # the two weights are 1 and 3
    # one sample has all the weight, and the other three have weight 0
    assert effective_sample_size(1.0, 1.0, 4) == 0.25
    assert effective_sample_size(7.0, 7.0, 7) == 1  # All seven weights are 1.
    assert effective_sample_size(0.0, 0.0, 0) == 1  # Without any samples, the result is 1.
    # a single weight cannot have the sum 3 and the sum of squares 3, but the result is still clipped to 1
    assert effective_sample_size(3.0, 3.0, 1) == 1
    four, ten = torch.tensor(4.0, dtype=torch.float64), torch.tensor(10.0, dtype=torch.float64)
    assert effective_sample_size(four, ten, torch.tensor(2)).item() == pytest.approx(0.8)
    assert effective_sample_size(0 * four, 0 * ten, torch.tensor(0)) == 1


def test_the_effective_sample_size_is_one_where_they_agree_and_small_where_one_token_is_far():
    mask = torch.ones(3, 4)
    for ratios, low, high in (
        (torch.ones(3, 4), 1, 1),
        (torch.tensor([1e6, *[1.0] * 11]).view(3, 4), 1 / 12, 1 / 11.9),
    ):
        sums = rollout_diagnostics(ratios.double().log(), torch.zeros(3, 4).double(), mask)
        size = float(effective_sample_size(sums["weight"], sums["weight_squared"], mask.sum()))
        assert low <= size <= high
