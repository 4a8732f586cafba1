"""Expert parallelism: ranks divide the experts of a mixture of experts (GShard, arXiv:2006.16668).

Each rank processes its own rows, and holds an equal part of the experts of each layer. A layer sends each token to the
ranks that hold the token's experts, computes the experts there, and sends the results back.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from rltrain.algorithms.ratio import as_float
from workers.models.collectives import exchanged, gradients_scaled
from workers.models.tensor_parallel import replaced_parameters


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the experts of all layers: modules whose parameters have one entry per expert."""
    for module in model.modules():
        count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
        # The weight of a router is a matrix with one row per expert, and is not divided.
        if isinstance(count, int) and any(one.ndim > 2 for one in own) and all(len(one) == count for one in own):
            yield module


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of all layers over the ranks of `mesh`, in place, and return the modules of the experts."""
    found = list(expert_modules(model))
    for module in found:
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.num_experts = int(module.num_experts) // mesh.size()  # type: ignore[arg-type,assignment]
        _dispatch(module, mesh)
    return found


def _dispatch(module: Any, mesh: DeviceMesh) -> None:
    """Let the experts of a layer compute the tokens of all ranks of `mesh`, by sending tokens to the experts' ranks."""
    experts, group, size, count = module.forward, mesh.get_group(), mesh.size(), module.num_experts

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts of n tokens, and return the weighted sum (n, H) of the outputs for each token.

        Args:
            hidden: (n, H) hidden states of the tokens.
            chosen: (n, k) numbers of the k experts of each token.
            weights: (n, k) weights of the experts' outputs.
        """
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        tokens = order // chosen.size(1)
        sent = torch.bincount(flat // count, minlength=size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        gives, takes = sent.tolist(), received.tolist()
        numbers = exchanged(flat[order] % count, group, gives, takes)
        arrived = exchanged(hidden[tokens], group, gives, takes)
        # FSDP divides the gradients of experts by a number of ranks that is `size` times smaller than for other
        # parameters, although the experts compute the tokens of all ranks of `mesh`. The factor 1 / `size` makes up
        # for this.
        parameters = module.named_parameters(recurse=False)
        own = {name: gradients_scaled(_local(one), 1 / size) for name, one in parameters}
        with replaced_parameters(module, own):
            computed = experts(arrived, numbers[:, None], torch.ones_like(numbers[:, None], dtype=weights.dtype))
        if not len(numbers):
            # All ranks must take part in the backward pass, also a rank whose experts computed no token.
            computed = arrived * sum(0 * tensor.sum() for tensor in own.values())
        returned = exchanged(computed, group, takes, gives)
        of_tokens = returned[order.argsort()].unflatten(0, chosen.shape)  # (n, k, H)
        total: Tensor = (as_float(of_tokens) * weights[..., None]).sum(1)
        return total.to(hidden.dtype)

    module.forward = forward


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
