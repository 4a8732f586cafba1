"""Collective operations, and other operations that change gradients on their way back."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchanged(
    tensor: Tensor, group: Any, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Tensor:
    """Send parts of the first dimension to the ranks of a group, and return the parts that come from the ranks.

    The backward pass sends gradients in the opposite direction.

    Args:
        tensor: the parts for all ranks, in the order of the ranks.
        group: the process group.
        sent: length of the part for each rank. If it is None, all parts have the same length, and so have the received
            parts.
        received: length of the part that comes from each rank.
    """
    result: Tensor = _AllToAll.apply(tensor, group, sent, received)  # type: ignore[no-untyped-call]
    return result


def gradients_summed(tensor: Tensor, group: Any) -> Tensor:
    """Return a tensor unchanged. In the backward pass, its gradients are added up over the ranks of a group."""
    result: Tensor = _SumGradients.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def gradients_scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor unchanged. In the backward pass, its gradients are multiplied by `factor`."""
    result: Tensor = _ScaleGradients.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: Any, sent: Sequence[int] | None, received: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(tensor, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _all_to_all(tensor: Tensor, group: Any, sent: Sequence[int] | None, received: Sequence[int] | None) -> Tensor:
    length = len(tensor) if received is None else sum(received)
    result = tensor.new_empty(length, *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
    return result


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _ScaleGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None
