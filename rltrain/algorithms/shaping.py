"""Transformations of scores into rewards: scaling and clipping, the length penalty, and truncated responses.

All tensors are (B,) and have no gradient. The functions of the module `shaping` compute in float64 if their inputs are
float64, and in float32 if they are narrower.
"""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask


def shape_scores(scores: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None) -> Tensor:
    """Compute (r + bias) scale, clipped to [-clip, clip] unless `clip` is None: (B,) -> (B,).

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

        0                                     up to L_max - buffer
        factor (L_max - buffer - l) / buffer  down to -factor at L_max
        -factor                               beyond

    With `factor` 1, the penalty is DAPO's soft punishment of overlong responses, arXiv 2503.14476 eq. 13. l is
    `lengths`, in tokens, and L_max is `max_response_length`. `buffer` is the number of last tokens before L_max over
    which the penalty grows.

    Raises:
        ValueError: if `buffer` is not in [1, max_response_length] or `factor` is not above 0.
    """
    if not 1 <= buffer <= max_response_length:
        raise ValueError(
            f"buffer={buffer} must be in [1, max_response_length={max_response_length}]: the penalty grows over the "
            "last `buffer` tokens; use a fifth of max_response_length, for example"
        )
    if not factor > 0:
        raise ValueError(f"factor={factor} must be > 0, or long responses get no penalty; use 1.0, or add no penalty")
    left = (max_response_length - buffer - as_float(lengths)) / buffer
    return factor * left.clamp(-1, 0)


def suppress_truncated(scores: Tensor, truncated: Tensor, nothing: Tensor) -> Tensor:
    """Compute min(r, nothing) where `truncated`, else r: (B,) -> (B,).

    `nothing` (B,) is the score that the row would have if every reward function gave it 0. A truncated row gets the
    score `nothing`, or its own score if its own score is lower. Truncation never improves the score of an answer,
    whether the answer is right or wrong.

    `truncated` (B,) must come from the engine's finish reason, never from the length. A score of NaN, which means that
    the row has no score, stays NaN. `suppress_truncated` does not decide which rows enter the statistics or which
    tokens enter the loss.
    """
    scores = as_float(scores)
    return torch.where(as_mask(truncated), torch.minimum(scores, as_float(nothing)), scores)
