"""Rewards to go along the trained tokens of a row, in parallel over time."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask, masked


def check_discount(name: str, value: float) -> None:
    """Raise ValueError for a discount outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must be in [0, 1], or credit grows with distance; use 1.0 for no discount")


def returns_to_go(token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = sum_l gamma^l r_t+l over the trained tokens from t on: (B, T) -> (B, T), masked slots 0, no gradient.

    t + 1 is the next trained token: the tool tokens between two trained ones cost no discount.
    """
    check_discount("gamma", gamma)
    mask = as_mask(response_mask)
    place = places(mask)
    packed = pack(as_float(token_level_rewards.detach()), mask, place)
    return unpack(discounted_suffix_sum(packed, gamma), mask, place)


def places(mask: Tensor) -> Tensor:
    """The how-manieth trained token of its row each one is, from 0; meaningless where `mask` is False."""
    return mask.cumsum(-1) - 1


def pack(values: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """Move each row's trained values to its front, in order, and fill up with 0."""
    rows, length = values.shape
    bin_for_masked = length  # one extra column, cut off again
    packed = values.new_zeros(rows, length + 1).scatter(1, place.where(mask, bin_for_masked), masked(values, mask))
    return packed[:, :length]


def unpack(packed: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """Move the values that `pack` brought to the front back to their tokens; masked slots are 0."""
    return masked(packed.gather(1, place.clamp(min=0)), mask)


def discounted_suffix_sum(values: Tensor, discount: float) -> Tensor:
    """y_t = sum_l discount^l x_t+l along the last axis: after k rounds of doubling, y holds the sums of 2^k terms."""
    span, length = 1, values.shape[-1]
    while span < length and (weight := discount**span) > 0:
        longer = torch.add(values[:, :-span], values[:, span:], alpha=weight)
        values = torch.cat((longer, values[:, -span:]), dim=-1)
        span *= 2
    return values
