"""Reservation of a run's CPUs and GPUs: one Ray placement group with the bundles of all training ranks and engines."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.base.errors import ConfigError, WorkerError
from workers.cluster.bundle_plan import MORE_ROOM, Bundle, BundleGroup, NoRoomError, Resources, plan

_NODE = "ray.io/node-id"  # Label that Ray gives to each node.
# Seconds within which Ray must reserve bundles on the nodes that were chosen for them. If another run has taken the
# resources in the meantime, Ray chooses other nodes.
_CHOSEN_S = 10.0
# Seconds for which the list of the nodes that are alive is kept, because many ranks start again at the same time.
_SEEN_S = 1.0


@dataclass(frozen=True)
class _Place:
    """Where a worker's bundle is.

    Attributes:
        group: Ray placement group.
        index: Index of the bundle in the placement group.
        node: Ray's id of the node that was chosen for the bundle; None if Ray chooses the node. If a chosen node is
            lost, Ray cannot move the bundle to another node.
    """

    group: Any
    index: int
    node: str | None


class Reservation:
    """CPUs and GPUs of a run, which are reserved all at once, before any training rank or engine starts.

    A bundle of its own for each device also keeps two engines, or two training ranks, from sharing a GPU: Ray serves
    requests for half a GPU in their order of arrival.

    Args:
        groups: The bundles of all training ranks and engines that the run needs.
        limit_s: Seconds within which the resources must become free.

    Raises:
        ConfigError: The bundles do not fit on the nodes, even if the nodes run nothing else.
        WorkerError: The resources did not become free within `limit_s` seconds.
    """

    def __init__(self, groups: Sequence[BundleGroup], *, limit_s: float) -> None:
        self.groups = list(groups)
        self._ray_groups: list[Any] = []
        self._places: dict[str, _Place] = {}
        self._started: set[str] = set()
        nodes = _nodes()
        self._seen, self._seen_at = nodes, -_SEEN_S  # the nodes that were alive at the time of the last look
        try:
            plan(self.groups, {node: one["Resources"] for node, one in nodes.items()})
        except NoRoomError as error:
            raise ConfigError(f"placement: {error.described(_names(nodes))}; {MORE_ROOM}") from None
        try:
            self._reserve(nodes, limit_s)
        except BaseException:
            self.free()
            raise

    def options(self, worker: str) -> dict[str, Any]:
        """Return the Ray options that place a worker's process on the worker's bundle; {} if it has no bundle.

        If the node of the bundle is lost, another bundle is reserved for the worker, as soon as a node has room.

        Args:
            worker: Name of the worker, such as "training rank 0".
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if worker not in self._places:
            return {}
        if worker in self._started and self._places[worker].node is not None:
            if time.monotonic() > self._seen_at + _SEEN_S:
                self._seen, self._seen_at = _nodes(), time.monotonic()
            if self._places[worker].node not in self._seen:
                self._renew(worker, self._seen)
        self._started.add(worker)
        place = self._places[worker]
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.index)}

    def node_of(self, worker: str) -> str | None:
        """Return Ray's id of the node that was chosen for a worker; None if Ray chooses the node."""
        place = self._places.get(worker)
        return None if place is None else place.node

    def free(self) -> None:
        """Release the reserved resources, which makes Ray end the processes that use them."""
        for group in self._ray_groups:
            _remove(group)
        self._ray_groups = []

    def _reserve(self, nodes: Mapping[str, Mapping[str, Any]], limit_s: float) -> None:
        """Reserve all bundles, at best on the nodes that `plan` chooses.

        If the resources are not free yet, Ray waits until they are, and chooses the nodes.
        """
        import ray

        deadline = time.monotonic() + limit_s
        with contextlib.suppress(NoRoomError):
            chosen = plan(self.groups, _free(nodes))
            group = self._create(self.groups, chosen)
            if ray.wait([group.ready()], timeout=min(_CHOSEN_S, limit_s))[0]:
                return
            self._ray_groups.remove(group)
            _remove(group)
        group = self._create(self.groups, None)
        if not ray.wait([group.ready()], timeout=max(0.0, deadline - time.monotonic()))[0]:
            raise WorkerError(
                f"starting: the training ranks and engines had no room within placement.start_timeout_s={limit_s:g} s: "
                f"{self._lacking(nodes)}; use fewer ranks and engines, or wait for other runs to end"
            )
        self._assign(group, ray.util.placement_group_table(group)["bundles_to_node_id"])

    def _create(self, groups: Sequence[BundleGroup], chosen: Sequence[str] | None) -> Any:
        """Create a Ray placement group, and give its bundles to the workers, without waiting until Ray has reserved it.

        Args:
            groups: The bundles of the placement group.
            chosen: Ray's id of the node of each bundle; None if Ray chooses the nodes.
        """
        import ray

        bundles = [bundle for group in groups for bundle in group.bundles]
        nodes: dict[str, Any] = {}
        if chosen is not None:
            nodes = {"bundle_label_selector": [{_NODE: node} for node in chosen]}
        made = ray.util.placement_group([dict(bundle.resources) for bundle in bundles], strategy="PACK", **nodes)
        self._ray_groups.append(made)
        for index, bundle in enumerate(bundles):
            place = _Place(made, index, None if chosen is None else chosen[index])
            self._places |= dict.fromkeys(bundle.workers, place)
        return made

    def _assign(self, made: Any, nodes: Mapping[int, str]) -> None:
        """Choose the workers of each bundle after Ray has chosen the nodes, so that groups are on one node if possible.

        Args:
            made: Ray placement group with the bundles of all groups.
            nodes: Maps the index of each bundle to Ray's id of the bundle's node.
        """
        alike: dict[tuple[tuple[str, float], ...], list[int]] = {}
        for index, bundle in enumerate(bundle for group in self.groups for bundle in group.bundles):
            alike.setdefault(_key(bundle), []).append(index)
        for key, indices in alike.items():
            # Only bundles with the same resources are interchangeable, so each kind of bundle is assigned separately.
            own = [
                BundleGroup(tuple(Bundle(one.workers, {"GPU": 1.0}) for one in some), group.sizes)
                for group in self.groups
                if (some := [one for one in group.bundles if _key(one) == key])
            ]
            slots: dict[str, list[int]] = {}
            for index in indices:
                slots.setdefault(nodes[index], []).append(index)
            chosen = plan(own, {node: {"GPU": float(len(some))} for node, some in slots.items()})
            for bundle, node in zip((one for group in own for one in group.bundles), chosen, strict=True):
                self._places |= dict.fromkeys(bundle.workers, _Place(made, slots[node].pop(0), None))

    def _renew(self, worker: str, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        """Reserve other bundles for workers whose node is lost.

        The training ranks start again together, so all lost bundles of training ranks are reserved together. Each
        engine starts again by itself.
        """
        lost = []
        for group in self.groups:
            bundles = tuple(one for one in group.bundles if self._lost(one, nodes))
            if bundles:
                lost.append(BundleGroup(bundles, group.sizes))
        (own,) = (group for group in lost if any(worker in one.workers for one in group.bundles))
        together = [own] if own.sizes == (1,) else [group for group in lost if group.sizes != (1,)]
        chosen = None
        with contextlib.suppress(NoRoomError):
            chosen = plan(together, _free(nodes))
        self._create(together, chosen)

    def _lost(self, bundle: Bundle, nodes: Mapping[str, Any]) -> bool:
        node = self._places[bundle.workers[0]].node
        return node is not None and node not in nodes

    def _lacking(self, nodes: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a text that names the resources that are missing, and the nodes that lack them."""
        try:
            plan(self.groups, _free(nodes))
        except NoRoomError as error:
            return error.described(_names(nodes))
        return "Ray did not reserve them"


def _nodes() -> dict[str, Mapping[str, Any]]:
    """Return Ray's description of each node that is alive, by the id of the node."""
    import ray

    return {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}


def _names(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {node: f"{one['NodeManagerHostname']} ({one['NodeManagerAddress']})" for node, one in nodes.items()}


def _free(nodes: Mapping[str, Any]) -> dict[str, Resources]:
    """Return the resources of each node that no process and no placement group has reserved.

    Ray has no public function that says which resources of a machine are free. If Ray's private function
    `available_resources_per_node` raises an error, no resources count as free.
    """
    from ray._private.state import available_resources_per_node

    found: Mapping[str, Resources] = {}
    with contextlib.suppress(Exception):
        found = available_resources_per_node()
    return {node: found.get(node, {}) for node in nodes}


def _key(bundle: Bundle) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(bundle.resources.items()))


def _remove(group: Any) -> None:
    import ray

    with contextlib.suppress(ray.exceptions.RayError):  # the Ray cluster may already have ended
        ray.util.remove_placement_group(group)
