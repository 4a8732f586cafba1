"""GPUs that training ranks and engines share: training rank i and rollout replica i each reserve half of GPU i."""

import contextlib
from collections import Counter
from typing import Any

from rltrain.base.errors import WorkerError


class SharedDevices:
    """Reservation of GPUs for a run.

    A Ray placement group reserves the GPUs, with one bundle for each GPU. Without a placement group, Ray could put two
    engines or two training ranks on the same GPU, because Ray serves requests for half a GPU in their order of arrival.

    Args:
        count: Number of GPUs to reserve. The reserved GPUs are numbered from 0, so that the GPUs of one machine have
            consecutive numbers.
        cpus: Total number of CPUs that the processes on one GPU need.
        limit_s: Seconds within which the GPUs must become free.

    Raises:
        WorkerError: The GPUs did not become free within `limit_s` seconds.
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
        """Return the Ray options that place an actor on the reserved GPU with the number `number`.

        If the machine of a reserved GPU fails, Ray replaces the reserved GPU by a free GPU on another machine.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundles[number])}

    def free(self) -> None:
        """Release the reserved GPUs, which makes Ray end the actors on these GPUs."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # the Ray cluster may already have ended
            ray.util.remove_placement_group(self.group)
