import math

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES

# each case with low = 0.1, high = 0.25 and c = 4 is
# (ratio, advantage, loss, gradient, tokens in clip_fraction, in weight_clip_fraction, in clip_fraction_c)
CASES = [
    (1.0, 2.0, -2.0, -2.0, 0, 0, 0),
    (0.5, 2.0, -4.0, -4.0, 0, 0, 0),
    (1.25, 2.0, -1.6, -1.6, 0, 0, 0),
    (2.0, 2.0, -1.6, 0.0, 1, 0, 0),
    (0.1, 2.0, -8.0, -8.0, 0, 1, 0),
    (1.0, -2.0, 2.0, 2.0, 0, 0, 0),
    (0.5, -2.0, 1.8, 0.0, 1, 0, 0),
    (2.0, -2.0, 4.0, 4.0, 0, 0, 0),
    (5.0, -2.0, 8.0, 0.0, 0, 0, 1),
    (0.1, 0.0, 0.0, 0.0, 0, 0, 0),
    (5.0, 0.0, 0.0, 0.0, 0, 0, 0),
]
KNOBS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.25, "clip_ratio_c": 4.0}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped", "bounded", "clipped_c"), CASES)
def test_D2_good_tokens_weigh_the_flipped_ratio(ratio, advantage, loss, gradient, clipped, bounded, clipped_c, by_hand):
    losses, actual, metrics = by_hand("aspo", [[ratio]], [[advantage]], **KNOBS)
    assert losses.item() == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert actual.item() == pytest.approx(gradient, rel=1e-12, abs=0)
    names = ("clip_fraction", "weight_clip_fraction", "clip_fraction_c")
    assert tuple(metrics[name] for name in names) == (clipped, bounded, clipped_c)
    assert metrics["ratio_mean"] == pytest.approx(ratio)


def test_the_defaults_are_the_papers_clip_range_and_the_bound_of_the_authors_program(by_hand):
    ratios, advantages = [[1.19, 1.21, 0.3, 0.81, 0.79, 3.1]], [[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]]
    losses, gradient, _ = by_hand("aspo", ratios, advantages)
    assert gradient[0].tolist() == pytest.approx([-1 / 1.19, 0, -3.0, 0.81, 0, 0], rel=1e-12, abs=0)
    assert losses[0].tolist() == pytest.approx([-1 / 1.19, -1 / 1.2, -3.0, 0.81, 0.8, 3.0], rel=1e-12)


@pytest.mark.parametrize("c", [1.5, math.inf])
def test_aspo_equals_the_papers_three_steps_token_by_token(c, against):
    def oracle(new, old, a, **_):
        pi, pi_old = math.exp(new), math.exp(old)
        if a < 0 and pi / pi_old < 0.9:  # step 1, token masking
            return -0.9 * a, 0.0, "masked bad"
        if a > 0 and pi / pi_old > 1.25:
            return -a / 1.25, 0.0, "masked good"
        if a < 0:
            return (-c * a, 0.0, "dual") if pi / pi_old > c else (-pi / pi_old * a, -pi / pi_old * a, "bad")
        flipped = pi_old * pi / pi**2  # step 2, weight flipping, and step 3, dual clipping
        slope = pi_old * pi / pi**2  # d(pi) / d(log pi) = pi, while pi^2 in the denominator is constant
        return (-c * a, -c * a, "soft") if flipped > c else (-flipped * a, -slope * a, "good")

    always = {"masked bad", "masked good", "bad", "good"}
    assert against("aspo", oracle, **{**KNOBS, "clip_ratio_c": c}) == always | ({"soft", "dual"} if c == 1.5 else set())


def test_the_gradient_of_a_good_token_is_that_of_the_papers_ratio_by_autograd(make_batch):
    batch = make_batch(spread=0.1)
    old, mask = batch["old_log_probs"], batch["response_mask"]
    ours, paper = (batch["log_probs"].clone().requires_grad_() for _ in range(2))
    losses, _ = POLICY_LOSSES.get("aspo")(ours, old, torch.ones_like(old), mask, clip_ratio_high=1.0)
    pi = paper.exp()
    flipped = old.exp() * pi / pi.detach() ** 2
    (gradient,) = torch.autograd.grad(losses.sum(), ours)
    (wanted,) = torch.autograd.grad(-flipped[mask].sum(), paper)
    assert torch.allclose(losses[mask], -flipped[mask], rtol=1e-12)
    assert torch.allclose(gradient, wanted, rtol=1e-12)


def test_clip_ratios_that_act_at_ratio_one_are_refused(by_hand):
    for knobs, message in (
        ({"clip_ratio_low": -0.1}, "clip_ratio_low=-0.1 must be >= 0"),
        ({"clip_ratio_high": -0.1}, "clip_ratio_high=-0.1 must be >= 0"),
        ({"clip_ratio_c": 1.0}, r"clip_ratio_c=1\.0 must be > 1"),
    ):
        with pytest.raises(ValueError, match=message):
            by_hand("aspo", [[1.0]], [[1.0]], **knobs)
