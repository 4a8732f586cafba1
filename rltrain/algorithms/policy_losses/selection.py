"""Helpers for the token selectors: covariance of log-prob and advantage, and choice of tokens by smallest value."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, masked


def check_share(**knobs: float) -> None:
    """Raise ValueError if a share of tokens is not in (0, 1]."""
    for name, value in knobs.items():
        if not 0 < value <= 1:
            raise ValueError(
                f"{name}={value} must be > 0 and <= 1: it is a share of the trained tokens; use 0.01, for example"
            )


def token_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute (log pi - mean) (A - mean) per token (B, T); arXiv 2505.22617 eq. 10.

    The mean of log pi and the mean of A are computed over all tokens in `mask`. If all log-probs or all advantages are
    equal, every covariance is exactly 0, even if the computed mean is rounded.
    """
    return _deviations(log_probs, mask) * _deviations(advantages, mask)


def _deviations(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the deviations of `values` (B, T) from their mean over the tokens in `mask`.

    If all tokens in `mask` have the same value, the deviations are exactly 0.
    """
    values = masked(values.detach(), mask)
    found = values[mask]
    if found.numel() == 0 or bool(found.max() == found.min()):
        return torch.zeros_like(values)
    return values - found.mean()


def smallest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Return a bool mask (B, T) of the `count` candidates with the smallest values.

    If there are fewer than `count` candidates (tokens at which `candidates` is True), all candidates are selected.
    If several candidates have the largest selected value, all of them are selected, even if the mask then has more than
    `count` tokens, so that the mask does not depend on the order of rows.
    """
    values = as_float(values.detach())
    found = values[candidates]
    count = min(count, found.numel())
    if count == 0:
        return candidates & False
    return candidates & (values <= found.kthvalue(count).values)


def exactly_smallest(values: Tensor, candidates: Tensor, count: int, draws: Tensor) -> Tensor:
    """Return a bool mask (B, T) of exactly `count` candidates with the smallest values.

    If there are fewer than `count` candidates, all candidates are selected. Among candidates with equal values, the
    candidates with the smallest random numbers `draws` (B, T) are selected.
    """
    found = as_float(values.detach())[candidates]
    by_draw = as_float(draws)[candidates].argsort(stable=True)
    chosen = by_draw[found[by_draw].argsort(stable=True)[:count]]
    picked = torch.zeros_like(found, dtype=torch.bool)
    picked[chosen] = True
    return torch.zeros_like(candidates).masked_scatter(candidates, picked)
