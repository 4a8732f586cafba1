"""One weight sync, from the driver's place.

For each bucket all ranks write their rows, then all engines load it. A bucket is written when the one two before it has
been loaded by every engine: while engines load one, ranks write the next, and there are never more than two. The calls
wait for each other, not the driver: what one returns is an argument of the next, so that an error, or the death of a
process, ends all that come after it.

Ranks and engines of one host share a file in memory. Others get the bytes with the calls, each rank's on their own.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

from rltrain.base.errors import ClusterLost, RLTrainError, SyncError, WorkerLost, described
from workers.cluster.host_groups import Hosts
from workers.sync.memory import new_path
from workers.sync.sender import SLOTS, Offer

ROLE = "rollout"


class Ranks(Protocol):
    """The actor's ranks, as `WorkerGroup` has them."""

    hosts: Hosts

    def start(self, method: str, *args: Any) -> list[Any]:
        """Start a call on every rank."""

    def wait(self, pending: list[Any], *, beside: Sequence[Hosts] = ()) -> list[Any]:
        """Results by rank."""


def sync(
    actor: Ranks,
    rollout: Hosts,
    version: int,
    *,
    check: bool,
    share: bool = True,
    replicas: Sequence[int] | None = None,
) -> None:
    """Send the actor's weights to the engines.

    Args:
        actor: the ranks.
        rollout: the engines' processes, one a replica.
        version: of the weights.
        check: prove that they arrived.
        share: use shared memory where all are on one host.
        replicas: those that get them; None: all.

    Raises:
        WorkerLost: a process died or hung; the engines that are left generate nothing until a sync succeeds.
        SyncError: the engines do not compute with these weights, or did not get all of them; as before.
    """
    path, replicas = new_path(), range(rollout.size) if replicas is None else replicas
    engines = _Engines(rollout, replicas, actor.hosts)
    try:
        begun = actor.start("start_export", path if share and rollout.concurrent else None, version, check)
        told = engines.start("start_load", [(path, version)] * len(replicas))
        offers, places = actor.wait(begun), engines.wait(told)  # neither depends on the other
        _stream(actor, engines, path, offers, places)
    except BaseException as error:
        engines.give_up(path, error)
        if isinstance(error, RLTrainError) and not isinstance(error, ClusterLost | SyncError | WorkerLost):
            raise SyncError(f"weight sync {version} broke off: {error}") from error
        raise
    finally:
        if not actor.hosts.dead():  # the others may wait for it for ever
            with contextlib.suppress(RLTrainError):
                actor.wait(actor.start("end_export"), beside=[rollout])
        with contextlib.suppress(OSError):  # where its creator died
            os.unlink(path)


class _Engines:
    """The replicas that take part, and the ranks that they wait for."""

    def __init__(self, hosts: Hosts, replicas: Sequence[int], actor: Hosts) -> None:
        self.hosts, self.replicas, self.actor = hosts, list(replicas), actor

    def start(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.hosts.start(ROLE, method, arguments, ranks=self.replicas)

    def wait(self, pending: list[Any]) -> list[Any]:
        return self.hosts.wait(pending, ranks=self.replicas, beside=[self.actor])

    def give_up(self, path: str, error: BaseException) -> None:
        """Tell those that are left that the rest does not come."""
        reason = described(error)
        for replica in self.replicas:
            if replica not in self.hosts.dead():
                with contextlib.suppress(RLTrainError):
                    self.hosts.call(ROLE, "give_up_load", [(path, reason)], ranks=[replica])


def _stream(actor: Ranks, engines: _Engines, path: str, offers: Sequence[Offer], places: Sequence[str | None]) -> None:
    """All buckets, and the end."""
    shared = path if len({*(offer.where for offer in offers), *places}) == 1 and offers[0].where else None
    loaded: list[list[Any]] = []
    for number in range(offers[0].buckets):
        free = loaded[number - SLOTS] if number >= SLOTS else []
        parts = actor.start("export", number, shared, *free)
        before = loaded[-1] if loaded else [None] * len(engines.replicas)
        loaded.append(engines.start("load_bucket", [(path, own, *parts) for own in before]))
    engines.wait(engines.start("finish_load", [(path, own) for own in loaded[-1]]))
