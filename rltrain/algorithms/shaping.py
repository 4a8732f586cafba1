"""Scores before they become rewards: scale and bounds, the price of length, and rows that were cut off.

Columns are (B,) and have no gradient; float64 stays float64, every narrower type is computed in float32.
"""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float, as_mask


def shape_scores(scores: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None) -> Tensor:
    """(r + bias) scale, then cut to [-clip, clip] unless `clip` is None: (B,) -> (B,)."""
    if scale == 0:
        raise ValueError(f"scale={scale} must not be 0, or every score becomes 0; use 1.0 for no change")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} must be > 0, or every score becomes 0; use None for no bounds")
    shaped = (as_float(scores) + bias) * scale
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, *, max_response_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What to add to the score of a response of this many tokens: (B,) -> (B,), in [-factor, 0].

        0                                     up to L_max - buffer
        factor (L_max - buffer - l) / buffer  down to -factor at L_max
        -factor                               beyond

    DAPO's soft punishment of overlong responses, arXiv 2503.14476 eq. 13, with `factor` 1. l: `lengths`; L_max:
    `max_response_length`; `buffer`: the last tokens before it, in which the price rises.
    """
    if not 1 <= buffer <= max_response_length:
        raise ValueError(
            f"buffer={buffer} must be in [1, max_response_length={max_response_length}]: the price of length rises "
            "over the last so many tokens; use a fifth of max_response_length, say"
        )
    if not factor > 0:
        raise ValueError(f"factor={factor} must be > 0, or length costs nothing; use 1.0, or add no penalty")
    left = (max_response_length - buffer - as_float(lengths)) / buffer
    return factor * left.clamp(-1, 0)


def suppress_truncated(scores: Tensor, truncated: Tensor, nothing: Tensor) -> Tensor:
    """min(r, nothing) where `truncated`, else r: (B,) -> (B,).

    nothing (B,): what the row would score if every reward function gave it 0. So a truncated row earns nothing, and no
    more than its own score, where that is lower: being cut pays neither for a right answer nor for a wrong one.
    `truncated` (B,): by the engine's finish reason, never by length. NaN, no score, stays NaN. Which rows are in a
    statistic, and which tokens are in the loss, is decided elsewhere.
    """
    scores = as_float(scores)
    return torch.where(as_mask(truncated), torch.minimum(scores, as_float(nothing)), scores)
