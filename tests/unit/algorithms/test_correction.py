import math

import pytest
import torch

from rltrain.algorithms import aggregate_loss, rollout_correction

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "reject")
#                  w:  in   high  low  masked    in
RATIOS = torch.tensor([[1.5, 4.0, 0.25, 9.0], [1.25, 1.0, 0.8, 1.0], [0.1, 0.1, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])


def correct(ratios=RATIOS, mask=MASK, advantages=None, *, level="token", mode="mask", lower=0.5, upper=2.0):
    rollout = torch.full_like(ratios, -2.0)
    return rollout_correction(
        rollout + ratios.log(), rollout, mask, advantages, level=level, mode=mode, lower=lower, upper=upper
    )


# products 1.5, 1.0, .01; geometric means 1.5^(1/3), 1, .1
EXPECTED = {
    ("token", "truncate"): ([[1.5, 2, 0.5, 0], [1.25, 1, 0.8, 1], [0.5, 0.5, 0, 0]], MASK.tolist()),
    ("token", "mask"): ([[1.5, 0, 0, 0], [1.25, 1, 0.8, 1], [0] * 4], [[1, 0, 0, 0], [1] * 4, [0] * 4]),
    ("token", "reject"): ([[0] * 4, [1] * 4, [0] * 4], [[0] * 4, [1] * 4, [0] * 4]),
    ("sequence", "truncate"): ([[1.5, 1.5, 1.5, 0], [1] * 4, [0.5, 0.5, 0, 0]], MASK.tolist()),
    ("sequence", "mask"): ([[1.5, 1.5, 1.5, 0], [1] * 4, [0] * 4], [[1, 1, 1, 0], [1] * 4, [0] * 4]),
    ("sequence", "reject"): ([[1, 1, 1, 0], [1] * 4, [0] * 4], [[1, 1, 1, 0], [1] * 4, [0] * 4]),
    ("geometric", "truncate"): ([[1.5 ** (1 / 3)] * 3 + [0], [1] * 4, [0.5, 0.5, 0, 0]], MASK.tolist()),
    ("geometric", "mask"): ([[1.5 ** (1 / 3)] * 3 + [0], [1] * 4, [0] * 4], [[1, 1, 1, 0], [1] * 4, [0] * 4]),
    ("geometric", "reject"): ([[1, 1, 1, 0], [1] * 4, [0] * 4], [[1, 1, 1, 0], [1] * 4, [0] * 4]),
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
    """The truncated weights turn samples of the rollout policy into an estimate under the trainer's, by enumeration."""
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


def test_a_cap_alone_is_truncated_importance_sampling():
    weights, _, _ = correct(mode="truncate", lower=None)
    assert torch.allclose(weights, RATIOS.clamp(max=2) * MASK, rtol=1e-12)


def test_with_advantages_only_bad_tokens_are_dropped():
    advantages = torch.tensor([[1.0, 1.0, -1.0, 0], [-1.0] * 4, [1.0, -1.0, 0, 0]])
    weights, mask, _ = correct(advantages=advantages, mode="mask")
    assert torch.equal(mask, torch.tensor([[1, 1, 0, 0], [1] * 4, [1, 0, 0, 0]]) == 1)
    assert weights[0, 1].item() == 2  # kept, capped
    _, mask, _ = correct(advantages=advantages.abs(), mode="reject")
    assert torch.equal(mask, MASK == 1)
    _, mask, _ = correct(advantages=advantages, mode="reject")
    assert mask.any(-1).tolist() == [False, True, False]


def test_A4_a_rejected_row_leaves_numerator_and_denominator():
    losses = torch.tensor([[7.0] * 4, [2.0] * 4, [7.0] * 4], dtype=torch.float64)
    weights, mask, _ = correct(mode="reject")
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert aggregate_loss(losses * weights, mask, mode).item() == 2


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"level": "word"}, "level='word' is not known; use one of: token, sequence, geometric"),
        ({"mode": "drop"}, "mode='drop' is not known; use one of: truncate, mask, reject"),
        ({"lower": 1.5}, "lower=1.5, upper=2.0"),
        ({"upper": 0.9}, "upper=0.9"),
        ({"lower": -0.1}, "lower=-0.1"),
        ({"upper": math.nan}, "upper=nan"),
    ],
)
def test_what_cannot_be_done_is_refused(knobs, complaint):
    with pytest.raises(ValueError, match=complaint):
        correct(**knobs)
