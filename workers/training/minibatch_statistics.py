"""Statistics of a whole mini-batch, which each rank computes from all ranks' rows before its first micro-batch."""

from rltrain.algorithms import CorrectionStatistics, correction_statistics, rollout_correction
from rltrain.batch.data_proto import DataProto
from rltrain.settings.algorithm_config import CorrectionConfig


def weight_statistics(batch: DataProto, rows: list[int], correction: CorrectionConfig) -> CorrectionStatistics | None:
    """Return the statistics of a mini-batch's importance weights, or None if the settings need no statistics.

    Args:
        batch: the batch that contains the mini-batch, with the columns `old_log_probs` and `rollout_log_probs`.
        rows: indices of all rows of the mini-batch, including the rows of other ranks.
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
