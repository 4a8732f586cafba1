"""Several rollout replicas as one: which replica answers what, and weight syncs to all of them."""

from collections.abc import Sequence
from typing import Any

from workers.group import Hosts
from workers.rollout.messages import Completion, Request
from workers.sync.drive import Ranks, sync

LONG_POLL_S = 1.0  # a replica that has nothing to say for so long says that


class RolloutPool:
    """Replicas of the engine.

    Args:
        hosts: one process a replica, each with the role "rollout".
        sleeps: whether the engines may give up their devices' memory when they have nothing to do.

    Attributes:
        asleep: whether they have; `load` wakes them.
    """

    def __init__(self, hosts: Hosts, *, sleeps: bool = False) -> None:
        self.hosts, self.sleeps, self.asleep = hosts, sleeps, False
        self.running: list[set[tuple[int, int]]] = [set() for _ in range(hosts.size)]
        self.sent: list[Any] = []  # `submit` calls that may not have arrived
        self.asked: dict[int, Any] = {}  # by replica: a `poll` that it has not answered

    def submit(self, groups: Sequence[Sequence[Request]]) -> None:
        """Start answering; returns at once, and what goes wrong is raised by the next `poll`.

        A group's samples go to one replica, the one with the fewest unfinished answers.
        """
        assert not self.asleep, "engines that sleep have no weights to answer with: load first"
        shares: list[list[Request]] = [[] for _ in self.running]
        for requests in groups:
            replica = min(range(len(shares)), key=lambda n: (len(self.running[n]), n))
            shares[replica].extend(requests)
            self.running[replica].update(request.key for request in requests)
        chosen = [replica for replica, share in enumerate(shares) if share]
        self.sent += self.hosts.start("rollout", "submit", [(shares[replica],) for replica in chosen], ranks=chosen)

    @property
    def pending(self) -> int:
        """Answers not yet returned."""
        return sum(map(len, self.running))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers that finished, waiting up to `timeout_s` seconds for the first.

        Each busy replica is asked once and answers when it has something, so that looking again costs it nothing.
        """
        arrived = set(self.hosts.first(self.sent, 0.0))
        self.hosts.wait([call for number, call in enumerate(self.sent) if number in arrived])
        self.sent = [call for number, call in enumerate(self.sent) if number not in arrived]
        idle = [replica for replica, keys in enumerate(self.running) if keys and replica not in self.asked]
        patience = LONG_POLL_S if self.hosts.concurrent else timeout_s
        calls = self.hosts.start("rollout", "poll", [(patience,)] * len(idle), ranks=idle)
        self.asked.update(zip(idle, calls, strict=True))
        done = set(self.hosts.first(list(self.asked.values()), timeout_s))
        replicas = [replica for number, replica in enumerate(self.asked) if number in done]
        found = []
        for replica, answers in zip(
            replicas, self.hosts.wait([self.asked.pop(replica) for replica in replicas]), strict=True
        ):
            found += [answer for answer in answers if answer.key in self.running[replica]]
            self.running[replica] -= {answer.key for answer in answers}
        return found

    def abort(self) -> None:
        """Drop everything unfinished, and every answer that is on its way: none of them is ever returned."""
        self.hosts.wait(self.sent)  # or it would arrive after the engine was told to drop it
        self.hosts.call("rollout", "abort", [()] * self.hosts.size)
        self.hosts.wait(list(self.asked.values()))
        self.sent, self.asked = [], {}
        for keys in self.running:
            keys.clear()

    def sleep(self) -> None:
        """Let the training ranks have the memory of the devices until `load`, where the engines have any to give."""
        if self.sleeps and not self.asleep:
            assert not self.pending, "engines with unfinished answers must not sleep"
            # On a CPU none of them does; then they need not be asked again.
            self.asleep = self.sleeps = any(self.hosts.call("rollout", "sleep", [()] * self.hosts.size))

    def load(self, actor: Ranks, version: int, *, check: bool) -> None:
        """Send the actor's weights to all replicas, waking them. Raises SyncError unless they compute with them."""
        sync(actor, self.hosts, version, check=check)
        self.asleep = False

    def settings(self, request: Request) -> dict[str, Any]:
        """The sampling parameters that the first replica resolved for a request."""
        return self.hosts.call("rollout", "settings", [(request,)], ranks=[0])[0]

    def close(self) -> None:
        """End the engines."""
        self.hosts.call("rollout", "close", [()] * self.hosts.size)
