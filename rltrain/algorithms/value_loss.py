"""The critic's value loss."""

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked, metric_sum


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, clip_range_value: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped squared error of the critic's values.

        l = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    V are the critic's current values, V_old are the values that were computed when the batch was collected, and R are
    the returns. The bound c is the knob `clip_range_value`; with c = inf, values are not clipped. The squared error
    comes from arXiv 1707.06347 eq. 9. The clipping of the values comes from the code of the authors of arXiv 1707.06347
    (see arXiv 2005.12729), not from the paper itself. Of the tensor arguments, only `values` gets a
    gradient. The gradient is 0 where the squared error of the clipped value is larger than the squared error of the
    unclipped value.

    All tensors have the shape (B, T). Masked slots have loss 0 and no gradient. `value_loss` returns the metric sums
    `clip_fraction`, `value_mean` and `return_mean`.

    Raises:
        ValueError: if `clip_range_value` is not above 0.
    """
    if not clip_range_value > 0:
        raise ValueError(
            f"clip_range_value={clip_range_value} must be > 0, or every change of a value is clipped; use inf for no "
            "clipping"
        )
    mask = as_mask(response_mask)
    new, old, target = masked(values, mask), masked(old_values.detach(), mask), masked(returns.detach(), mask)
    change = new - old
    beyond = change.abs() > clip_range_value
    # Where a value is inside the clip range, use `new` itself, because old + (new - old) can differ from `new` by
    # rounding. The metric `clip_fraction` counts a value as clipped if the error of the clipped value is larger than
    # the error of the unclipped value, so the two errors must be bitwise equal inside the clip range.
    clipped = torch.where(beyond, old + change.clamp(-clip_range_value, clip_range_value), new)
    error, clipped_error = (new - target).square(), (clipped - target).square()
    metrics = {
        "clip_fraction": metric_sum(clipped_error > error, mask),
        "value_mean": metric_sum(new, mask),
        "return_mean": metric_sum(target, mask),
    }
    return torch.maximum(error, clipped_error) / 2, metrics
