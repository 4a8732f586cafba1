"""Tests of the loss and the selector of M2PO, which limits the second moment of log importance weights."""

import math

import pytest
import torch

from rltrain.algorithms import TOKEN_SELECTORS

select = TOKEN_SELECTORS.get("m2po")


def selected(log_ratios, advantages, mask=None, **knobs):
    """Return which tokens M2PO drops if log(pi_old / pi_rollout) is `log_ratios`."""
    log_ratios, advantages = (torch.tensor(values, dtype=torch.float64) for values in (log_ratios, advantages))
    mask = torch.ones_like(log_ratios) if mask is None else torch.tensor(mask)
    rollout = torch.full_like(log_ratios, -2.0)
    return select(rollout + log_ratios, rollout, advantages, mask, **knobs).int().tolist()


def test_the_selection_worked_by_hand():
    # The candidates are the tokens whose log-ratio and advantage have the same sign. The squared log-ratios of the
    # candidates are 0.01, 0.04 and 0.25 in row 0, and 0.09 in row 1. In sorted order, the running means of the squares
    # are 0.01, 0.025, 0.14 / 3 and 0.39 / 4.
    log_ratios = [[0.1, -0.2, 0.5, -3.0], [-0.3, 2.0, 9.0, 0.0]]
    advantages = [[1.0, -1.0, 2.0, 1.0], [-1.0, -1.0, 1.0, 1.0]]
    mask = [[1, 1, 1, 1], [1, 1, 0, 1]]
    assert selected(log_ratios, advantages, mask) == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert selected(log_ratios, advantages, mask, m2_threshold=0.047) == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert selected(log_ratios, advantages, mask, m2_threshold=0.098) == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert selected(log_ratios, advantages, mask, m2_threshold=0.009) == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_tokens_that_tie_with_a_dropped_one_are_dropped_too_so_that_the_limit_holds():
    # the running means of 0.01, 0.09 and 0.09 are 0.01, 0.05 and 0.063
    assert selected([[0.3, 0.1, 0.3]], [[1.0, 1.0, 1.0]], m2_threshold=0.055) == [[1, 0, 1]]


def test_without_movement_or_without_advantage_nothing_is_dropped():
    assert selected([[0.0, 0.0]], [[1.0, -1.0]], m2_threshold=1e-9) == [[0, 0]]
    assert selected([[5.0, -5.0]], [[0.0, 0.0]], m2_threshold=1e-9) == [[0, 0]]


@pytest.mark.parametrize("threshold", [0.04, 0.2, 0.5])
def test_the_selection_equals_dropping_the_farthest_token_one_by_one(threshold, make_batch):
    batch = make_batch(length=30)
    old, rollout, advantages, mask = (
        batch[name] for name in ("old_log_probs", "rollout_log_probs", "advantages", "response_mask")
    )
    moved = {(i, t): (old[i, t] - rollout[i, t]).item() for i, t in mask.nonzero().tolist()}
    left = {at: x * x for at, x in moved.items() if advantages[at] * x > 0}
    candidates = len(left)
    while left and sum(left.values()) / len(left) > threshold:
        del left[max(left, key=left.get)]
    found = select(old, rollout, advantages, mask, m2_threshold=threshold)
    away = {at for at, x in moved.items() if advantages[at] * x > 0} - left.keys()
    assert {tuple(at) for at in found.nonzero().tolist()} == away
    assert 0 < len(left) < candidates


def test_the_loss_equals_an_oracle_token_by_token_and_has_no_dual_clip(against, by_hand):
    def oracle(new, old, a, selected, **_):
        r = math.exp(new - old)
        lost = (a > 0 and r > 1.3) or (a < 0 and r < 0.9)
        if selected:
            return 0, 0, "dropped"
        return -min(r * a, min(max(r, 0.9), 1.3) * a), 0.0 if lost else -r * a, "clipped" if lost else "kept"

    branches = against("m2po", oracle, selected=True, clip_ratio_low=0.1, clip_ratio_high=0.3)
    assert branches == {"dropped", "clipped", "kept"}
    losses, gradient, metrics = by_hand("m2po", [[1.1, 1.5, 1e6]], [[2.0, 2.0, -1.0]], selected=[[True, False, False]])
    assert losses[0].tolist() == pytest.approx([0.0, -2.4, 1e6])
    assert gradient[0].tolist() == pytest.approx([0.0, 0.0, 1e6])
    assert (metrics["clip_fraction"], metrics["selected_fraction"]) == (1, 1)


@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
def test_a_threshold_that_is_not_a_positive_number_is_refused(value):
    with pytest.raises(ValueError, match=f"m2_threshold={value} must be finite and > 0"):
        selected([[0.1]], [[1.0]], m2_threshold=value)


@pytest.mark.parametrize("knob", ["clip_ratio_low", "clip_ratio_high"])
def test_a_negative_clip_ratio_is_refused(knob, by_hand):
    with pytest.raises(ValueError, match=f"{knob}=-0.1 must be >= 0"):
        by_hand("m2po", [[1.0]], [[1.0]], selected=[[False]], **{knob: -0.1})
