"""Rewards and advantages against the statistics of their group or batch, and several rewards into one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask, masked

_LEVELS = ("batch", "group", None)
_AGGREGATIONS = ("sum", "normalize_then_sum")


class Statistics(NamedTuple):
    """Of the population of each row, in the shape of the scores; `varied`: at least two valid rows, and max > min."""

    size: Tensor
    mean: Tensor
    std: Tensor
    highest: Tensor
    varied: Tensor


def group_index(uid: Tensor) -> Tensor:
    """Number the groups: uid (B,) -> an index below B for each row."""
    index: Tensor = torch.unique(uid, return_inverse=True)[1]
    return index


def group_sum(values: Tensor, members: Tensor) -> Tensor:
    """Sum over the rows that share a value of `members` (B,), for each row: (B, ...) -> (B, ...)."""
    return torch.zeros_like(values).index_add(0, members, values)[members]


def statistics_of(scores: Tensor, members: Tensor, valid: Tensor, *, unbiased: bool = True) -> Statistics:
    """Statistics of `scores` (B, ...) over the valid rows that share a value of `members` (B,), each column its own.

    `valid` has the shape of the scores. Of a population without a valid row, mean and std are 0, `highest` is -inf. One
    with a NaN or inf in it counts as varied, so that what is made of it is not finite either.
    """
    zeros, inf = torch.zeros_like(scores), torch.full_like(scores, torch.inf)
    where = members.view(-1, *[1] * (scores.dim() - 1)).expand_as(scores)
    count = group_sum(valid.to(scores.dtype), members)
    mean = group_sum(scores.where(valid, zeros), members) / count.clamp(min=1)
    squares = (scores - mean).square().where(valid, zeros)
    variance = group_sum(squares, members) / (count - int(unbiased)).clamp(min=1)
    highest = (-inf).scatter_reduce(0, where, scores.where(valid, -inf), "amax")[members]
    lowest = inf.scatter_reduce(0, where, scores.where(valid, inf), "amin")[members]
    unknown = ~mean.isfinite()  # a NaN is not larger than itself: its population must not pass for a constant one
    return Statistics(count, mean, variance.sqrt(), highest, (count >= 2) & ((highest > lowest) | unknown))


class _Levels(NamedTuple):
    """How to normalise: the knobs of `normalize_rewards`, checked."""

    mean: str | None
    std: str | None
    leave_one_out: bool
    unbiased: bool
    eps: float

    def check(self) -> None:
        for name, level in (("mean_level", self.mean), ("std_level", self.std)):
            if level not in _LEVELS:
                raise ValueError(f"{name}={level!r} is not known; use 'batch', 'group' or None")
        if self.leave_one_out and (self.std is not None or self.mean is None):
            raise ValueError(
                f"leave_one_out=True with mean_level={self.mean!r}, std_level={self.std!r}: a row left out of the "
                "mean is not left out of the std; use std_level=None with a mean_level, or leave_one_out=False"
            )


def _normalized(raw: Tensor, group: Tensor, counted: Tensor, levels: _Levels) -> Tensor:
    """(raw - mean) / (std + eps); values that are not counted are moved and scaled too. All (B,)."""
    members = {"group": group, "batch": torch.zeros_like(group)}
    result = raw
    if levels.mean is not None:
        of = statistics_of(raw, members[levels.mean], counted, unbiased=levels.unbiased)
        result = raw - of.mean
        if levels.leave_one_out:
            result = torch.where(counted, result * of.size / (of.size - 1).clamp(min=1), result)
        result = torch.where(counted & ~of.varied, 0, result)
    if levels.std is not None:
        of = statistics_of(raw, members[levels.std], counted, unbiased=levels.unbiased)
        result = torch.where(of.varied, result / (of.std + levels.eps), result)
    return result


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
    counted: Tensor | None = None,
) -> Tensor:
    """(r - mean) / (std + eps) for each row: (B,) -> (B,), no gradient.

    `mean_level`, `std_level`: over the rows with the same `uid` ("group"), all rows ("batch"), or none (None). The std
    is of the raw scores about their own mean; `unbiased` divides by n - 1. `leave_one_out` takes the mean of the
    *other* rows: k/(k-1) (r - mean).

    A row that is not `valid` has no score: it is in no statistic and gets 0. A valid row that is not `counted` (B,) is
    in no statistic either, but it is moved and scaled by the statistics of the counted ones, as in
    `normalize_advantages`: so a cut answer that is excluded keeps its own score on the common scale, and a wrong one
    scores no better for being cut. None counts all valid rows.

    A population with fewer than two counted rows, or with max == min, says nothing: the deviations of its counted rows
    are exactly 0, and nothing is divided by its std; a row that is not counted gets its deviation from the mean,
    undivided, and the mean of nothing is 0. Sums run in float64, so that the order of rows does not show.
    """
    levels = _Levels(mean_level, std_level, leave_one_out, unbiased, eps)
    levels.check()
    valid = as_mask(valid)
    members = valid if counted is None else valid & as_mask(counted)
    raw = masked(scores.detach(), valid).double()
    return masked(_normalized(raw, group_index(uid), members, levels), valid).to(as_float(scores).dtype)


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
    other component counts 0. `aggregation`: "sum", or "normalize_then_sum", where each component is first normalised
    by mean and std over the valid rows of its group that it applies to (GDPO, arXiv 2601.05242), which needs `uid`. A
    row that is not `valid` (B,) is in no statistic, and its components are moved and scaled by those of the others.
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
        gate = torch.as_tensor(gates, dtype=torch.bool, device=components.device)
        if gate.shape != weight.shape:
            raise ValueError(f"gates has shape {tuple(gate.shape)} for {len(weight)} components; give one each")
        scores = _gated(scores, applies, gate)
    if aggregation == "normalize_then_sum":
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
        raise ValueError("uid=None: 'normalize_then_sum' normalises in groups; pass uid, or use aggregation='sum'")
    rows, columns = scores.shape
    index = torch.unique(uid, return_inverse=True)[1][:, None] * columns + torch.arange(columns, device=uid.device)
    counted = applies if valid is None else applies & as_mask(valid)[:, None]
    flat = normalize_rewards(
        scores.reshape(-1),
        index.reshape(-1),
        applies.reshape(-1),
        mean_level="group",
        std_level="group",
        counted=counted.reshape(-1),
    )
    return flat.view(rows, columns)


def normalize_advantages(
    advantages: Tensor,
    response_mask: Tensor,
    uid: Tensor | None = None,
    counted: Tensor | None = None,
    *,
    mean_level: str | None = "batch",
    std_level: str | None = "batch",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """(A - mean) / (std + eps) for each trained token: (B, T) -> (B, T), no gradient; by default whitening.

    `mean_level`, `std_level`: over the trained tokens of the rows with the same `uid` (B,) ("group"), of all rows
    ("batch"), or none (None). Each token counts once, so a long row weighs more. The std is of the raw advantages;
    `unbiased` divides by n - 1. `leave_one_out` takes the mean of the *other* tokens: n/(n-1) (A - mean).

    Masked slots are in no statistic and are 0 afterwards. `counted` (B,): the tokens of other rows are in no statistic
    either, but they are moved and scaled by the statistics of the counted ones, so that a row that is excluded and
    keeps its credit (under gae) keeps it on the common scale. A row that is to stay at 0 is left out of
    `response_mask` instead. None counts all rows.

    A population with fewer than two counted tokens, or with max == min, says nothing: the deviations of its counted
    tokens are exactly 0, and nothing is divided by its std; a token that is not counted gets its deviation from the
    mean, undivided, and the mean of nothing is 0. Sums run in float64.
    """
    levels = _Levels(mean_level, std_level, leave_one_out, unbiased, eps)
    levels.check()
    mask = as_mask(response_mask)
    if uid is None:
        if "group" in (mean_level, std_level):
            raise ValueError(
                f"uid=None with mean_level={mean_level!r}, std_level={std_level!r}: a group is found by its uid; "
                "pass uid, or use 'batch' or None"
            )
        uid = torch.zeros(mask.shape[0], dtype=torch.long, device=mask.device)
    rows = torch.ones_like(uid, dtype=torch.bool) if counted is None else as_mask(counted)
    trained = as_float(advantages.detach())[mask]
    group, member = (row[:, None].expand(mask.shape)[mask] for row in (group_index(uid), rows))
    result = _normalized(trained.double(), group, member, levels).to(trained.dtype)
    return torch.zeros_like(mask, dtype=trained.dtype).masked_scatter(mask, result)
