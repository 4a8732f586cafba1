"""Scores as the algorithm sees them: shaped one by one, and without the answers that are in no statistic.

What the reward functions said stays in the column `scores`; here it becomes what advantages are made of.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rltrain.algorithms import combine_rewards, overlong_penalty, required_columns, shape_scores, treat_truncated
from rltrain.errors import RewardError
from rltrain.protocol import DataProto
from rltrain.reward_config import RewardConfig, RewardFunctionConfig, RewardModelConfig
from rltrain.rewards.loading import described, load_function
from rltrain.schema import Config


def weighted_sum(matrix: Tensor, components: Sequence[RewardFunctionConfig | RewardModelConfig]) -> Tensor:
    """(B, K) -> (B,), gates applied; NaN where no component applies. Raises RewardError beyond float32's range."""
    weights, gates = [c.weight for c in components], [c.gate for c in components]
    return _finite(combine_rewards(matrix, weights=weights, gates=gates), matrix)


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


def combined_scores(batch: DataProto, reward: RewardConfig) -> tuple[Tensor, Tensor]:
    """(scores, valid) of each row (B,), functions and models combined as `reward.aggregation` says.

    Raises RewardError when a function of the user's returns something else than a number a row.
    """
    valid = batch.batch["valid"]
    if reward.aggregation == "sum":
        return batch.batch["scores"].float(), valid
    components, uid = batch.batch["reward_components"], batch.batch["uid"]
    weights, gates = [c.weight for c in reward.components], [c.gate for c in reward.components]
    if reward.aggregation == "normalize_then_sum":
        totals = _finite(
            combine_rewards(components, uid, valid, weights=weights, gates=gates, aggregation="normalize_then_sum"),
            components,
        )
    else:
        totals = _users_aggregation(reward.aggregation, components, uid, valid, weights)
    return totals.nan_to_num(0.0), valid & ~totals.isnan()


@functools.cache
def _aggregation(path: str) -> Callable[..., Any]:
    """The user's function as it was when it was first called: an edit of its file is for another run."""
    return load_function(path)


def _users_aggregation(path: str, components: Tensor, uid: Tensor, valid: Tensor, weights: list[float]) -> Tensor:
    where = f"reward.aggregation={path}"
    own = {"components": components.clone(), "uid": uid.clone(), "valid": valid.clone()}  # it may change them in place
    try:
        totals = _aggregation(path)(**own, weights=torch.tensor(weights))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit would end the run without a word
        raise RewardError(f"{where} raised {described(error)}") from error
    if not _is_a_number_a_row(totals, uid):
        shown = tuple(totals.shape) if isinstance(totals, Tensor) else type(totals).__name__
        shown = f"{shown} of {totals.dtype}" if isinstance(totals, Tensor) and totals.is_complex() else shown
        raise RewardError(f"{where} returned {shown}: one finite number a row, or NaN, is wanted, {tuple(uid.shape)}")
    totals = totals.detach().float()
    if (
        len(uid.unique()) > 1 and bool(valid.any()) and bool(totals[valid].isnan().all())
    ):  # one group may well have none
        raise RewardError(f"{where} returned NaN for every row, so nothing is learnt; return a number where it applies")
    return totals


def _is_a_number_a_row(totals: object, uid: Tensor) -> bool:
    """Whether this is (B,) of real numbers in float32's range, or NaN."""
    if not isinstance(totals, Tensor) or totals.shape != uid.shape or totals.is_complex():
        return False
    return not bool(totals.detach().float().isinf().any())


def truncated_rows(batch: DataProto) -> Tensor:
    """(B,) bool: the engine cut the answer at the length limit."""
    return torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])


def shaped_scores(batch: DataProto, config: Config) -> tuple[Tensor, Tensor]:
    """(scores, valid) of each row (B,): shaped, and False where the row is in no statistic.

    A cut answer whose task reward is suppressed keeps its length penalty, which reaches the estimators that look at
    rows outside of the statistics too (gae).
    """
    algorithm, shaping = config.algorithm, config.algorithm.reward_shaping
    scores, scored = combined_scores(batch, config.reward)
    scores = shape_scores(scores, bias=shaping.bias, scale=shaping.scale, clip=shaping.clip)
    scores, valid = treat_truncated(
        scores, scored, truncated_rows(batch), suppress=algorithm.suppress_truncated,
        exclude=algorithm.exclude_truncated,
    )  # fmt: skip
    if shaping.overlong_buffer:
        scores = scores + overlong_penalty(
            batch.lengths("responses"), max_response_length=config.rollout.max_response_length,
            buffer=shaping.overlong_buffer, factor=shaping.overlong_penalty,
        )  # fmt: skip
    return torch.where(batch.batch["valid"], scores, 0.0), valid


def zero_spread(uid: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    """(B,) bool: all valid rows of this row's group have one score, or there is none; nothing can be learnt from it."""
    groups, which = uid.unique(return_inverse=True)
    low = torch.full((len(groups),), torch.inf).scatter_reduce(0, which, scores.where(valid, torch.inf), "amin")
    high = torch.full((len(groups),), -torch.inf).scatter_reduce(0, which, scores.where(valid, -torch.inf), "amax")
    return (high <= low)[which]


def flat_rows(batch: DataProto, config: Config) -> Tensor:
    """(B,) bool: the row's group teaches nothing, since its scores have no spread.

    For an estimator that reads the reward functions one by one, none of them may have any.
    """
    uid, (scores, valid) = batch.batch["uid"], shaped_scores(batch, config)
    algorithm, components = config.algorithm, batch.batch["reward_components"]
    if "reward_components" not in required_columns(algorithm.advantage_estimator, algorithm.loss_mode):
        return zero_spread(uid, scores, valid)
    each = [zero_spread(uid, column, valid & ~column.isnan()) for column in components.unbind(1)]
    return torch.stack(each).all(0)


def on_last_token(batch: DataProto, scores: Tensor) -> Tensor:
    """Each row's score (B,) on the last of its trained tokens, 0 elsewhere: (N,), in the rows of `responses`."""
    mask, lengths = batch.values("response_mask"), batch.lengths("responses")
    row = torch.arange(len(batch)).repeat_interleave(lengths)
    last = torch.full((len(batch),), -1).scatter_reduce(0, row[mask], mask.nonzero()[:, 0], "amax")
    placed = torch.zeros(len(mask), dtype=scores.dtype)
    placed[last[last >= 0]] = scores[last >= 0]
    return placed
