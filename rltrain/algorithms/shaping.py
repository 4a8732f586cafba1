"""Transformations of scores into rewards: scaling and clipping, the length penalty, and truncated responses.

All tensors have the shape (B,) and have no gradient. The functions of the module `shaping` compute in float64 if their
inputs are float64, and in float32 if their inputs have a narrower dtype.
"""

import torch
from torch import Tensor

from rltrain.algorithms.normalization import group_index
from rltrain.algorithms.ratio import as_float, as_mask, masked


def shape_scores(scores: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None) -> Tensor:
    """Compute (r + bias) * scale for scores r, clipped to [-clip, clip] unless `clip` is None: (B,) -> (B,).

    Raises:
        ValueError: if `scale` is 0 or `clip` is not above 0.
    """
    if scale == 0:
        raise ValueError(f"scale={scale} must not be 0, or every score becomes 0; use 1.0 for no change")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} must be > 0, or every score becomes 0; use None for no bounds")
    shaped = (as_float(scores) + bias) * scale
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, *, max_response_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Compute the penalty to add to the score of a response of the given length: (B,) -> (B,), in [-factor, 0].

        0                                     where l <= L_max - buffer
        factor (L_max - buffer - l) / buffer  where L_max - buffer < l <= L_max
        -factor                               where l > L_max

    With `factor` 1, the penalty is DAPO's soft punishment of overlong responses, arXiv 2503.14476 eq. 13. `lengths`
    holds the lengths l in tokens, and L_max is `max_response_length`. `buffer` is the number of tokens before L_max
    over which the penalty grows.

    Raises:
        ValueError: if `buffer` is not in [1, max_response_length] or `factor` is not above 0.
    """
    if not 1 <= buffer <= max_response_length:
        raise ValueError(
            f"buffer={buffer} must be in [1, max_response_length={max_response_length}]: the penalty grows over the "
            "last `buffer` tokens; use a fifth of max_response_length, for example"
        )
    if not factor > 0:
        raise ValueError(f"factor={factor} must be > 0, or long responses get no penalty; use 1.0, for example")
    left = (max_response_length - buffer - as_float(lengths)) / buffer
    return factor * left.clamp(-1, 0)


def group_length_reward(lengths: Tensor, uid: Tensor, correct: Tensor, counted: Tensor) -> Tensor:
    """Compute the length reward of Kimi k1.5 for each row, arXiv 2501.12599 (length penalty): (B,) -> (B,).

        lambda            if the answer is correct            lambda = 0.5 - (l - min_l) / (max_l - min_l)
        min(0, lambda)    if the answer is wrong

    `lengths` holds the length l of each answer, in tokens. The bounds min_l and max_l are the lengths of the shortest
    and of the longest counted answer of the group (the rows with the same `uid`). Short correct answers gain up to 0.5,
    long answers lose up to 0.5, and a wrong answer never gains from its length. If all counted answers of a group have
    the same length, or if the group has fewer than two counted answers, all rows of the group get 0.

    A row that is not `counted` (B,), such as a truncated answer that is excluded from the statistics, does not affect
    min_l or max_l. The length of a row that is not counted can lie outside of [min_l, max_l], so lambda is clamped to
    [-0.5, 0.5].
    """
    counted, group, lengths = as_mask(counted), group_index(uid), as_float(lengths)
    empty, inf = torch.zeros_like(lengths), torch.inf
    least = (empty + inf).scatter_reduce(0, group, lengths.where(counted, empty + inf), "amin")[group]
    most = (empty - inf).scatter_reduce(0, group, lengths.where(counted, empty - inf), "amax")[group]
    varied = most > least
    share = masked(lengths - least, varied) / (most - least).where(varied, empty + 1)
    reward = masked((0.5 - share).clamp(-0.5, 0.5), varied)
    return torch.where(as_mask(correct), reward, reward.clamp(max=0))


def suppress_truncated(scores: Tensor, truncated: Tensor, nothing: Tensor) -> Tensor:
    """Compute min(score, `nothing`) where `truncated` is True, else the score: (B,) -> (B,).

    `nothing` (B,) is the score that a row would have if every reward function gave the row 0. A truncated row gets the
    lower of two scores: its own score, and the score for rewards of 0. Truncation never improves the score of an
    answer, whether the answer is right or wrong.

    `truncated` (B,) must come from the engine's finish reason, not from the length of the answer. A score of NaN, which
    means that the row has no score, stays NaN. `suppress_truncated` changes only the scores of truncated rows. Other
    functions decide whether truncated rows count in the score statistics, and whether their tokens count in the loss.
    """
    scores = as_float(scores)
    return torch.where(as_mask(truncated), torch.minimum(scores, as_float(nothing)), scores)
