"""Gather the policy's full weights from its ranks in float32, with the LoRA adapters merged."""

import asyncio

from torch import Tensor, nn

from workers.cluster.processes import LocalProcess
from workers.cluster.worker_process import Host
from workers.models.adapter_weights import merge
from workers.models.fsdp import full
from workers.models.lora import adapters_of, plain_parameters
from workers.training.worker_group import WorkerGroup


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter as a full tensor, not sharded, with the LoRA adapters merged.

    The function is a collective: all ranks of the model must call it.
    """
    adapters, found = adapters_of(model), {}
    for name, parameter in plain_parameters(model).items():
        found[name] = full(parameter).clone()
        if name in adapters:
            adapter = adapters[name]
            found[name] = merge(found[name], full(adapter.b.detach()), full(adapter.a.detach()), adapter.scale)
    return found


async def weights_of(actor: WorkerGroup) -> dict[str, Tensor]:
    """Return the actor's full weights, gathered on rank 0."""

    def on_a_rank(host: Host, role: str) -> dict[str, Tensor]:
        return merged_weights(host.roles[role].model)

    ranks = [(rank.process, rank.name) for rank in actor.ranks]
    if isinstance(ranks[0][0], LocalProcess):
        return on_a_rank(ranks[0][0].host, ranks[0][1])
    calls = [process.actor.__ray_call__.remote(on_a_rank, name) for process, name in ranks]
    return (await asyncio.gather(*(asyncio.wrap_future(call.future()) for call in calls)))[0]
