"""Device meshes: which ranks shard, copy or divide the parameters of a model.

The ranks form a mesh with up to four dimensions:

- `copies`: ranks along this dimension hold copies of the model (HSDP).
- `shards`: FSDP2 shards parameters over these ranks.
- `experts`: ranks that divide the experts of a mixture of experts. FSDP2 shards all other parameters over `shards` and
  `experts` together.
- `tensor`: ranks that divide the matrices of a layer. They process the same rows.

Ranks with consecutive numbers form a `tensor` group, so that they are on one machine, because tensor parallelism
exchanges the most data.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rltrain.settings.schema import PlacementConfig

COPIES, SHARDS, EXPERTS, TENSOR = "copies", "shards", "experts", "tensor"


@dataclass(frozen=True)
class Meshes:
    """Parts of the mesh of all ranks.

    Attributes:
        data: the ranks over which FSDP2 shards and copies parameters; one dimension, or two with copies of the model.
        expert_data: the ranks over which FSDP2 shards and copies the parameters of this rank's experts, or None if the
            ranks do not divide experts.
        experts: the ranks that divide the experts, or None.
        tensor: the ranks that divide the matrices of a layer, or None.
    """

    data: DeviceMesh
    expert_data: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    tensor: DeviceMesh | None = None


def device_meshes(placement: PlacementConfig, device: str, *, tensor_ranks: int) -> Meshes:
    """Create the meshes of the ranks. All training ranks must call `device_meshes` together.

    Args:
        placement: number of ranks for each kind of parallelism.
        device: type of the ranks' devices, `cpu` or `cuda`.
        tensor_ranks: number of ranks that divide the matrices of a layer.
    """
    ranks, experts = dist.get_world_size(), placement.expert_ranks
    shards = placement.shard_ranks or ranks
    assert ranks % shards == 0, "the config's validation requires that `shard_ranks` divides the number of ranks"
    if experts == tensor_ranks == 1:
        if shards == ranks:
            return Meshes(init_device_mesh(device, (ranks,)))
        return Meshes(init_device_mesh(device, (ranks // shards, shards), mesh_dim_names=(COPIES, SHARDS)))
    sizes = (ranks // shards, shards // (experts * tensor_ranks), experts, tensor_ranks)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=(COPIES, SHARDS, EXPERTS, TENSOR))
    copies = (COPIES,) if sizes[0] > 1 else ()
    inner = SHARDS
    if experts > 1:
        inner = "data"
        mesh[SHARDS, EXPERTS]._flatten(inner)
    return Meshes(
        data=mesh[(*copies, inner)],
        expert_data=mesh[(*copies, SHARDS)] if experts > 1 else None,
        experts=mesh[EXPERTS] if experts > 1 else None,
        tensor=mesh[TENSOR] if tensor_ranks > 1 else None,
    )
