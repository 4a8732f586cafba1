"""Updates of the reference model during training: each weight is moved towards, or set to, the actor's weight (TR-DPO).

Rank i of the reference holds the shards of the same weights as rank i of the actor. Each rank of the reference updates
only its own shards, so no tensor is gathered. If actor and reference are in one process, the reference reads the
actor's shards in place. If actor and reference are in two processes, the actor's process sends its shards directly to
the reference's process, in groups of limited size.

If the exact KL from the reference model is used (`kl_estimator=full`), each rank of the actor keeps a copy of the
reference model's whole output head. After each update of the reference model, the ranks of the actor gather the
reference model's new output head from the shards of the reference model's ranks.
"""

from workers.cluster.processes import Pending, Role, results
from workers.training.actor import ActorWorker
from workers.training.reference import ReferenceWorker
from workers.training.worker_group import WorkerGroup

_IN_FLIGHT = 2  # Maximum number of shard groups of one rank that Ray's object store holds at a time.


async def refresh_reference(actor: WorkerGroup[ActorWorker], reference: WorkerGroup[ReferenceWorker]) -> None:
    """Update the weights of the reference model once with the current weights of the actor.

    Raises:
        WorkerLost: the process of a rank died or hung. When WorkerLost is raised, some weights of the reference model
            may already have been updated.
    """
    groups, *_ = await actor.call(ActorWorker.shard_groups)
    pairs = list(zip(actor.ranks, reference.ranks, strict=True))
    pending = [one for source, target in pairs for one in _updates(source, target, groups)]
    await results(pending, depends_on=[rank.process for rank in actor.ranks])


def _updates(source: Role[ActorWorker], target: Role[ReferenceWorker], groups: int) -> list[Pending[None]]:
    """Start to update the shards of one rank of the reference model, and return the pending calls.

    One call of `ReferenceWorker.refresh` updates one group of the shards that a rank of the reference model holds.
    """
    to_host, started = source.process is not target.process, list[Pending[None]]()
    for number in range(groups):
        taken = [started[number - _IN_FLIGHT].later] if to_host and number >= _IN_FLIGHT else []
        shards = source.argument_for(target, ActorWorker.shards, number, to_host, *taken)
        started.append(target.start(ReferenceWorker.refresh, number, shards))
    return started


async def send_reference_head(actor: WorkerGroup[ActorWorker], reference: WorkerGroup[ReferenceWorker]) -> None:
    """Replace the actor's copy of the reference model's output head by the reference model's current head.

    Raises:
        WorkerLost: the process of a rank died or hung.
    """
    pending = []
    for target, source in zip(actor.ranks, reference.ranks, strict=True):
        shard = source.argument_for(target, ReferenceWorker.head_shard, source.process is not target.process)
        pending.append(target.start(ActorWorker.set_reference_head, shard))
    await results(pending, depends_on=[rank.process for rank in reference.ranks])
