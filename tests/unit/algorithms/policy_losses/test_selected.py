"""Tests of the losses that read the column `selected`: clip_cov, kl_cov, top_entropy."""

import math

import pytest


def clipped(r, a, low, high, c=math.inf):
    """Return PPO's loss with the dual clip, and its gradient with respect to log pi."""
    objective = min(r * a, min(max(r, 1 - low), 1 + high) * a)
    if a < 0 and objective < c * a:
        return -c * a, 0.0
    return -objective, (-r * a if objective == r * a else 0.0)


@pytest.mark.parametrize("name", ["clip_cov", "top_entropy"])
def test_D2_tokens_left_out_have_no_loss_and_no_gradient_and_are_not_counted_as_clipped(name, by_hand):
    out = name == "clip_cov"  # clip_cov drops the selected tokens, whereas top_entropy drops the unselected tokens
    selected = [[out, not out, not out, not out], [not out, out, out, out]]
    ratios, advantages = [[1.0, 1.1, 1.5, 0.5]] * 2, [[2.0, 2.0, 2.0, -2.0]] * 2
    mask = [[1, 1, 1, 1], [1, 1, 1, 0]]
    losses, gradient, metrics = by_hand(name, ratios, advantages, mask, selected=selected)
    assert losses.tolist() == [pytest.approx([0, -2.2, -2.4, 1.6]), pytest.approx([-2.0, 0, 0, 0])]
    slopes = [[0, -2.2, 0, 0], [-2.0, 0, 0, 0]]
    assert gradient.tolist() == [pytest.approx(row, rel=1e-12, abs=0) for row in slopes]
    assert metrics["clip_fraction"] == 2
    assert metrics["selected_fraction"] == (3 if out else 4)
    # the metric sums the ratios of all seven trained tokens, including the dropped tokens
    assert metrics["ratio_mean"] == pytest.approx(1.0 + 1.1 + 1.5 + 0.5 + 1.0 + 1.1 + 1.5)


def test_clip_cov_equals_an_oracle_and_has_no_dual_clip(against, by_hand):
    def oracle(new, old, a, selected, **_):
        loss, slope = clipped(math.exp(new - old), a, 0.1, 0.3)
        return (0, 0, "dropped") if selected else (loss, slope, "clipped" if slope == 0 else "kept")

    branches = against("clip_cov", oracle, selected=True, clip_ratio_low=0.1, clip_ratio_high=0.3)
    assert branches == {"dropped", "clipped", "kept"}
    losses, _, metrics = by_hand("clip_cov", [[1e6]], [[-1.0]], selected=[[False]])
    assert losses.item() == pytest.approx(1e6)
    assert set(metrics) == {"clip_fraction", "selected_fraction", "ratio_mean", "ppo_kl"}


def test_top_entropy_equals_an_oracle_with_vanillas_dual_clip(against, by_hand):
    def oracle(new, old, a, selected, **_):
        loss, slope = clipped(math.exp(new - old), a, 0.1, 0.3, 1.5)
        return (loss, slope, "clipped" if slope == 0 else "kept") if selected else (0, 0, "dropped")

    knobs = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}
    assert against("top_entropy", oracle, selected=True, **knobs) == {"dropped", "clipped", "kept"}
    losses, _, metrics = by_hand("top_entropy", [[9.0, 9.0]], [[-1.0, -1.0]], selected=[[True, False]])
    assert losses.tolist() == [pytest.approx([3.0, 0.0])]
    assert metrics["clip_fraction_c"] == 1


# each kl_cov case is (ratio, advantage, selected, loss, gradient)
KL_COV = [
    (1.0, 2.0, True, -2.0, -2.0),
    (3.0, 2.0, False, -6.0, -6.0),
    (3.0, 2.0, True, -6.0 + 0.5 * math.log(3), -5.5),
    (0.25, 2.0, True, -0.5 + 0.5 * math.log(4), -1.0),
    (0.25, -2.0, True, 0.5 + 0.5 * math.log(4), 0.0),
    (0.25, -2.0, False, 0.5, 0.5),
]


@pytest.mark.parametrize(("ratio", "advantage", "selected", "loss", "gradient"), KL_COV)
def test_D2_kl_cov_pulls_selected_tokens_towards_the_old_policy(ratio, advantage, selected, loss, gradient, by_hand):
    losses, actual, metrics = by_hand("kl_cov", [[ratio]], [[advantage]], selected=[[selected]], kl_cov_coef=0.5)
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert actual.item() == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert metrics["selected_fraction"] == selected
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_mean"] == pytest.approx(ratio)


def test_kl_cov_equals_an_oracle_token_by_token(against, gradcheck):
    def oracle(new, old, a, selected, **_):
        r = math.exp(new - old)
        sign = math.copysign(1.0, new - old)
        penalty, pull = (abs(new - old), sign) if selected else (0, 0)
        return -r * a + penalty, -r * a + pull, (selected, sign)

    assert len(against("kl_cov", oracle, selected=True)) == 4
    assert gradcheck("kl_cov", selected=True)


def test_a_selected_slot_that_is_masked_counts_nowhere(by_hand):
    for name in ("clip_cov", "kl_cov", "top_entropy"):
        losses, _, metrics = by_hand(name, [[2.0, 2.0]], [[1.0, 1.0]], [[1, 0]], selected=[[False, True]])
        assert metrics["selected_fraction"] == 0
        assert losses[0, 1].item() == 0


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_a_penalty_that_rewards_distance_is_refused(value, by_hand):
    with pytest.raises(ValueError, match=f"kl_cov_coef={value} must be finite and >= 0"):
        by_hand("kl_cov", [[1.0]], [[1.0]], selected=[[True]], kl_cov_coef=value)


@pytest.mark.parametrize(("log_ratio", "pull"), [(0.9e-5, 0), (-0.9e-5, 0), (1.1e-5, 1), (-1.1e-5, -1)])
def test_rounding_does_not_decide_the_sign_of_kl_covs_pull(log_ratio, pull, by_hand):
    losses, gradient, _ = by_hand("kl_cov", [[math.exp(log_ratio)]], [[0.0]], selected=[[True]], kl_cov_coef=2.0)
    assert losses.item() == pytest.approx(2 * abs(log_ratio) * abs(pull), rel=1e-6)
    assert gradient.item() == 2 * pull


def test_kl_cov_without_penalty_is_the_plain_surrogate(by_hand):
    assert by_hand("kl_cov", [[3.0]], [[2.0]], selected=[[True]], kl_cov_coef=0.0)[0].item() == pytest.approx(-6.0)


@pytest.mark.parametrize("name", ["clip_cov", "top_entropy"])
@pytest.mark.parametrize("knob", ["clip_ratio_low", "clip_ratio_high"])
def test_a_negative_clip_ratio_is_refused(name, knob, by_hand):
    with pytest.raises(ValueError, match=f"{knob}=-0.1 must be >= 0"):
        by_hand(name, [[1.0]], [[1.0]], selected=[[True]], **{knob: -0.1})


def test_a_dual_clip_of_one_is_refused(by_hand):
    with pytest.raises(ValueError, match=r"clip_ratio_c=1\.0 must be > 1"):
        by_hand("top_entropy", [[1.0]], [[1.0]], selected=[[True]], clip_ratio_c=1.0)
