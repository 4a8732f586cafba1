"""Normalisation of rewards and advantages by group or batch statistics, and combination of several rewards."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask, masked

_LEVELS = ("batch", "group", None)
_AGGREGATIONS = ("sum", "normalize_then_sum")


class Statistics(NamedTuple):
    """Statistics of each row's population (the row's group, or the whole batch), as tensors shaped like the scores.

    `size` is the number of valid rows of the population. `varied` is True if the population has at least two valid rows
    and their scores are not all the same finite number.
    """

    size: Tensor
    mean: Tensor
    std: Tensor
    highest: Tensor
    varied: Tensor


def group_index(uid: Tensor) -> Tensor:
    """Return an index from 0 to B - 1 for each of the B rows; rows with the same group id `uid` get the same index."""
    index: Tensor = torch.unique(uid, return_inverse=True)[1]
    return index


def group_sum(values: Tensor, members: Tensor) -> Tensor:
    """For each row, sum `values` over all rows with the same entry in `members` (B,): (B, ...) -> (B, ...)."""
    return torch.zeros_like(values).index_add(0, members, values)[members]


def statistics_of(scores: Tensor, members: Tensor, valid: Tensor, *, unbiased: bool = True) -> Statistics:
    """For each row, compute statistics of `scores` (B, ...) over the valid rows with the same entry in `members` (B,).

    Each column of `scores` has its own statistics. `valid` has the shape of the scores. If a population has no valid
    row, its mean and std are 0 and `highest` is -inf. `varied` is True for a population of at least two valid rows if
    their scores differ, or if a score is NaN or inf. If `varied` were False for a population with a NaN or inf score,
    the normalised scores of the population would be 0, which would hide the NaN or inf.
    """
    zeros, inf = torch.zeros_like(scores), torch.full_like(scores, torch.inf)
    where = members.view(-1, *[1] * (scores.dim() - 1)).expand_as(scores)
    count = group_sum(valid.to(scores.dtype), members)
    mean = group_sum(scores.where(valid, zeros), members) / count.clamp(min=1)
    squares = (scores - mean).square().where(valid, zeros)
    variance = group_sum(squares, members) / (count - int(unbiased)).clamp(min=1)
    highest = (-inf).scatter_reduce(0, where, scores.where(valid, -inf), "amax")[members]
    lowest = inf.scatter_reduce(0, where, scores.where(valid, inf), "amin")[members]
    # The comparison `highest > lowest` is False if a score is NaN or if all scores are inf. Such a population is
    # recognised by the mean of its scores, which is not finite.
    unknown = ~mean.isfinite()
    return Statistics(count, mean, variance.sqrt(), highest, (count >= 2) & ((highest > lowest) | unknown))


class _Levels(NamedTuple):
    """Arguments that `normalize_rewards` and `normalize_advantages` share, with a method that checks their values."""

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
                f"leave_one_out=True with mean_level={self.mean!r}, std_level={self.std!r}: leave-one-out "
                "exists only for the mean; use std_level=None with a mean_level, or leave_one_out=False"
            )


def _normalized(raw: Tensor, group: Tensor, counted: Tensor, levels: _Levels) -> Tensor:
    """Compute (raw - mean) / (std + eps) for 1-D tensors, with mean and std over the values marked in `counted`."""
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
    """Compute (r - mean) / (std + eps) for each row: (B,) -> (B,), no gradient.

    `mean_level` and `std_level` select the population: the rows with the same `uid` ("group"), or all rows ("batch").
    A `mean_level` of None turns off the subtraction of the mean, and a `std_level` of None turns off the division by
    the std. The std is computed from the raw scores (before any mean is subtracted) of the population that `std_level`
    selects, around the mean of the same population. With `unbiased`, the sum of squared deviations is divided by n - 1
    instead of n. With `leave_one_out`, the mean over all *other* rows of the population is subtracted from the score
    of a row, which gives k/(k-1) (r - mean) in a population of k rows.

    A row that is not `valid` has no score, is excluded from the statistics and gets the result 0.

    A valid row that is not `counted` (B,) is excluded from the statistics, but is normalised by the statistics of the
    counted rows, as in `normalize_advantages`. For example, a truncated answer that is excluded from the statistics is
    still scored on the scale of the counted rows, so truncation does not improve the score of a wrong answer. If
    `counted` is None, all valid rows are counted.

    A population has no spread if fewer than two of its rows enter the statistics, or if all rows that enter the
    statistics have equal scores. If the population that `mean_level` selects has no spread, the rows that enter the
    statistics get deviations of exactly 0 from the mean. The deviation of a valid row that is excluded from the
    statistics is always its score minus the mean, even if the population has no spread. If the population that
    `std_level` selects has no spread, the deviations from the mean are not divided by the std. If no row of a
    population enters the statistics, the mean over the population is 0. Sums are computed in float64, so that the
    order of rows does not affect the result.

    Raises:
        ValueError: if `mean_level` or `std_level` is unknown, or if `leave_one_out` is used with a `mean_level` of None
            or with a `std_level` other than None.
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
    """Compute the weighted sum of the K reward components of each row, sum_k w_k r_k: (B, K) -> (B,).

    A component that is NaN does not apply to the row. The sum omits the components that do not apply to a row, and does
    not rescale the weights of the remaining components. The result is NaN for a row whose components are all NaN, and
    the caller must mark the row invalid.

    The argument `gates` (K,) is True for each reward component that acts as a gate. A gate sets all other reward
    components of a row to 0 if the gate's own score in the row is <= 0.

    `aggregation` is "sum" or "normalize_then_sum". With "normalize_then_sum", each component is normalised within each
    group (rows with the same `uid`) before the components are summed (GDPO, arXiv 2601.05242). The mean and std of a
    component are computed over those valid rows of the group that have a value other than NaN for the component. The
    components of a row that is not `valid` (B,) are excluded from the statistics, but are normalised by the statistics
    of the valid rows.

    Raises:
        ValueError: if `aggregation` is unknown, if `weights` or `gates` does not have one entry for each reward
            component, or if "normalize_then_sum" is used without `uid`.
    """
    components = as_float(components)
    if aggregation not in _AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} is not known; use one of: {', '.join(_AGGREGATIONS)}")
    weight = torch.as_tensor(weights, dtype=components.dtype, device=components.device)
    if weight.shape != components.shape[1:]:
        raise ValueError(
            f"weights has shape {tuple(weight.shape)} for {components.shape[1]} components; give one weight per "
            "component"
        )
    applies = ~components.isnan()
    scores = masked(components, applies)
    if gates is not None:
        gate = torch.as_tensor(gates, dtype=torch.bool, device=components.device)
        if gate.shape != weight.shape:
            raise ValueError(
                f"gates has shape {tuple(gate.shape)} for {len(weight)} components; give one gate per component"
            )
        scores = _gated(scores, applies, gate)
    if aggregation == "normalize_then_sum":
        scores = _normalized_columns(scores, applies, uid, valid)
    return torch.where(applies.any(-1), (scores * weight).sum(-1), torch.nan)


def _gated(scores: Tensor, applies: Tensor, gates: Tensor) -> Tensor:
    """Set a reward component of a row to 0 if another component of the same row is a gate with a score <= 0."""
    shut = gates & applies & (scores <= 0)
    shut_by_others = shut.sum(-1, keepdim=True) - shut.long() > 0
    return scores.masked_fill(shut_by_others, 0)


def _normalized_columns(scores: Tensor, applies: Tensor, uid: Tensor | None, valid: Tensor | None) -> Tensor:
    """Normalise each of the K reward components separately, within each group of rows with the same `uid`."""
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
    """Compute (A - mean) / (std + eps) for each trained token: (B, T) -> (B, T), no gradient.

    By default, the advantages are whitened: mean and std are computed over the trained tokens of the whole batch.

    `mean_level` and `std_level` select the population: the trained tokens of the rows with the same `uid` (B,)
    ("group"), or of all rows ("batch"). A `mean_level` of None turns off the subtraction of the mean, and a
    `std_level` of None turns off the division by the std. All tokens have the same weight in the statistics, so a long
    row weighs more than a short row. The std is computed from the raw advantages (before any mean is subtracted) of
    the population that `std_level` selects. With `unbiased`, the sum of squared deviations is divided by n - 1 instead
    of n. With `leave_one_out`, the mean over all *other* tokens of the population is subtracted from the advantage of
    a token, which gives n/(n-1) (A - mean) in a population of n tokens.

    Masked slots are excluded from the statistics and are 0 in the result. `counted` (B,) marks the rows whose tokens
    enter the statistics; None means all rows. With some advantage estimators, such as `gae`, the policy is trained even
    on rows that are not marked in `counted`. Rows that are not marked are normalised by the statistics of the marked
    rows, so that the advantages of all rows have the same scale. To keep the advantages of a row at 0, leave the tokens
    of the row out of `response_mask`.

    A population has no spread if fewer than two of its tokens enter the statistics, or if all tokens that enter the
    statistics have equal advantages. If the population that `mean_level` selects has no spread, the tokens that enter
    the statistics get deviations of exactly 0 from the mean. The deviation of a trained token that is excluded from the
    statistics is always its advantage minus the mean, even if the population has no spread. If the population that
    `std_level` selects has no spread, the deviations from the mean are not divided by the std. If no token of a
    population enters the statistics, the mean over the population is 0. Sums are computed in float64.

    Raises:
        ValueError: if `mean_level` or `std_level` is unknown, if `leave_one_out` is used with a `mean_level` of None or
            with a `std_level` other than None, or if one of the two levels is "group" and `uid` is None.
    """
    levels = _Levels(mean_level, std_level, leave_one_out, unbiased, eps)
    levels.check()
    mask = as_mask(response_mask)
    if uid is None:
        if "group" in (mean_level, std_level):
            raise ValueError(
                f"uid=None with mean_level={mean_level!r}, std_level={std_level!r}: groups are identified by uid; "
                "pass uid, or use 'batch' or None for both levels"
            )
        uid = torch.zeros(mask.shape[0], dtype=torch.long, device=mask.device)
    rows = torch.ones_like(uid, dtype=torch.bool) if counted is None else as_mask(counted)
    trained = as_float(advantages.detach())[mask]
    group, member = (row[:, None].expand(mask.shape)[mask] for row in (uid, rows))
    # `group_sum` works only if each group index is below the number of trained tokens. A batch can have more groups
    # than trained tokens, so groups without a trained token must not get an index.
    group = group_index(group)
    result = _normalized(trained.double(), group, member, levels).to(trained.dtype)
    return torch.zeros_like(mask, dtype=trained.dtype).masked_scatter(mask, result)
