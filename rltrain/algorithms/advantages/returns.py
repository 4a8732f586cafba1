"""Discounted returns over the trained tokens of a row, computed in parallel over time."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask, masked


def check_discount(name: str, value: float) -> None:
    """Raise ValueError if the discount is outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(
            f"{name}={value} must be in [0, 1], or later rewards count more than earlier ones; use 1.0 for no discount"
        )


def returns_to_go(token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Compute G_t = sum_l gamma^l r_{t+l} over the trained tokens from t on.

    The index t counts only trained tokens, so tool-output tokens between two trained tokens add no discount. The
    rewards r and the returns G have the shape (B, T). The returns G are 0 in masked slots and have no gradient.
    """
    check_discount("gamma", gamma)
    mask = as_mask(response_mask)
    place = places(mask)
    aligned = to_left(as_float(token_level_rewards.detach()), mask, place)
    return from_left(discounted_suffix_sum(aligned, gamma), mask, place)


def places(mask: Tensor) -> Tensor:
    """Return the index of each trained token among the trained tokens of its row, counted from 0.

    At tokens that are not trained (`mask` is False), the returned index has no meaning.
    """
    return mask.cumsum(-1) - 1


def to_left(values: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """Move each row's values at trained tokens to the front of the row, in order, and fill all other slots with 0."""
    rows, length = values.shape
    bin_for_masked = length  # masked values are written to one extra column, which is dropped from the returned tensor
    aligned = values.new_zeros(rows, length + 1).scatter(1, place.where(mask, bin_for_masked), masked(values, mask))
    return aligned[:, :length]


def from_left(aligned: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """Undo `to_left`: move the values back to the slots of their tokens, and set masked slots to 0."""
    return masked(aligned.gather(1, place.clamp(min=0)), mask)


def discounted_suffix_sum(values: Tensor, discount: float) -> Tensor:
    """Compute y_t = sum_l discount^l x_{t+l} along the last axis of the tensor x = `values`, by repeated doubling.

    Each round of the loop doubles the number of terms in each sum y_t, so y_t has up to 2^k terms after k rounds.
    """
    span, length = 1, values.shape[-1]
    while span < length and (weight := discount**span) > 0:
        longer = torch.add(values[:, :-span], values[:, span:], alpha=weight)
        values = torch.cat((longer, values[:, -span:]), dim=-1)
        span *= 2
    return values


def discounted_suffix_sum_by_row(values: Tensor, discounts: Tensor) -> Tensor:
    """Compute `discounted_suffix_sum` of `values` (B, T) with one discount per row, `discounts` (B,).

    The powers of the discounts are computed in the dtype of `discounts` and then rounded to the dtype of `values`.
    """
    span, length, weights = 1, values.shape[-1], discounts[:, None]
    while span < length and bool((weights > 0).any()):
        longer = values[:, :-span] + weights.to(values.dtype) * values[:, span:]
        values = torch.cat((longer, values[:, -span:]), dim=-1)
        span, weights = 2 * span, weights.square()
    return values
