"""The critic's loss."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked, metric_sum


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, clip_range_value: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the values.

        l = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    V: values now; V_old: values when the batch was made; R: returns; c: `clip_range_value`, inf for no clipping. The
    squared error is that of arXiv 1707.06347 eq. 9; the clipping comes with that paper's code (arXiv 2005.12729).
    Gradient goes to `values` alone, and is 0 where the clipped branch is the larger.

    All (B, T); masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction`, `value_mean`, `return_mean`.
    """
    if not clip_range_value > 0:
        raise ValueError(f"clip_range_value={clip_range_value} must be > 0, or no value moves; use inf for no clipping")
    mask = as_mask(response_mask)
    new, old, target = masked(values, mask), masked(old_values.detach(), mask), masked(returns.detach(), mask)
    change = new - old
    beyond = change.abs() > clip_range_value
    # Inside the range both branches are the same number, bit for bit: old + (new - old) would round.
    clipped = torch.where(beyond, old + change.clamp(-clip_range_value, clip_range_value), new)
    error, clipped_error = (new - target).square(), (clipped - target).square()
    metrics = {
        "clip_fraction": metric_sum(clipped_error > error, mask),
        "value_mean": metric_sum(new, mask),
        "return_mean": metric_sum(target, mask),
    }
    return torch.maximum(error, clipped_error) / 2, metrics
