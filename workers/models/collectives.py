"""Operations through which gradients flow between ranks, and operations that only change gradients."""

from collections.abc import Callable, Sequence
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
    """Return a tensor with the same values, whose gradients are added up over the ranks of a process group."""

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    result: Tensor = _ChangeGradients.apply(tensor, summed)  # type: ignore[no-untyped-call]
    return result


def gradients_scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor with the same values, whose gradients are multiplied by `factor`."""
    result: Tensor = _ChangeGradients.apply(tensor, lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
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


class _ChangeGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None
