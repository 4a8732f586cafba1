"""Rewards and advantages against the statistics of their group or batch, and several rewards into one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask, masked

_LEVELS = ("batch", "group", None)
_AGGREGATIONS = ("sum", "group_normalized_sum")


class _Statistics(NamedTuple):
    """Of the population of each row, (B,) each; `varied`: at least two valid rows, and max > min."""

    size: Tensor
    mean: Tensor
    std: Tensor
    varied: Tensor


def _statistics(scores: Tensor, members: Tensor, valid: Tensor, *, unbiased: bool) -> _Statistics:
    """Statistics over valid rows that share a value of `members` (B,), an index below B."""
    zeros, inf = torch.zeros_like(scores), torch.full_like(scores, torch.inf)
    count = zeros.index_add(0, members, valid.to(scores.dtype))
    mean = zeros.index_add(0, members, scores.where(valid, zeros)) / count.clamp(min=1)
    squares = (scores - mean[members]).square().where(valid, zeros)
    variance = zeros.index_add(0, members, squares) / (count - int(unbiased)).clamp(min=1)
    highest = (-inf).scatter_reduce(0, members, scores.where(valid, -inf), "amax")
    lowest = inf.scatter_reduce(0, members, scores.where(valid, inf), "amin")
    varied = (count >= 2) & (highest > lowest)
    return _Statistics(count[members], mean[members], variance.sqrt()[members], varied[members])


def _members(uid: Tensor, level: str) -> Tensor:
    if level == "batch":
        return torch.zeros_like(uid)
    index: Tensor = torch.unique(uid, return_inverse=True)[1]
    return index


def normalize_rewards(
    scores: Tensor,
    uid: Tensor,
    valid: Tensor,
    *,
    mean_level: str | None,
    std_level: str | None,
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """(r - mean) / (std + eps) for each row: (B,) -> (B,), no gradient.

    `mean_level`, `std_level`: over the rows with the same `uid` ("group"), all rows ("batch"), or none (None). Only
    rows with `valid` enter a statistic; the others get 0. The std is of the raw scores about their own mean;
    `unbiased` divides by n - 1. `leave_one_out` takes the mean of the *other* rows: k/(k-1) (r - mean).

    A population with fewer than two valid rows, or with max == min, says nothing: deviations from its mean are exactly
    0, and nothing is divided by its std. Sums run in float64, so that the order of rows does not show.
    """
    for name, level in (("mean_level", mean_level), ("std_level", std_level)):
        if level not in _LEVELS:
            raise ValueError(f"{name}={level!r} is not known; use 'batch', 'group' or None")
    if leave_one_out and (std_level is not None or mean_level is None):
        raise ValueError(
            f"leave_one_out=True with mean_level={mean_level!r}, std_level={std_level!r}: a row left out of the "
            "mean is not left out of the std; use std_level=None with a mean_level, or leave_one_out=False"
        )
    valid = as_mask(valid)
    raw = result = masked(scores.detach(), valid).double()
    if mean_level is not None:
        of = _statistics(raw, _members(uid, mean_level), valid, unbiased=unbiased)
        weight = of.size / (of.size - 1).clamp(min=1) if leave_one_out else 1
        result = masked((raw - of.mean) * weight, of.varied)
    if std_level is not None:
        of = _statistics(raw, _members(uid, std_level), valid, unbiased=unbiased)
        result = torch.where(of.varied, result / (of.std + eps), result)
    return masked(result, valid).to(as_float(scores).dtype)


def combine_rewards(
    components: Tensor,
    uid: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    weights: Tensor | Sequence[float],
    gates: Tensor | Sequence[bool] | None = None,
    aggregation: str = "sum",
) -> Tensor:
    """sum_k w_k r_k for each row: (B, K) -> (B,).

    NaN means that a component is not applicable to a row: it is left out and the other weights stay as they are; a row
    of nothing but NaN gives NaN, for the caller to mark invalid. `gates` (K,): where a gate's score is <= 0, every
    other component counts 0. `aggregation`: "sum", or "group_normalized_sum", where each component is first normalised
    by mean and std over the valid rows of its group that it applies to (GDPO, arXiv 2601.05242), which needs `uid`.
    """
    components = as_float(components)
    if aggregation not in _AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} is not known; use one of: {', '.join(_AGGREGATIONS)}")
    weight = torch.as_tensor(weights, dtype=components.dtype, device=components.device)
    if weight.shape != components.shape[1:]:
        raise ValueError(f"weights has shape {tuple(weight.shape)} for {components.shape[1]} components; give one each")
    applies = ~components.isnan()
    scores = masked(components, applies)
    if gates is not None:
        scores = _gated(scores, applies, torch.as_tensor(gates, dtype=torch.bool, device=components.device))
    if aggregation == "group_normalized_sum":
        scores = _normalized_columns(scores, applies, uid, valid)
    return torch.where(applies.any(-1), (scores * weight).sum(-1), torch.nan)


def _gated(scores: Tensor, applies: Tensor, gates: Tensor) -> Tensor:
    """Zero each component of a row where a gate other than itself is shut; a gate that does not apply is open."""
    shut = gates & applies & (scores <= 0)
    shut_by_others = shut.sum(-1, keepdim=True) - shut.long() > 0
    return scores.masked_fill(shut_by_others, 0)


def _normalized_columns(scores: Tensor, applies: Tensor, uid: Tensor | None, valid: Tensor | None) -> Tensor:
    """Normalise each of the K columns on its own, as if (component, uid) were the group."""
    if uid is None:
        raise ValueError("uid=None: 'group_normalized_sum' normalises in groups; pass uid, or use aggregation='sum'")
    rows, columns = scores.shape
    index = torch.unique(uid, return_inverse=True)[1][:, None] * columns + torch.arange(columns, device=uid.device)
    member = applies if valid is None else applies & as_mask(valid)[:, None]
    flat = normalize_rewards(
        scores.reshape(-1), index.reshape(-1), member.reshape(-1), mean_level="group", std_level="group"
    )
    return flat.view(rows, columns)


def normalize_advantages(advantages: Tensor, response_mask: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Whiten (B, T) advantages over all trained tokens: (A - mean) / (std + eps), unbiased std, no gradient.

    Masked slots are in no statistic and are 0 afterwards. Fewer than two trained tokens, or all equal: exactly 0.
    """
    mask = as_mask(response_mask)
    trained = as_float(advantages.detach())[mask]
    one_population = torch.zeros_like(trained, dtype=torch.long)
    whitened = normalize_rewards(
        trained, one_population, torch.ones_like(trained), mean_level="batch", std_level="batch", eps=eps
    )
    return torch.zeros_like(mask, dtype=trained.dtype).masked_scatter(mask, whitened)
