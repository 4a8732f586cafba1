import math

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES


def test_a_case_worked_by_hand(by_hand):
    # The answers of rows 0, 1 and 3 are bad (advantage below 0), and the answer of row 2 is good.
    # The products of the ratios of the trained tokens are 0.5 * 3 = 1.5 in row 0, 0.5 in row 1 (the second token is
    # masked), 0.2 * 0.5 = 0.1 in row 2 and 0.5 * 0.5 = 0.25 in row 3.
    ratios, mask = [[0.5, 3.0], [0.5, 7.0], [0.2, 0.5], [0.5, 0.5]], [[1, 1], [1, 0], [1, 1], [1, 1]]
    advantages = [[-2.0, -2.0], [-2.0, -2.0], [2.0, 2.0], [-2.0, -2.0]]
    losses, gradient, metrics = by_hand("topr", ratios, advantages, mask)
    weights = [[1.0, 1.0], [0.5, 0.0], [1.0, 1.0], [0.25, 0.25]]
    slopes = [[-w * a for w, a in zip(*rows, strict=True)] for rows in zip(weights, advantages, strict=True)]
    values = [[s * math.log(0.1 * r) for s, r in zip(*rows, strict=True)] for rows in zip(slopes, ratios, strict=True)]
    assert slopes == [[2.0, 2.0], [1.0, 0.0], [-2.0, -2.0], [0.5, 0.5]]
    assert gradient.tolist() == [pytest.approx(row, rel=1e-12, abs=0) for row in slopes]
    assert losses.tolist() == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in values]
    assert metrics["weight_clip_fraction"] == 2
    assert metrics["clip_fraction"] == 0
    assert metrics["weight_mean"] == pytest.approx(1 + 1 + 0.5 + 1 + 1 + 0.25 + 0.25)
    assert metrics["ratio_mean"] == pytest.approx(0.5 + 3.0 + 0.5 + 0.2 + 0.5 + 0.5 + 0.5)


@pytest.mark.parametrize("bound", [1.0, 0.5, 2.0])
def test_topr_equals_an_oracle_token_by_token(bound, against):
    def oracle(new, a, row, **_):
        s = math.prod(math.exp(x) for x, _ in row)
        weight = 1.0 if a >= 0 else min(max(s, 0.0), bound)
        return -weight * a * new, -weight * a, (a > 0, weight == bound)

    knobs = {} if bound == 1.0 else {"ratio_max": bound}
    assert len(against("topr", oracle, **knobs)) >= 3


def test_the_gradient_of_a_row_is_that_of_the_papers_sequence_loss(make_batch):
    """The paper's loss of an answer y with reward R < 0 is -clip(pi(y) / mu(y), 0, 1) R log pi(y).

    The clipped weight is held constant. If R > 0, the weight is 1.
    """
    batch = make_batch(spread=0.3)
    old, mask = batch["old_log_probs"], batch["response_mask"]
    for reward in (1.0, -1.0):
        ours, paper = (batch["log_probs"].clone().requires_grad_() for _ in range(2))
        losses, _ = POLICY_LOSSES.get("topr")(ours, old, torch.full_like(old, reward), mask)
        log_pi, log_mu = ((column * mask).sum(-1) for column in (paper, old))
        weight = (log_pi - log_mu).exp().clip(0, 1).detach() if reward < 0 else 1.0
        (gradient,) = torch.autograd.grad(losses.sum(), ours)
        (expected,) = torch.autograd.grad((-weight * reward * log_pi).sum(), paper)
        assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-14)


def test_a_long_bad_answer_that_the_policy_has_left_keeps_almost_no_gradient(by_hand):
    losses, gradient, _ = by_hand("topr", [[0.1] * 40], [[-1.0] * 40])
    assert gradient[0].tolist() == pytest.approx([math.exp(-20)] * 40, rel=1e-9)
    assert losses.isfinite().all()


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_is_not_a_positive_number_is_refused(value, by_hand):
    with pytest.raises(ValueError, match=f"ratio_max={value} must be finite and > 0"):
        by_hand("topr", [[1.0]], [[1.0]], ratio_max=value)
