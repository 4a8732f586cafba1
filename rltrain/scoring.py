"""Scores as the algorithm sees them: shaped one by one, and without the answers that are in no statistic.

What the reward functions said stays in the column `scores`; here it becomes what advantages are made of.
"""

import torch
from torch import Tensor

from rltrain.algorithms import overlong_penalty, required_columns, shape_scores, treat_truncated
from rltrain.protocol import DataProto
from rltrain.schema import Config


def truncated_rows(batch: DataProto) -> Tensor:
    """(B,) bool: the engine cut the answer at the length limit."""
    return torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])


def shaped_scores(batch: DataProto, config: Config) -> tuple[Tensor, Tensor]:
    """(scores, valid) of each row (B,): shaped, and False where the row is in no statistic.

    A cut answer whose task reward is suppressed keeps its length penalty, which reaches the estimators that look at
    rows outside of the statistics too (gae).
    """
    algorithm, shaping = config.algorithm, config.algorithm.reward_shaping
    scores = shape_scores(batch.batch["scores"].float(), bias=shaping.bias, scale=shaping.scale, clip=shaping.clip)
    scores, valid = treat_truncated(
        scores, batch.batch["valid"], truncated_rows(batch), suppress=algorithm.suppress_truncated,
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
