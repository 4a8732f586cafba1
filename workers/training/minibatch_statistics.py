"""Statistics and token selections of whole mini-batches, which the driver computes because no rank has all rows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rltrain.algorithms import (
    CorrectionStatistics,
    columns_of,
    correction_statistics,
    loss_functions,
    own_knobs,
    rollout_correction,
)
from rltrain.batch.data_proto import DataProto
from rltrain.settings.algorithm_config import AlgorithmConfig, CorrectionConfig


def with_selected(
    batch: DataProto, minibatches: Sequence[Sequence[int]], per_epoch: int, algorithm: AlgorithmConfig
) -> DataProto:
    """Return the batch with the column `selected` if the loss has a token selector, otherwise the unchanged batch.

    Args:
        batch: the training step's batch of sampled answers.
        minibatches: row indices of each mini-batch of the update, in training order.
        per_epoch: number of mini-batches of one epoch. Epoch e has the mini-batches e * per_epoch to
            (e + 1) * per_epoch - 1, which have no row in common.
        algorithm: settings that name the loss and its token selector.

    Returns:
        A batch whose bool column `selected` (N, E) has one value for each of N response tokens and E epochs.
        `selected[:, e]` is True for the tokens that the token selector selects in the mini-batches of epoch e.
    """
    selectors = loss_functions(algorithm.loss_mode)[1:]
    if not selectors:
        return batch
    read = batch.select({"responses", *columns_of(selectors[0])})
    epochs = [minibatches[start : start + per_epoch] for start in range(0, len(minibatches), per_epoch)]
    selected = torch.zeros(len(batch.values("responses")), max(len(epochs), 1), dtype=torch.bool)
    numbers = batch.select(["responses"]).with_values("responses", number=torch.arange(len(selected)))
    for epoch, some in enumerate(epochs):
        for rows in filter(None, some):
            selected[numbers[rows].values("number"), epoch] = _selected(read[rows], selectors[0], algorithm)
    return batch.with_values("responses", selected=selected)


def _selected(minibatch: DataProto, selector: Callable[..., Tensor], algorithm: AlgorithmConfig) -> Tensor:
    """Return which response tokens (N,) of a mini-batch the token selector selects."""
    columns = (minibatch.padded(name) for name in columns_of(selector))
    return selector(*columns, **own_knobs(selector, algorithm.loss))[minibatch.padding_mask("responses")]


def in_epoch(batch: DataProto, epoch: int) -> DataProto:
    """Return the batch with the column `selected` (N, E) replaced by the values (N,) of one epoch.

    A batch without the column `selected` is returned unchanged.
    """
    return batch.with_values("responses", selected=batch.values("selected")[:, epoch]) if "selected" in batch else batch


def weight_statistics(batch: DataProto, rows: list[int], correction: CorrectionConfig) -> CorrectionStatistics | None:
    """Return the statistics of a mini-batch's importance weights, or None if the settings need no statistics.

    Args:
        batch: the batch that contains the mini-batch, with the columns `old_log_probs` and `rollout_log_probs`.
        rows: indices of all rows of the mini-batch.
        correction: settings of the importance weights.
    """
    if not correction.needs_statistics:
        return None
    if not rows:
        return CorrectionStatistics(1.0, 0, 0)
    part = batch.select(["responses", "response_mask", "old_log_probs", "rollout_log_probs"])[rows]
    mask = part.padded("response_mask")
    policies = part.padded("old_log_probs"), part.padded("rollout_log_probs")
    weights, kept, _ = rollout_correction(*policies, mask, **correction.weighting)
    return correction_statistics(weights, kept, mask, level=correction.weighting["level"])
