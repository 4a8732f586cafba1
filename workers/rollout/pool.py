"""Several rollout replicas as one: which replica answers what, and weight syncs to all of them."""

from collections.abc import Sequence
from typing import Any

from workers.group import Hosts
from workers.rollout.messages import Completion, Request


class RolloutPool:
    """Replicas of the engine.

    Args:
        hosts: one process a replica, each with the role "rollout".
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.running: list[set[tuple[int, int]]] = [set() for _ in range(hosts.size)]

    def submit(self, groups: Sequence[Sequence[Request]]) -> None:
        """Start answering. A group's samples go to one replica, the one with the fewest unfinished answers."""
        shares: list[list[Request]] = [[] for _ in self.running]
        for requests in groups:
            replica = min(range(len(shares)), key=lambda n: (len(self.running[n]), n))
            shares[replica].extend(requests)
            self.running[replica].update(request.key for request in requests)
        self.hosts.wait(self.hosts.start("rollout", "submit", [(share,) for share in shares]))

    @property
    def pending(self) -> int:
        """Answers not yet returned."""
        return sum(map(len, self.running))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers that finished, waiting up to `timeout_s` seconds for the first of each busy replica."""
        busy = [replica for replica, keys in enumerate(self.running) if keys]
        found = []
        for replica, answers in zip(
            busy, self.hosts.call("rollout", "poll", [(timeout_s,)] * len(busy), ranks=busy), strict=True
        ):
            self.running[replica] -= {answer.key for answer in answers}
            found += answers
        return found

    def abort(self) -> None:
        """Drop everything unfinished."""
        self.hosts.call("rollout", "abort", [()] * self.hosts.size)
        for keys in self.running:
            keys.clear()

    def load(self, buckets: Any, version: int) -> None:
        """Load these weights, or the pending result of the actor's export, into all replicas."""
        self.hosts.call("rollout", "load", [(buckets, version)] * self.hosts.size)

    def settings(self, request: Request) -> dict[str, Any]:
        """The sampling parameters that the first replica resolved for a request."""
        return self.hosts.call("rollout", "settings", [(request,)], ranks=[0])[0]

    def close(self) -> None:
        """End the engines."""
        self.hosts.call("rollout", "close", [()] * self.hosts.size)
