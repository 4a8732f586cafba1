"""Functions that divide a model's weights into groups, gather sharded weights, and average weights of two models."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Maximum number of elements in a group of weights, counted before sharding. A weight with more than `GROUP_NUMBERS`
# elements forms its own group.
GROUP_NUMBERS = 1 << 24


def weight_groups(model: nn.Module) -> list[list[str]]:
    """Divide the names of a model's parameters, in order, into groups with at most `GROUP_NUMBERS` parameter elements.

    A parameter with more than `GROUP_NUMBERS` elements forms its own group.

    The groups depend only on the unsharded shapes of the parameters, so the groups are the same on all ranks and in all
    roles that use the same model.
    """
    groups: list[list[str]] = []
    room = 0
    for name, parameter in model.named_parameters():
        if not groups or parameter.numel() > room:
            groups.append([])
            room = GROUP_NUMBERS
        groups[-1].append(name)
        room -= parameter.numel()
    return groups


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, and any other tensor unchanged.

    The tensor that `local_shard` returns shares its memory with `tensor`.
    """
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def whole_of(shard: Tensor, like: Tensor) -> Tensor:
    """Gather a whole tensor from the shards of all ranks; `like` has the shape and the sharding of the whole tensor.

    If `like` is sharded, all ranks must call `whole_of`. If `like` is not sharded, `shard` is the whole tensor.
    """
    if not isinstance(like, DTensor):
        return shard
    sharded = DTensor.from_local(shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return sharded.full_tensor()


@torch.no_grad()
def move_weights(targets: Sequence[Tensor], sources: Sequence[Tensor], coef: float) -> None:
    """Replace each target t in place by a * s + (1 - a) * t, where a = `coef` is in (0, 1] and s is the source.

    If `coef` is 1, each target tensor becomes a copy of its source tensor, rounded to the target's dtype. If `coef` is
    below 1, every target tensor must be float32 or float64, because bfloat16 would round small updates away.
    """
    for target, source in zip(targets, sources, strict=True):
        if coef == 1:
            target.copy_(source)
        else:
            assert target.dtype in (torch.float32, torch.float64), (
                f"{target.dtype} would round the small updates of a moving average away; use float32 or float64"
            )
            target.lerp_(source.to(target.device, target.dtype), coef)
