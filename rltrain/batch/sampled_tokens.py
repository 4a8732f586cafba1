"""Functions that find which response tokens of a batch the policy sampled and which belong to observations."""

import torch
from torch import Tensor

from rltrain.batch.data_proto import DataProto
from rltrain.batch.trajectory import NOT_SAMPLED


def sampled_tokens(batch: DataProto) -> Tensor:
    """Return a bool tensor (N,) that is True at the response tokens that the policy sampled.

    Unlike `response_mask`, the result of `sampled_tokens` is also True for the sampled tokens of rows that are not
    trained on.
    """
    return batch.values("policy_version") != NOT_SAMPLED


def sampled_lengths(batch: DataProto) -> Tensor:
    """Return the number of sampled response tokens in each row, as an int64 tensor (B,)."""
    counts = sampled_tokens(batch).cumsum(0)
    return torch.cat([counts.new_zeros(1), counts])[batch.offsets("policy_version")].diff()
