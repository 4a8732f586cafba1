"""Generalised advantage estimation, in parallel over time."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("gae", statistics="none")
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_t = sum_l (gamma lam)^l delta_t+l, delta_t = r_t + gamma V_t+1 - V_t; arXiv 1506.02438 eq. 11 and 16.

    Time counts trained tokens only: t + 1 is the next trained token, so the tool tokens between two trained ones cost
    no discount and lend no value. After the last trained token V is 0. Returns are A + V.

    All (B, T); masked slots are ignored and give 0. Nothing is whitened: see `normalize_advantages`. No gradient.
    """
    for name, knob in (("gamma", gamma), ("lam", lam)):
        if not 0 <= knob <= 1:
            raise ValueError(f"{name}={knob} must be in [0, 1], or credit grows with distance; use 1.0 for no discount")
    mask = as_mask(response_mask)
    rewards, baseline = as_float(token_level_rewards.detach()), as_float(values.detach())
    place = mask.cumsum(-1) - 1  # the how-manieth trained token of its row each one is
    packed_rewards, packed_values = _pack(rewards, mask, place), _pack(baseline, mask, place)
    next_values = torch.nn.functional.pad(packed_values[:, 1:], (0, 1))
    delta = packed_rewards + gamma * next_values - packed_values
    packed_advantages = _discounted_suffix_sum(delta, gamma * lam)
    advantages = masked(packed_advantages.gather(1, place.clamp(min=0)), mask)
    return advantages, masked(advantages + baseline, mask)


def _pack(values: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """Move each row's trained values to its front, in order, and fill up with 0."""
    rows, length = values.shape
    bin_for_masked = length  # one extra column, cut off again
    packed = values.new_zeros(rows, length + 1).scatter(1, place.where(mask, bin_for_masked), masked(values, mask))
    return packed[:, :length]


def _discounted_suffix_sum(values: Tensor, discount: float) -> Tensor:
    """y_t = sum_l discount^l x_t+l along the last axis: after k rounds of doubling, y holds the sums of 2^k terms."""
    span, length = 1, values.shape[-1]
    while span < length and (weight := discount**span) > 0:
        longer = torch.add(values[:, :-span], values[:, span:], alpha=weight)
        values = torch.cat((longer, values[:, -span:]), dim=-1)
        span *= 2
    return values
