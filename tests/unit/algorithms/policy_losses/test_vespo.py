import math

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES


def test_a_case_worked_by_hand(by_hand):
    # The answers of rows 0 and 2 are bad (advantage below 0), and the answer of row 1 is good.
    # The products of the ratios of the trained tokens are 0.5 * 3 = 1.5 in row 0, 0.5 in row 1 (the second token is
    # masked) and 2 * 0.5 = 1 in row 2.
    ratios, mask = [[0.5, 3.0], [0.5, 7.0], [2.0, 0.5]], [[1, 1], [1, 0], [1, 1]]
    losses, gradient, metrics = by_hand("vespo", ratios, [[-2.0, -2.0], [2.0, 2.0], [-1.0, -1.0]], mask)
    bad, good = 1.5**3 * math.exp(-1.0), 0.5**2 * math.exp(1.5)  # 1.2416 and 1.1204
    assert gradient.tolist() == [
        pytest.approx(row, rel=1e-12, abs=0) for row in ([2 * bad, 2 * bad], [-2 * good, 0.0], [1.0, 1.0])
    ]
    assert losses[1].tolist() == pytest.approx([-2 * good * math.log(0.05), 0.0], rel=1e-12, abs=1e-15)
    assert metrics["weight_mean"] == pytest.approx(2 * bad + good + 2)
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_mean"] == pytest.approx(0.5 + 3.0 + 0.5 + 2.0 + 0.5)


@pytest.mark.parametrize("knobs", [{}, {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.3, "lambda_neg": 4.0}])
def test_vespo_equals_an_oracle_token_by_token(knobs, against):
    given = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0} | knobs

    def oracle(new, a, row, **_):
        w = math.prod(math.exp(x) for x, _ in row)
        w = min(max(w, math.exp(-20)), math.exp(20))
        k, rate = (given["k_pos"], given["lambda_pos"]) if a >= 0 else (given["k_neg"], given["lambda_neg"])
        weight = math.exp(rate) * w**k * math.exp(-rate * w)
        return -weight * a * new, -weight * a, (a > 0, w > 1)

    assert len(against("vespo", oracle, length=4, **knobs)) == 4


def test_the_gradient_of_a_row_is_that_of_the_papers_sequence_loss(make_batch):
    """The paper's loss of an answer y is -phi(pi(y) / mu(y)) A log pi(y), where the weight phi is held constant."""
    batch = make_batch(spread=0.3)
    old, mask = batch["old_log_probs"], batch["response_mask"]
    for advantage, k, rate in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        ours, paper = (batch["log_probs"].clone().requires_grad_() for _ in range(2))
        losses, _ = POLICY_LOSSES.get("vespo")(ours, old, torch.full_like(old, advantage), mask)
        log_pi, log_mu = ((column * mask).sum(-1) for column in (paper, old))
        w = (log_pi - log_mu).exp().detach()
        (gradient,) = torch.autograd.grad(losses.sum(), ours)
        weight = w**k * (rate * (1 - w)).exp()
        (expected,) = torch.autograd.grad((-weight * advantage * log_pi).sum(), paper)
        assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("ratio", [0.1, 10.0])
def test_a_long_answer_that_the_policy_has_left_has_almost_no_gradient(ratio, by_hand):
    losses, gradient, _ = by_hand("vespo", [[ratio] * 40], [[-1.0] * 40])
    assert gradient.abs().max() < 1e-20
    assert losses.isfinite().all()


@pytest.mark.parametrize("knob", ["k_pos", "lambda_pos", "k_neg", "lambda_neg"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_knob_that_is_not_a_positive_number_is_refused(knob, value, by_hand):
    with pytest.raises(ValueError, match=f"{knob}={value} must be finite and > 0"):
        by_hand("vespo", [[1.0]], [[1.0]], **{knob: value})
