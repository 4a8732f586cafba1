"""Plan of a run's bundles: the CPUs and GPUs that each training rank and each engine needs, and the node that has them.

A bundle is a set of CPUs and GPUs of one node, which Ray reserves for one process, or for a training rank and an engine
that share a device. The functions of this module are pure: they know nodes only by the amounts of resources that the
nodes have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rltrain.settings.schema import Config

TRAINING_RANK, REPLICA, ENVIRONMENT = "training rank", "rollout replica", "environment worker"
# Remedy, in messages, for a bundle without room.
MORE_ROOM = "use fewer ranks or engines, a smaller rollout.vllm.tensor_parallel_size, or more or larger nodes"
_NAMED = 4  # A message names at most 4 nodes.
_DIGITS = 4  # Ray counts resources in units of 1/10,000.
Resources = Mapping[str, float]


@dataclass(frozen=True)
class Bundle:
    """CPUs and GPUs of one node that are reserved together.

    Attributes:
        workers: Names of the processes that use the bundle, such as "training rank 0".
        resources: Maps Ray's resources, such as "GPU", to the amounts that the bundle reserves.
    """

    workers: tuple[str, ...]
    resources: Resources


@dataclass(frozen=True)
class BundleGroup:
    """Neighbouring bundles that should be on one node.

    Attributes:
        bundles: The bundles, in the order of the ranks.
        sizes: If the group is too large for every node, it is divided into parts. `sizes` lists the numbers of bundles
            of which a part may be a multiple, in descending order. The last size is 1.
    """

    bundles: tuple[Bundle, ...]
    sizes: tuple[int, ...] = (1,)


class NoRoomError(Exception):
    """A bundle fits on no node.

    Args:
        bundle: The bundle for which there is no room.
        left: Maps the id of each node to the resources that the other bundles leave there.
    """

    def __init__(self, bundle: Bundle, left: Mapping[str, Resources]) -> None:
        super().__init__(bundle, left)
        self.bundle, self.left = bundle, left

    def described(self, names: Mapping[str, str]) -> str:
        """Return a text that says what the bundle needs, and what each node lacks.

        Args:
            names: Maps the id of each node to the name of the node in messages.
        """
        needed = self.bundle.resources
        lacks = {
            node: {
                name: amount - left.get(name, 0.0) for name, amount in needed.items() if amount > left.get(name, 0.0)
            }
            for node, left in self.left.items()
        }
        nearest = sorted(lacks, key=lambda node: sum(lacks[node].values()))
        parts = [f"{names[node]} lacks {_amounts(lacks[node])}" for node in nearest[:_NAMED]]
        if len(nearest) > _NAMED:
            parts.append(f"and {len(nearest) - _NAMED} more nodes lack as much or more")
        workers = self.bundle.workers
        return (
            f"{' and '.join(workers)} need{'s' if len(workers) == 1 else ''} {_amounts(needed)} on one node; beside "
            f"the other ranks and engines, {', '.join(parts) or 'there is no node'}"
        )


def worker_resources(config: Config, name: str, *, on_gpus: bool) -> dict[str, float]:
    """Return the CPUs and GPUs that Ray reserves for one process.

    Args:
        config: The run's whole config.
        name: Kind of the process, such as "training rank" or "rollout replica".
        on_gpus: Whether the nodes have GPUs.
    """
    # If an engine and a training rank share a GPU, the engine and the training rank each request half of the GPU.
    share = 0.5 if config.placement.share_ranks else 1.0
    processes = config.rollout.shards if name == REPLICA and not on_gpus else 1
    reserved = {"CPU": 0.0 if config.placement.address == "local" else share * processes}
    if on_gpus and name != ENVIRONMENT:
        reserved["GPU"] = share * (config.rollout.devices if name == REPLICA else 1)
    return reserved


def bundle_groups(config: Config, roles: Sequence[str], *, on_gpus: bool) -> list[BundleGroup]:
    """Return the bundles of all training ranks and engines that the run needs.

    The ranks that share the tokens of a sequence, or one copy of a model, are neighbours in a group. Optional engines
    have no bundle, because they take only resources that are free. A process that needs no resources has no bundle
    either.

    Args:
        config: The run's whole config.
        roles: The roles of the training ranks, such as "actor".
        on_gpus: Whether the nodes have GPUs.
    """
    placement = config.placement
    ranks, engines = placement.actor_ranks, placement.rollout_replicas
    if placement.share_ranks:
        pairs = [
            _bundle(config, [TRAINING_RANK] * (number < ranks) + [REPLICA] * (number < engines), number, on_gpus)
            for number in range(max(ranks, engines))
        ]
        found = [*_groups_of_ranks(config, pairs[:ranks]), *(BundleGroup((one,)) for one in pairs[ranks:])]
    else:
        found = [BundleGroup((_bundle(config, [REPLICA], number, on_gpus),)) for number in range(engines)]
        for role in roles:
            own = [_bundle(config, [f"{role} rank"], number, on_gpus) for number in range(ranks)]
            found += _groups_of_ranks(config, own)
    return [group for group in found if all(bundle.resources for bundle in group.bundles)]


def _bundle(config: Config, kinds: Sequence[str], number: int, on_gpus: bool) -> Bundle:
    """Return the bundle of the processes with the number `number`, one of each kind.

    A GPU that processes share is reserved whole, also where only one of the processes exists.
    """
    needs = [worker_resources(config, kind, on_gpus=on_gpus) for kind in kinds]
    total = {name: sum(one.get(name, 0.0) for one in needs) for name in ("GPU", "CPU")}
    if on_gpus and config.placement.share_ranks:
        total = {name: 2 * max(one.get(name, 0.0) for one in needs) for name in total}
    return Bundle(
        tuple(f"{kind} {number}" for kind in kinds), {name: amount for name, amount in total.items() if amount}
    )


def _groups_of_ranks(config: Config, bundles: Sequence[Bundle]) -> list[BundleGroup]:
    """Divide the bundles of a role's ranks into groups of ranks that share a model, its layers, or a sequence."""
    placement = config.placement
    shard, tensor = placement.shard_ranks or placement.actor_ranks, placement.tensor_ranks
    wanted = sorted({shard, placement.ranks_per_pack, tensor * placement.expert_ranks, tensor, 1}, reverse=True)
    sizes = tuple(size for number, size in enumerate(wanted) if all(one % size == 0 for one in wanted[:number]))
    return [BundleGroup(tuple(bundles[first : first + sizes[0]]), sizes) for first in range(0, len(bundles), sizes[0])]


@dataclass(frozen=True)
class _Block:
    """Neighbouring bundles of a group that have no node yet.

    Attributes:
        first: Index of the first bundle among the bundles of all groups.
        bundles: The bundles.
        sizes: See `BundleGroup`.
    """

    first: int
    bundles: tuple[Bundle, ...]
    sizes: tuple[int, ...]

    @property
    def devices(self) -> float:
        """Return the number of devices that all bundles of the block need."""
        return sum(map(_devices, self.bundles))


def plan(groups: Sequence[BundleGroup], nodes: Mapping[str, Resources]) -> list[str]:
    """Choose a node for each bundle.

    A group is on one node wherever it fits. A group that does not fit is divided over as few nodes as possible.

    Args:
        groups: The bundles of the run.
        nodes: Maps the id of each node to the resources that the node can give to the bundles.

    Returns:
        The id of each bundle's node, in the order of the bundles of all groups.

    Raises:
        NoRoomError: A bundle fits on no node.
    """
    blocks: list[_Block] = []
    for group in groups:
        blocks.append(_Block(sum(len(block.bundles) for block in blocks), group.bundles, group.sizes))
    try:
        return _nodes_of(sorted(blocks, key=lambda block: -block.devices), nodes)
    except NoRoomError:
        # An engine over several GPUs cannot be divided, but groups of ranks can, so the engines come first.
        return _nodes_of(sorted(blocks, key=lambda block: (-_devices(block.bundles[0]), -block.devices)), nodes)


def _nodes_of(blocks: Sequence[_Block], nodes: Mapping[str, Resources]) -> list[str]:
    """Choose a node for each bundle. The blocks get their nodes in the given order."""
    left = {node: dict(resources) for node, resources in nodes.items()}
    found: dict[int, str] = {}
    waiting = list(reversed(blocks))
    while waiting:
        block = waiting.pop()
        node, count = _choice(block, left)
        for number, bundle in enumerate(block.bundles[:count], block.first):
            found[number] = node
            for name, amount in bundle.resources.items():
                left[node][name] = round(left[node][name] - amount, _DIGITS)
        if count < len(block.bundles):
            waiting.append(_Block(block.first + count, block.bundles[count:], block.sizes))
    return [found[number] for number in range(len(found))]


def _choice(block: _Block, left: Mapping[str, Resources]) -> tuple[str, int]:
    """Return the node for the first bundles of a block, and the number of these bundles.

    Of the nodes that have room for the whole block, the fullest is chosen. If there is none, the node with room for
    the most bundles is chosen.
    """
    size = len(block.bundles)
    room = {node: _room(block.bundles, resources) for node, resources in left.items()}
    whole = [node for node, count in room.items() if count == size]
    if whole:
        return min(whole, key=lambda node: _devices_left(block.bundles[0], left[node])), size
    for step in block.sizes:
        parts = {node: count // step * step for node, count in room.items()}
        most = max(parts, key=lambda node: parts[node], default="")
        if step < size and most and parts[most]:
            return most, parts[most]
    raise NoRoomError(block.bundles[0], left)


def _room(bundles: Sequence[Bundle], left: Resources) -> int:
    """Return the number of leading bundles for which a node has room."""
    used = dict.fromkeys(left, 0.0)
    for count, bundle in enumerate(bundles):
        for name, amount in bundle.resources.items():
            used[name] = round(used.get(name, 0.0) + amount, _DIGITS)
            if used[name] > left.get(name, 0.0):
                return count
    return len(bundles)


def _devices(bundle: Bundle) -> float:
    return bundle.resources.get("GPU") or bundle.resources.get("CPU", 0.0)


def _devices_left(bundle: Bundle, left: Resources) -> float:
    return left.get("GPU" if "GPU" in bundle.resources else "CPU", 0.0)


def _amounts(resources: Resources) -> str:
    """Return amounts of resources as text, such as "4 GPUs and 1 CPU"."""

    def parts() -> Iterator[str]:
        for name, amount in resources.items():
            yield f"{amount:g} {name}{'' if amount <= 1 else 's'}"

    return " and ".join(parts())
