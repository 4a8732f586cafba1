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


def treat_truncated(
    scores: Tensor, valid: Tensor, truncated: Tensor, *, suppress: bool, exclude: bool
) -> tuple[Tensor, Tensor]:
    """Return (scores, valid) as truncated rows are to be seen by every statistic: (B,) each.

    `exclude`: a truncated row is not valid. `suppress`: neither, and its score is 0, whatever it was (NaN too). So
    this comes before anything is normalised. `truncated`: by the engine's finish reason, never by length. Taking the
    row's tokens out of the loss is a matter of the mask and not done here.
    """
    scores, cut, kept = as_float(scores), as_mask(truncated), as_mask(valid)
    if suppress:
        scores = torch.where(cut, torch.zeros_like(scores), scores)
    return scores, kept & ~cut if suppress or exclude else kept
