"""What token selectors share: covariances over a mini-batch, and the first few of its tokens."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, masked


def check_share(**knobs: float) -> None:
    """Raise ValueError for a share of tokens that is not above 0 and at most 1."""
    for name, value in knobs.items():
        if not 0 < value <= 1:
            raise ValueError(f"{name}={value} must be > 0 and <= 1, a share of the trained tokens; use 0.01, say")


def token_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - mean) (A - mean) per token (B, T), means over all tokens in `mask`; arXiv 2505.22617 eq. 10.

    Exactly 0 everywhere if all log-probs or all advantages are equal, whatever the rounding of their mean.
    """
    return _deviations(log_probs, mask) * _deviations(advantages, mask)


def _deviations(values: Tensor, mask: Tensor) -> Tensor:
    """From the mean over the tokens in `mask` (B, T); exactly 0 if these tokens all have one value."""
    values = masked(values.detach(), mask)
    found = values[mask]
    if found.numel() == 0 or bool(found.max() == found.min()):
        return torch.zeros_like(values)
    return values - found.mean()


def smallest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates (B, T) with the smallest values, all of them if they are fewer, as bool (B, T).

    Tokens that tie with the last one picked are picked too: which rows come first must not matter.
    """
    values = as_float(values.detach())
    found = values[candidates]
    count = min(count, found.numel())
    if count == 0:
        return candidates & False
    return candidates & (values <= found.kthvalue(count).values)


def exactly_smallest(values: Tensor, candidates: Tensor, count: int, draws: Tensor) -> Tensor:
    """As `smallest`, but never more than `count` tokens: of those that tie, the ones with the smallest `draws`."""
    found = as_float(values.detach())[candidates]
    by_draw = as_float(draws)[candidates].argsort(stable=True)
    chosen = by_draw[found[by_draw].argsort(stable=True)[:count]]
    picked = torch.zeros_like(found, dtype=torch.bool)
    picked[chosen] = True
    return torch.zeros_like(candidates).masked_scatter(candidates, picked)
