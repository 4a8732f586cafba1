"""Scores as the algorithm sees them: shaped one by one, and without the answers that are in no statistic.

What the reward functions said stays in the column `scores`; here it becomes what advantages are made of.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rltrain.algorithms import combine_rewards, overlong_penalty, required_columns, shape_scores, suppress_truncated
from rltrain.base.errors import RewardError, described
from rltrain.batch.data_proto import DataProto
from rltrain.rewards.loading import AGGREGATIONS, load_function, source_name
from rltrain.settings.algorithm_config import AlgorithmConfig, RewardShapingConfig
from rltrain.settings.reward_config import RewardConfig, RewardFunctionConfig, RewardModelConfig
from rltrain.settings.schema import Config


def weighted_sum(matrix: Tensor, components: Sequence[RewardFunctionConfig | RewardModelConfig]) -> Tensor:
    """(B, K) -> (B,), gates applied; NaN where no component applies. Raises RewardError beyond float32's range."""
    weights, gates = [c.weight for c in components], [c.gate for c in components]
    return _finite(combine_rewards(matrix, weights=weights, gates=gates), matrix)


def of_outcome(matrix: Tensor, components: Sequence[RewardFunctionConfig | RewardModelConfig]) -> Tensor:
    """(B, K) with NaN, not applicable, in the columns of functions that score the form and not the outcome."""
    return matrix.masked_fill(~torch.tensor([component.outcome for component in components]), torch.nan)


def _finite(totals: Tensor, matrix: Tensor) -> Tensor:
    """The totals (B,); NaN stands for what does not apply, and must not come of numbers too large to be added."""
    bad = ~totals.isfinite() & ~matrix.isnan().all(-1)
    if bool(bad.any()):
        row = matrix[bad][0].tolist()
        raise RewardError(
            f"reward: the weighted sum of the scores {row} is {totals[bad][0].item()}: outside float32's range "
            "(3.4e38); scale the scores or their weights down"
        )
    return totals


def combined_scores(components: Tensor, uid: Tensor, counted: Tensor, reward: RewardConfig) -> Tensor:
    """Each row's score (B,): functions and models (B, K) combined as `reward.aggregation` says, NaN where none applies.

    counted (B,): the rows that are in the statistics of an aggregation.

    Raises RewardError when a function of the user's returns something else than a number a row.
    """
    if reward.aggregation == "sum":
        return weighted_sum(components, reward.components)
    weights, gates = [c.weight for c in reward.components], [c.gate for c in reward.components]
    if reward.aggregation == "normalize_then_sum":
        totals = combine_rewards(components, uid, counted, weights=weights, gates=gates, aggregation=reward.aggregation)
        return _finite(totals, components)
    return _users_aggregation(reward.aggregation, components, uid, counted, weights)


@functools.cache
def _aggregation(path: str) -> Callable[..., Any]:
    """The user's function as it was when it was first called: an edit of its file is for another run."""
    return load_function(path)


def _users_aggregation(path: str, components: Tensor, uid: Tensor, valid: Tensor, weights: list[float]) -> Tensor:
    own = {"components": components.clone(), "uid": uid.clone(), "valid": valid.clone()}  # it may change them in place
    try:
        returned = _aggregation(path)(**own, weights=torch.tensor(weights))
        totals = _numbers_by_row(returned, len(uid))
        if totals is None:
            shown = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
            shown = f"{shown} of {returned.dtype}" if isinstance(returned, Tensor) and returned.is_complex() else shown
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit would end the run without a word; a result may raise when it is looked at
        raise _aggregation_error(path, f"raised {described(error)}") from error
    if totals is None:
        raise _aggregation_error(
            path, f"returned {shown}: one finite number a row, or NaN, is wanted, {tuple(uid.shape)}"
        )
    if (
        len(uid.unique()) > 1 and bool(valid.any()) and bool(totals[valid].isnan().all())
    ):  # one group may well have none
        raise _aggregation_error(
            path, "returned NaN for every row, so nothing is learnt; return a number where it applies"
        )
    return totals


def _aggregation_error(path: str, what: str) -> RewardError:
    """The error that says what the user's aggregation function did; its file may be repaired before the run goes on."""
    error = RewardError(f"reward.aggregation={path} {what}")
    error.repairable = source_name("reward.aggregation", path)
    return error


def _numbers_by_row(returned: object, rows: int) -> Tensor | None:
    """(rows,) float32 on the CPU, if these are real numbers in float32's range, or NaN."""
    if not isinstance(returned, Tensor) or returned.shape != (rows,) or returned.is_complex():
        return None
    if returned.layout is not torch.strided or returned.is_meta:
        return None
    totals = returned.detach().to("cpu", torch.float32)
    return None if bool(totals.isinf().any()) else totals


def truncated_rows(batch: DataProto) -> Tensor:
    """(B,) bool: the engine cut the answer at the length limit."""
    return torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])


class ShapedScores(NamedTuple):
    """What advantages are made of, each (B,).

    Attributes:
        scores: shaped; 0 where a row has none.
        scored: whether the row has a score.
        counted: whether it is in the statistics: scored, and not excluded because its answer was cut.
    """

    scores: Tensor
    scored: Tensor
    counted: Tensor


def in_statistics(batch: DataProto, algorithm: AlgorithmConfig) -> Tensor:
    """(B,) bool: the row is valid, and not excluded because its answer was cut."""
    valid: Tensor = batch.batch["valid"]
    return valid & ~truncated_rows(batch) if algorithm.suppress_truncated or algorithm.exclude_truncated else valid


def shaped_scores(batch: DataProto, config: Config) -> ShapedScores:
    """The scores of a batch as the estimators see them, before normalisation.

    A cut answer whose reward is suppressed scores as if each reward function had given 0, or its own score if that is
    lower. The length penalty is taken off afterwards, so cut answers pay it too; it reaches the estimators that look at
    rows outside of the statistics (gae).
    """
    algorithm, shaping, cut = config.algorithm, config.algorithm.reward_shaping, truncated_rows(batch)
    components, uid, counted = batch.batch["reward_components"], batch.batch["uid"], in_statistics(batch, algorithm)
    totals = combined_scores(components, uid, counted, config.reward)
    scores = _shaped(totals, shaping)
    if algorithm.suppress_truncated and bool(cut.any()):
        empty = components.masked_fill(cut[:, None] & ~components.isnan(), 0.0)
        nothing = combined_scores(empty, uid, counted, config.reward)
        scores = suppress_truncated(scores, cut, _shaped(nothing, shaping))
    if shaping.overlong_buffer:
        scores = scores + overlong_penalty(
            batch.lengths("responses"),
            max_response_length=config.rollout.max_response_length,
            buffer=shaping.overlong_buffer,
            factor=shaping.overlong_penalty,
        )
    scored = batch.batch["valid"] & ~totals.isnan()
    return ShapedScores(torch.where(scored, scores, 0.0), scored, counted & scored)


def _shaped(scores: Tensor, shaping: RewardShapingConfig) -> Tensor:
    return shape_scores(scores, bias=shaping.bias, scale=shaping.scale, clip=shaping.clip)


def zero_spread(uid: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    """(B,) bool: all valid rows of this row's group have one score, or there is none; nothing can be learnt from it."""
    groups, which = uid.unique(return_inverse=True)
    low = torch.full((len(groups),), torch.inf).scatter_reduce(0, which, scores.where(valid, torch.inf), "amin")
    high = torch.full((len(groups),), -torch.inf).scatter_reduce(0, which, scores.where(valid, -torch.inf), "amax")
    return (high <= low)[which]


def flat_rows(batch: DataProto, config: Config) -> Tensor:
    """(B,) bool: the answers of the row's group all have the same outcome, so it teaches nothing of the task.

    The outcome is the score of the functions and models with `outcome`, combined as `reward.aggregation` says, before
    shaping, normalisation and the length penalty: answers that are all wrong have one outcome whatever their lengths.
    An aggregation of the user's gets all functions, and what it returns is the outcome. For an estimator that reads the
    functions one by one, each with `outcome` must have one score. Rows outside of the statistics do not count.
    """
    uid, counted, components = (
        batch.batch["uid"],
        in_statistics(batch, config.algorithm),
        batch.batch["reward_components"],
    )
    if config.reward.aggregation in AGGREGATIONS:
        components = of_outcome(components, config.reward.components)
    if "reward_components" in required_columns(config.algorithm.advantage_estimator, config.algorithm.loss_mode):
        each = [zero_spread(uid, column, counted & ~column.isnan()) for column in components.unbind(1)]
        return torch.stack(each).all(0)
    outcomes = combined_scores(components, uid, counted, config.reward)
    return zero_spread(uid, outcomes, counted & ~outcomes.isnan())


def on_last_token(batch: DataProto, scores: Tensor) -> Tensor:
    """Each row's score (B,) on the last of its trained tokens, 0 elsewhere: (N,), in the rows of `responses`."""
    mask, lengths = batch.values("response_mask"), batch.lengths("responses")
    row = torch.arange(len(batch)).repeat_interleave(lengths)
    last = torch.full((len(batch),), -1).scatter_reduce(0, row[mask], mask.nonzero()[:, 0], "amax")
    placed = torch.zeros(len(mask), dtype=scores.dtype)
    placed[last[last >= 0]] = scores[last >= 0]
    return placed
