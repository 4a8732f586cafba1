import math

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES, TOKEN_SELECTORS, aggregate_loss, columns_of
from rltrain.algorithms.aggregation import LOSS_AGG_MODES

vanilla = POLICY_LOSSES.get("vanilla")
gspo = POLICY_LOSSES.get("gspo")

# Maps each use of the column `selected` to the column value that keeps every token's gradient, and to the reason.
SELECTED = {
    None: (True, "no column"),
    "dropped": (False, "selects nothing, for it drops what it selects"),
    "penalised": (True, "selects everything, for its penalty has gradient 0 at the old policy"),
    "kept": (True, "selects everything, for it drops the rest"),
}


def use_of_selected(name):
    return SELECTED[POLICY_LOSSES.metadata(name).get("selected")]


LOSSES = [
    pytest.param(n, id=n if (u := use_of_selected(n)[1]) == "no column" else f"{n} {u}") for n in POLICY_LOSSES.names()
]


def columns(ratios, advantages, mask=None):
    """Return log_probs (a leaf tensor), old_log_probs, advantages and mask for ratios of shape (B, T)."""
    ratios, advantages = (torch.tensor(values, dtype=torch.float64) for values in (ratios, advantages))
    old = torch.full_like(ratios, -2.0)
    mask = torch.ones_like(ratios) if mask is None else torch.tensor(mask)
    return (old + ratios.log()).requires_grad_(), old, advantages, mask


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_loss_says_whether_its_gradient_depends_on_the_old_policy(name, make_batch, call):
    gradients = []
    for shift in (0.0, 0.05):
        batch = make_batch(seed=2, spread=0.1)
        batch["old_log_probs"] = batch["old_log_probs"] + shift
        log_probs = batch["log_probs"] = batch["log_probs"].requires_grad_()
        losses, _ = call(POLICY_LOSSES.get(name), batch)
        gradients.append(torch.autograd.grad(losses.sum(), log_probs)[0])
    same = torch.allclose(*gradients, rtol=1e-9)
    assert same is not POLICY_LOSSES.metadata(name).get("uses_ratio", True)


# each vanilla case is (ratio, advantage, loss, gradient with respect to log pi, clip_fraction, clip_fraction_c)
VANILLA = [
    (1.0, 2.0, -2.0, -2.0, 0, 0),
    (1.1, 2.0, -2.2, -2.2, 0, 0),
    (1.5, 2.0, -2.56, 0.0, 1, 0),
    (0.5, 2.0, -1.0, -1.0, 0, 0),
    (1.0, -2.0, 2.0, 2.0, 0, 0),
    (0.95, -2.0, 1.9, 1.9, 0, 0),
    (0.5, -2.0, 1.8, 0.0, 1, 0),
    (1.5, -2.0, 3.0, 3.0, 0, 0),
    (5.0, -2.0, 8.0, 0.0, 0, 1),
    (5.0, 0.0, 0.0, 0.0, 0, 0),
    (0.5, 0.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped", "clipped_c"), VANILLA)
def test_D2_the_clipped_loss_and_its_gradient_by_hand(ratio, advantage, loss, gradient, clipped, clipped_c):
    args = columns([[ratio]], [[advantage]])
    losses, metrics = vanilla(*args, clip_ratio_low=0.1, clip_ratio_high=0.28, clip_ratio_c=4.0)
    (actual,) = torch.autograd.grad(losses.sum(), args[0])
    assert losses.item() == pytest.approx(loss, rel=1e-12, abs=1e-15)
    # `abs=0` requires that a gradient of 0 is exactly 0
    assert actual.item() == pytest.approx(gradient, rel=1e-12, abs=0)
    assert metrics["clip_fraction"].item() == clipped
    assert metrics["clip_fraction_c"].item() == clipped_c
    assert metrics["ratio_mean"].item() == pytest.approx(ratio)
    assert metrics["ppo_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_metrics_are_sums_over_trained_tokens():
    args = columns([[1.5, 2.0, 5.0], [1.0, 9.0, 9.0]], [[1.0, 1.0, -1.0], [1.0, 1.0, -1.0]], [[1, 1, 1], [1, 0, 0]])
    _, metrics = vanilla(*args)
    assert metrics["clip_fraction"].item() == 2
    assert metrics["clip_fraction_c"].item() == 1
    assert metrics["ratio_mean"].item() == pytest.approx(1.5 + 2 + 5 + 1)


def paper_ppo(log_probs, old, advantages, low, high, c):
    """Compute PPO's loss from the equations of the paper, one token at a time."""
    losses = torch.empty_like(log_probs)
    for index in torch.cartesian_prod(*map(torch.arange, log_probs.shape)):
        i = tuple(index)
        r, a = torch.exp(log_probs[i] - old[i]), advantages[i]
        objective = torch.min(r * a, torch.clip(r, 1 - low, 1 + high) * a)
        losses[i] = -torch.max(objective, c * a) if a < 0 else -objective
    return losses


@pytest.mark.parametrize("knobs", [(0.2, 0.2, 3.0), (0.1, 0.4, 1.5), (0.05, 0.05, math.inf)])
def test_vanilla_equals_the_papers_formulas(knobs, make_batch):
    batch = make_batch(spread=1.0)
    log_probs, old, advantages, mask = (batch[c] for c in ("log_probs", "old_log_probs", "advantages", "response_mask"))
    low, high, c = knobs
    losses, _ = vanilla(log_probs, old, advantages, mask, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
    assert torch.allclose(losses[mask], paper_ppo(log_probs, old, advantages, *knobs)[mask], rtol=1e-12)


def test_D2_vanillas_gradient_passes_gradcheck(make_batch):
    batch = make_batch(spread=1.0)
    rest = batch["old_log_probs"], batch["advantages"], batch["response_mask"]
    log_probs = batch["log_probs"].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: vanilla(x, *rest)[0], log_probs)


@pytest.mark.parametrize("c", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_that_acts_at_ratio_one_is_refused(c):
    with pytest.raises(ValueError, match=f"clip_ratio_c={c} must be > 1"):
        vanilla(*columns([[1.0]], [[1.0]]), clip_ratio_c=c)


def test_gspo_on_a_case_worked_by_hand():
    # In row 0, the ratios 2 and 8 have the geometric mean 4. In row 1, the second token is masked, so the mean is 2.
    args = columns([[2.0, 8.0], [2.0, 50.0]], [[-1.0, -1.0], [1.0, 1.0]], [[1, 1], [1, 0]])
    losses, metrics = gspo(*args, clip_ratio_low=0.5, clip_ratio_high=0.5)
    (gradient,) = torch.autograd.grad(losses.sum(), args[0])
    assert torch.allclose(losses, torch.tensor([[4.0, 4.0], [-1.5, 0.0]]).double(), rtol=1e-12)
    assert torch.allclose(gradient, torch.tensor([[4.0, 4.0], [0.0, 0.0]]).double(), rtol=1e-12)
    assert metrics["clip_fraction"].item() == 1
    assert metrics["ratio_mean"].item() == pytest.approx(4 + 4 + 2)


@pytest.mark.parametrize("mode", POLICY_LOSSES.metadata("gspo")["aggregations"])
def test_D3_the_token_form_of_gspo_is_the_sequence_form_times_the_length_for_luspo(mode, make_batch):
    batch = make_batch(spread=0.3)
    mask, old = batch["response_mask"], batch["old_log_probs"]
    per_row = batch["advantages"][:, :1].expand_as(old)
    token_side, sequence_side = (batch["log_probs"].clone().requires_grad_() for _ in range(2))
    losses, _ = gspo(token_side, old, per_row, mask, clip_ratio_low=0.03, clip_ratio_high=0.04)
    token_loss = aggregate_loss(losses, mask, mode)
    rows = []
    for i in mask.any(-1).nonzero().flatten():
        s, a = (sequence_side[i] - old[i])[mask[i]].mean().exp(), per_row[i, 0]
        length = mask[i].sum() if mode == "seq-mean-token-sum" else 1
        rows.append(-length * torch.min(s * a, s.clip(0.97, 1.04) * a))
    sequence_loss = torch.stack(rows).mean()
    (token_gradient,) = torch.autograd.grad(token_loss, token_side)
    (gradient,) = torch.autograd.grad(sequence_loss, sequence_side)
    assert token_loss.item() == pytest.approx(sequence_loss.item(), rel=1e-12)
    assert torch.allclose(token_gradient, gradient, rtol=1e-10, atol=1e-14)
    zero = (gradient == 0).all(-1)
    assert zero[mask.any(-1)].any()  # at least one row is clipped
    assert not zero.all()  # at least one row is not clipped


def test_D2_gspo_with_token_advantages_has_the_gradient_of_its_token_form(make_batch):
    batch = make_batch(spread=0.1)
    mask, old, advantages = batch["response_mask"], batch["old_log_probs"], batch["advantages"]
    log_probs = batch["log_probs"].requires_grad_()
    losses, _ = gspo(log_probs, old, advantages, mask, clip_ratio_low=0.03, clip_ratio_high=0.04)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    seen = set()
    for i, t in mask.nonzero().tolist():
        s = (log_probs[i] - old[i])[mask[i]].mean().exp().item()
        a = advantages[i, t].item()
        clipped = s > 1.04 if a > 0 else s < 0.97
        seen.add(clipped)
        assert gradient[i, t].item() == pytest.approx(0 if clipped else -a * s, rel=1e-10, abs=0)
    assert seen == {True, False}


def test_D3_gspos_sequence_loss_does_not_depend_on_length():
    args = columns([[1.1] * 4, [1.1] * 4], [[-1.0] * 4, [-1.0] * 4], [[1, 0, 0, 0], [1, 1, 1, 1]])
    losses, _ = gspo(*args)
    short, long = (aggregate_loss(losses[i : i + 1], args[3][i : i + 1], "seq-mean-token-mean") for i in (0, 1))
    assert short.item() == pytest.approx(long.item(), rel=1e-12)
    assert short.item() == pytest.approx(1.1, rel=1e-12)


def test_the_aggregations_that_a_loss_is_defined_for_exist():
    found = {name: POLICY_LOSSES.metadata(name).get("aggregations") for name in POLICY_LOSSES.names()}
    assert {name for name, modes in found.items() if modes} == {"gspo", "geo_mean", "mean_ratio"}
    assert {*found["gspo"], *found["geo_mean"], *found["mean_ratio"]} <= set(LOSS_AGG_MODES)


def test_a_loss_says_what_it_does_with_selected_tokens_and_has_a_selector_if_it_reads_them():
    reads = {name for name in POLICY_LOSSES.names() if "selected" in columns_of(POLICY_LOSSES.get(name))}
    assert reads == {name for name in POLICY_LOSSES.names() if POLICY_LOSSES.metadata(name).get("selected")}
    assert reads == set(TOKEN_SELECTORS.names()) == {"clip_cov", "kl_cov", "m2po", "top_entropy"}


@pytest.mark.parametrize("name", LOSSES)
def test_D1_at_the_old_policy_the_gradient_is_reinforce_and_every_metric_says_so(name, make_batch, call):
    batch = make_batch()
    batch["selected"] = torch.full_like(batch["response_mask"], use_of_selected(name)[0])
    batch["log_probs"] = batch["old_log_probs"].clone().requires_grad_()
    mask = batch["response_mask"]
    losses, metrics = call(POLICY_LOSSES.get(name), batch)
    (gradient,) = torch.autograd.grad(losses[mask].sum(), batch["log_probs"])
    assert torch.allclose(gradient, -batch["advantages"] * mask, rtol=1e-12)
    assert metrics["ppo_kl"].item() == 0
    assert metrics["ratio_mean"].item() == mask.sum()
    assert all(value.item() == 0 for key, value in metrics.items() if key.startswith("clip_fraction"))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_D4_a_step_raises_what_was_good_and_lowers_what_was_bad(name, advantage, call):
    logits = torch.linspace(-1, 1, 5, dtype=torch.float64).repeat(1, 3, 1).requires_grad_()
    old = logits.log_softmax(-1)[..., 2]
    batch = {
        "log_probs": old,
        "old_log_probs": old.detach(),
        "advantages": torch.full((1, 3), advantage, dtype=torch.float64),
        "response_mask": torch.ones(1, 3),
        "selected": torch.full((1, 3), use_of_selected(name)[0]),
    }
    losses, _ = call(POLICY_LOSSES.get(name), batch)
    (gradient,) = torch.autograd.grad(aggregate_loss(losses, batch["response_mask"], "token-mean"), logits)
    after = (logits - 0.1 * gradient).log_softmax(-1)[..., 2]
    assert ((after - old) * advantage > 1e-3).all()


EXTREMES = [-torch.inf, -1e3, -100.0, -21.0, -19.0, 0.0, 19.0, 21.0, 100.0, 1e3]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_D9_extreme_log_ratios_stay_finite_and_beyond_20_have_no_gradient(name, dtype, advantage, call):
    old = torch.zeros(len(EXTREMES), 1, dtype=dtype)
    log_probs = torch.tensor(EXTREMES, dtype=dtype)[:, None].requires_grad_()
    batch = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": torch.full_like(old, advantage),
        "response_mask": torch.ones_like(old),
        "selected": torch.full(old.shape, use_of_selected(name)[0]),
    }
    losses, metrics = call(POLICY_LOSSES.get(name), batch)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())
    assert (gradient[log_probs.detach().abs() > 20] == 0).all()
    assert gradient[EXTREMES.index(0.0)].item() == pytest.approx(-advantage)


def test_D9_one_token_far_away_leaves_the_gradient_of_its_gspo_row_to_the_others():
    log_probs = torch.tensor([[1e3, -1.0, -20.0]], dtype=torch.float64, requires_grad=True)
    losses, _ = gspo(log_probs, torch.zeros(1, 3).double(), -torch.ones(1, 3).double(), torch.ones(1, 3))
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert gradient[0, 0].item() == 0  # the token has gradient 0, because its log-ratio is clamped to 20
    # the row's geometric mean exp((20 - 1 - 20) / 3) is clipped from below
    assert losses[0].tolist() == pytest.approx([1 - 3e-4] * 3)
