"""Computes shaped scores, from which advantages are estimated, and masks of the rows that count in score statistics.

The column `scores` of a batch keeps the unshaped scores. Shaped scores (scaled, shifted, clipped or penalised) are
computed separately and used only for the advantages.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rltrain.algorithms import (
    combine_rewards,
    group_length_reward,
    overlong_penalty,
    required_columns,
    shape_scores,
    suppress_truncated,
)
from rltrain.base.background_tasks import outside_event_loop
from rltrain.base.errors import RewardError, described
from rltrain.batch.data_proto import DataProto
from rltrain.batch.sampled_tokens import sampled_lengths
from rltrain.rewards.loading import AGGREGATIONS, is_environment_reward, load_function, source_name
from rltrain.settings.algorithm_config import AlgorithmConfig, RewardShapingConfig
from rltrain.settings.reward_config import RewardConfig, RewardFunctionConfig, RewardModelConfig
from rltrain.settings.schema import Config
from workers.reward.messages import SampleScores


def weighted_sum(matrix: Tensor, components: Sequence[RewardFunctionConfig | RewardModelConfig]) -> Tensor:
    """Compute the weighted sum (B,) of each row's component scores (B, K).

    If a component with the setting `gate` has a score <= 0 for a row, all other scores of the row count as 0. If no
    reward component applies to a row, the row's score is NaN. In a run without reward components (K = 0), every row has
    the score 0.

    Raises:
        RewardError: the weighted sum of a row's component scores is outside float32's range.
    """
    if not components:
        return torch.zeros(len(matrix))
    weights, gates = [c.weight for c in components], [c.gate for c in components]
    return _finite(combine_rewards(matrix, weights=weights, gates=gates), matrix)


def component_matrix(results: Sequence[SampleScores]) -> Tensor:
    """Return the scores of the reward functions and models as a matrix (B, K).

    The score of a component is NaN in a row to which the component does not apply, and in a row whose reward failed.
    """
    nan = float("nan")
    return torch.tensor([[nan if s is None or r.failed else s for s in r.scores] for r in results], dtype=torch.float32)


def of_outcome(matrix: Tensor, components: Sequence[RewardFunctionConfig | RewardModelConfig]) -> Tensor:
    """Return the component scores (B, K), with NaN in the columns of components that score only the form of an answer.

    A score of NaN means that the component does not apply to the row.
    """
    return matrix.masked_fill(
        torch.tensor([not component.outcome for component in components], dtype=torch.bool), torch.nan
    )


def successes(
    matrix: Tensor,
    declared: Sequence[bool | None],
    components: Sequence[RewardFunctionConfig | RewardModelConfig],
) -> Tensor:
    """Return for each row (B,) whether the answer is correct: 1 for correct, 0 for wrong, and NaN for undecided.

    A component with the setting `success` considers an answer correct if the component's score for the answer is at
    least `success`. A reward function can declare an answer correct or wrong with `RewardResult.success`. An answer is
    correct only if no component and no reward function considers the answer wrong.

    Args:
        matrix: scores of the reward functions and models, (B, K); NaN where a function or model does not apply.
        declared: for each row, the value of `RewardResult.success` that the reward functions returned.
        components: the reward functions and models, in the order of the columns of `matrix`.
    """
    limits = torch.tensor([torch.nan if c.success is None else c.success for c in components], dtype=matrix.dtype)
    decides = ~matrix.isnan() & ~limits.isnan()
    said = torch.tensor([s is not None for s in declared])
    wrong = (decides & (matrix < limits)).any(1) | torch.tensor([s is False for s in declared])
    return torch.where(decides.any(1) | said, (~wrong).float(), torch.nan)


def _finite(totals: Tensor, matrix: Tensor) -> Tensor:
    """Check that the total scores (B,) are valid, and return the scores.

    The total score of a row must be finite, or NaN if no component applies to the row.

    Raises:
        RewardError: the total score of a row is outside float32's range.
    """
    bad = ~totals.isfinite() & ~matrix.isnan().all(-1)
    if bool(bad.any()):
        row = matrix[bad][0].tolist()
        raise RewardError(
            f"reward: the weighted sum of the scores {row} is {totals[bad][0].item()}: outside float32's range "
            "(3.4e38); scale the scores or their weights down"
        )
    return totals


def combined_scores(components: Tensor, uid: Tensor, counted: Tensor, reward: RewardConfig) -> Tensor:
    """Combine the component scores (B, K) into one score per row (B,), in the way that `reward.aggregation` selects.

    If no reward component applies to a row, the row's score is NaN.

    Args:
        components: scores of the reward functions and models, (B, K).
        uid: number of each row's prompt group, (B,).
        counted: bool mask (B,) of the rows from which an aggregation computes statistics, such as a group's mean score.
        reward: section `reward` of the config.

    Raises:
        RewardError: the combined score of a row is outside float32's range, or a user's aggregation function raises an
            exception or does not return one number per row.
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
    """Load the user's aggregation function once, so that later edits of the function's file have no effect."""
    return load_function(path)


def _users_aggregation(path: str, components: Tensor, uid: Tensor, valid: Tensor, weights: list[float]) -> Tensor:
    # The user's function receives copies of the tensors, because the function may change its arguments in place.
    own = {"components": components.clone(), "uid": uid.clone(), "valid": valid.clone()}
    try:
        with outside_event_loop():
            returned = _aggregation(path)(**own, weights=torch.tensor(weights))
        totals = _numbers_by_row(returned, len(uid))
        if totals is None:
            shown = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
            shown = f"{shown} of {returned.dtype}" if isinstance(returned, Tensor) and returned.is_complex() else shown
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Every exception except KeyboardInterrupt becomes a RewardError, even a SystemExit, which would otherwise end
        # the run silently. Even if the user's aggregation function returns an object without an error, the object may
        # raise an exception when its shape, type or values are read.
        raise _aggregation_error(path, f"raised {described(error)}") from error
    if totals is None:
        raise _aggregation_error(
            path,
            f"returned {shown}: the function must return one finite number or NaN per row, in the shape "
            f"{tuple(uid.shape)}",
        )
    # In a batch with only one prompt group, an aggregation that returns NaN for every row is not an error.
    if len(uid.unique()) > 1 and bool(valid.any()) and bool(totals[valid].isnan().all()):
        raise _aggregation_error(
            path,
            "returned NaN for every row, so nothing is learnt; return a number for the rows to which the "
            "function applies",
        )
    return totals


def _aggregation_error(path: str, what: str) -> RewardError:
    """Return a RewardError for a failed aggregation function of the user; `what` describes the failure.

    The attribute `repairable` of the RewardError is set to the result of `source_name`, which names the aggregation
    function and its file. The user may repair the file that contains the aggregation function, and then resume the run.
    """
    error = RewardError(f"reward.aggregation={path} {what}")
    error.repairable = source_name("reward.aggregation", path)
    return error


def _numbers_by_row(returned: object, rows: int) -> Tensor | None:
    """Convert the result of a user's aggregation function to a float32 tensor (rows,) on the CPU.

    Return None if the result is not a tensor (rows,), or if a value of the tensor is neither NaN nor a real number in
    float32's range.
    """
    if not isinstance(returned, Tensor) or returned.shape != (rows,) or returned.is_complex():
        return None
    if returned.layout is not torch.strided or returned.is_meta:
        return None
    totals = returned.detach().to("cpu", torch.float32)
    return None if bool(totals.isinf().any()) else totals


def truncated_rows(batch: DataProto) -> Tensor:
    """Return for each row whether the engine cut the answer at the length limit: (B,) bool."""
    return torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])


class ShapedScores(NamedTuple):
    """Shaped scores, from which advantages are computed, and row masks, as tensors of the shape (B,).

    Attributes:
        scores: scores after reward shaping; 0 for a row without a score.
        scored: True for each row of the batch that has a score.
        counted: True for each row that counts in the score statistics: the row has a score, and its answer is not
            excluded as truncated.
    """

    scores: Tensor
    scored: Tensor
    counted: Tensor


def in_statistics(batch: DataProto, algorithm: AlgorithmConfig) -> Tensor:
    """Return a bool mask (B,) of the valid rows, except rows whose truncated answer is excluded from the statistics."""
    valid: Tensor = batch.batch["valid"]
    return valid & ~truncated_rows(batch) if algorithm.suppress_truncated or algorithm.exclude_truncated else valid


def shaped_scores(batch: DataProto, config: Config) -> ShapedScores:
    """Compute the shaped, not yet normalised scores of a batch, from which advantages are estimated.

    With `suppress_truncated`, a truncated answer gets the lower of two scores: its own score, and the score that the
    answer would have if every reward function and reward model had given 0. The length penalty is subtracted after the
    scores of truncated answers are lowered, so the length penalty also applies to truncated answers. The length reward,
    multiplied by `group_length_weight`, is added to the score after the length penalty. The length penalty and the
    length reward count only the sampled tokens of an answer and not the tokens of observations. The scores that
    `suppress_truncated` lowers affect only advantage estimators with a critic. Estimators without a critic skip
    truncated answers, because truncated answers are excluded from the score statistics.
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
            sampled_lengths(batch),
            max_response_length=config.rollout.max_response_length,
            buffer=shaping.overlong_buffer,
            factor=shaping.overlong_penalty,
        )
    scored = batch.batch["valid"] & ~totals.isnan()
    if shaping.group_length_weight:
        scores = scores + shaping.group_length_weight * _length_rewards(batch, counted & scored, algorithm)
    return ShapedScores(torch.where(scored, scores, 0.0), scored, counted & scored)


def _length_rewards(batch: DataProto, counted: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Compute the length rewards (B,) from the length of each answer relative to the other answers of its group.

    If no reward function decides whether an answer is correct, the answer gets the length reward 0 and does not affect
    the length rewards of other answers.

    Raises:
        RewardError: no reward function decides whether any answer is correct.
    """
    setting = f"algorithm.reward_shaping.group_length_weight={algorithm.reward_shaping.group_length_weight}"
    correct = correct_rows(batch, counted, algorithm, setting=setting, user="the length reward")
    known = ~batch.batch["successes"].isnan()
    rewards = group_length_reward(sampled_lengths(batch), batch.batch["uid"], correct, counted & known)
    return torch.where(known, rewards, 0.0)


def correct_rows(batch: DataProto, rows: Tensor, algorithm: AlgorithmConfig, *, setting: str, user: str) -> Tensor:
    """Return for each row whether a reward function decides that the answer is correct: (B,) bool.

    With `suppress_truncated`, an answer that was cut at the length limit counts as wrong.

    Args:
        batch: the batch of scored answers.
        rows: mask (B,) of the rows that are checked. For at least one checked row, a reward function must decide
            whether the answer is correct.
        algorithm: section `algorithm` of the config.
        setting: key and value of the config setting that needs the correctness of answers; shown in the error message.
        user: name of the loss term or reward that needs the correctness of answers; shown in the error message.

    Raises:
        RewardError: no reward function decides whether any answer in `rows` is correct.
    """
    right: Tensor = batch.batch["successes"]
    if bool(rows.any()) and bool(right[rows].isnan().all()):
        raise RewardError(
            f"{setting}: {user} depends on which answers are correct, but no reward function decides whether an answer "
            "is correct; set `success` for a reward function, or return RewardResult.success"
        )
    return (right > 0) & ~truncated_rows(batch) if algorithm.suppress_truncated else right > 0


def _shaped(scores: Tensor, shaping: RewardShapingConfig) -> Tensor:
    return shape_scores(scores, bias=shaping.bias, scale=shaping.scale, clip=shaping.clip)


def zero_spread(uid: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    """Return for each row whether all valid rows in its group have the same score: (B,) bool.

    The rows of a group without any valid row count as having the same score. Nothing can be learned from a group whose
    valid rows all have the same score.
    """
    groups, which = uid.unique(return_inverse=True)
    low = torch.full((len(groups),), torch.inf).scatter_reduce(0, which, scores.where(valid, torch.inf), "amin")
    high = torch.full((len(groups),), -torch.inf).scatter_reduce(0, which, scores.where(valid, -torch.inf), "amax")
    return (high <= low)[which]


def flat_rows(batch: DataProto, config: Config) -> Tensor:
    """Return for each row whether all answers in its group have the same outcome: (B,) bool.

    A group whose answers all have the same outcome teaches the policy nothing about the task. The outcome of an answer
    is computed from the scores of the reward functions and models that have `outcome` set; `reward.aggregation` selects
    how these scores are combined. Shaping, normalisation and the length penalty do not affect the outcome, so wrong
    answers of different lengths have the same outcome.

    If `reward.aggregation` names a user's function, the function receives all reward components, and the score that the
    function returns for an answer is the answer's outcome. Some advantage estimators read the scores of each reward
    function and model separately. With an estimator that reads separate scores, two answers have the same outcome only
    if their scores are equal for every function and model that has `outcome` set. `flat_rows` ignores rows that are not
    valid, and rows whose truncated answer is excluded from the score statistics.
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


def place_scores(batch: DataProto, scores: Tensor, config: Config) -> Tensor:
    """Turn the score of each row (B,) into token rewards (N,), whose sum over the row is the score.

    The environment's reward for a turn is multiplied by the weight of environment rewards in the score, and placed on
    the last token of the turn. The score minus the weighted rewards of the turns is placed on the last trained token of
    the row. The whole score is placed on the last trained token if the score is not a weighted sum of rewards. With
    `algorithm.suppress_truncated`, the whole score of a truncated answer is placed on the last trained token, because a
    truncated answer keeps no rewards of its turns.
    """
    weight = _turn_weight(config)
    if "turn_rewards" not in batch or weight == 0:
        return on_last_token(batch, scores)
    mask, lengths = batch.values("response_mask"), batch.lengths("responses")
    row = torch.arange(len(batch)).repeat_interleave(lengths)
    if config.algorithm.suppress_truncated:
        mask = mask & ~truncated_rows(batch)[row]
    of_turns = torch.where(mask, weight * batch.values("turn_rewards"), 0.0)
    total = torch.zeros_like(scores).index_add(0, row, of_turns.to(scores.dtype))
    return of_turns + on_last_token(batch, scores - total)


def _turn_weight(config: Config) -> float:
    """Return the factor by which an environment's reward is multiplied in a row's score.

    Return 0 if a row's score is not a weighted sum of rewards.
    """
    reward, algorithm = config.reward, config.algorithm
    is_sum = reward.aggregation == "sum" and not any(component.gate for component in reward.components)
    if not is_sum or algorithm.reward_normalization.on:
        return 0.0
    weights = [function.weight for function in reward.functions if is_environment_reward(function.path)]
    return sum(weights) * algorithm.reward_shaping.scale


def on_last_token(batch: DataProto, scores: Tensor) -> Tensor:
    """Assign each row's score (B,) to the row's last trained token, and 0 to all other tokens.

    Returns:
        One reward per response token, (N,), in the order of the values of the column `responses`.
    """
    mask, lengths = batch.values("response_mask"), batch.lengths("responses")
    row = torch.arange(len(batch)).repeat_interleave(lengths)
    last = torch.full((len(batch),), -1).scatter_reduce(0, row[mask], mask.nonzero()[:, 0], "amax")
    placed = torch.zeros(len(mask), dtype=scores.dtype)
    placed[last[last >= 0]] = scores[last >= 0]
    return placed
