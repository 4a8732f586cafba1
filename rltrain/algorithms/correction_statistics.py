"""Statistics of the importance weights of a whole mini-batch, for the normalisation of an importance-weighted loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked


@dataclass(frozen=True)
class CorrectionStatistics:
    """Statistics of the importance weights and of the tokens that keep their policy loss, over a whole mini-batch.

    Attributes:
        weight_mean: mean importance weight, where dropped tokens and rows count with weight 0. If no token keeps its
            policy loss, `weight_mean` is 1, so that a division by `weight_mean` is always possible.
        num_tokens: number of tokens that keep their policy loss.
        num_sequences: number of rows with at least one token that keeps its policy loss.
    """

    weight_mean: float
    num_tokens: int
    num_sequences: int


def correction_statistics(weights: Tensor, kept: Tensor, response_mask: Tensor, *, level: str) -> CorrectionStatistics:
    """Compute statistics of the importance weights (B, T) and the mask `kept` (B, T) from `rollout_correction`.

    At the level "token", the mean weight is a mean over the N trained tokens. At the levels "sequence" and "geometric",
    all tokens of a row have the same weight, and the mean weight is a mean over the S rows that have a trained token:

        token                mean = sum_bt w_bt / N
        sequence, geometric  mean = sum_b w_b / S

    Importance weights that are divided by their mean are self-normalised: their mean is 1, and a common factor of all
    weights has no effect. With losses l and weights w, the self-normalised estimate of the mean loss is sum(w l) /
    sum(w). The self-normalised estimate is biased but consistent, even if the mean importance weight is not 1 (weighted
    importance sampling; Owen, Monte Carlo theory, 2013, section 9.2).

    The mean weight and the counts of kept tokens and rows must cover the whole mini-batch, over all micro-batches and
    ranks. Values in masked slots are ignored, even NaN.
    """
    trained = as_mask(response_mask)
    kept = as_mask(kept) & trained
    values = masked(weights.detach(), kept).to(torch.float64)
    rows, kept_rows = trained.any(-1), kept.any(-1)
    units = trained.sum() if level == "token" else rows.sum()
    total = values.sum() if level == "token" else values.amax(-1).sum()
    mean = float(total / units) if bool(kept.any()) else 1.0
    return CorrectionStatistics(mean, int(kept.sum()), int(kept_rows.sum()))
