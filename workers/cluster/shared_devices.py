"""Which devices training ranks and engines share: rank i and replica i have half of the same one each."""

import contextlib
from collections import Counter
from typing import Any

from rltrain.base.errors import WorkerError


class SharedDevices:
    """GPUs that are kept for a run, each a bundle of one Ray placement group.

    Left to itself, Ray fills a device with whoever asks for a half of one first: two engines, or two ranks.

    Args:
        count: how many GPUs; those of one machine are numbered one after the other.
        cpus: what the processes on one of them ask for together.
        limit_s: seconds in which they must be free.

    Raises:
        WorkerError: they were not.
    """

    def __init__(self, count: int, *, cpus: float, limit_s: float) -> None:
        import ray

        bundle = {"GPU": 1.0} | ({"CPU": cpus} if cpus else {})
        self.group = ray.util.placement_group([bundle] * count, strategy="PACK")
        try:
            if not ray.wait([self.group.ready()], timeout=limit_s)[0]:
                what = f"{count} GPUs, each with {cpus:g} CPU," if cpus else f"{count} GPUs"
                raise WorkerError(
                    f"starting: {what} were not free within placement.start_timeout_s={limit_s:g} s; use fewer ranks "
                    "and engines, or wait for other runs to end"
                )
            nodes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        except BaseException:
            self.free()
            raise
        held = Counter(nodes.values())
        self.bundles = sorted(nodes, key=lambda bundle: (-held[nodes[bundle]], nodes[bundle], bundle))

    def options(self, number: int) -> dict[str, Any]:
        """What makes an actor use device `number`, on another machine if that of the device is lost and one is free."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundles[number])}

    def free(self) -> None:
        """Let others have the devices; ends the actors that use them."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone
            ray.util.remove_placement_group(self.group)
