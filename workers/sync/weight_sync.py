"""One weight sync, as the driver runs it.

For each bucket, all ranks write their rows, and then all engines load the bucket. Ranks write a bucket only after every
engine has loaded the bucket two places before it. Ranks therefore write one bucket while engines load the previous one,
and at most two buckets exist at a time. The driver does not wait between the calls. Instead, the result of one call is
an argument of the next call. An error, or the death of a process, therefore ends all later calls.

If all ranks and engines are on one host, they share a file in memory. Otherwise, each rank sends its own bytes with the
calls.
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
    """Interface of the actor's ranks, which `WorkerGroup` implements."""

    hosts: Hosts

    def start(self, method: str, *args: Any) -> list[Any]:
        """Start a call on every rank."""

    def wait(self, pending: list[Any], *, beside: Sequence[Hosts] = ()) -> list[Any]:
        """Return the results of `start` by rank."""


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
        actor: the actor's ranks.
        rollout: the engines' processes, one for each replica.
        version: version of the weights.
        check: whether to verify that the weights arrived.
        share: whether to use shared memory if all processes are on one host.
        replicas: the replicas that receive the weights; None means all replicas.

    Raises:
        WorkerLost: a process died or hung. The remaining engines generate nothing until a sync succeeds.
        SyncError: the engines do not compute with these weights, or did not receive all of them. The engines generate
            nothing until a sync succeeds.
    """
    path, replicas = new_path(), range(rollout.size) if replicas is None else replicas
    engines = _Engines(rollout, replicas, actor.hosts)
    try:
        begun = actor.start("start_export", path if share and rollout.concurrent else None, version, check)
        told = engines.start("start_load", [(path, version)] * len(replicas))
        offers, places = actor.wait(begun), engines.wait(told)  # the two calls are independent
        _stream(actor, engines, path, offers, places)
    except BaseException as error:
        engines.give_up(path, error)
        if isinstance(error, RLTrainError) and not isinstance(error, ClusterLost | SyncError | WorkerLost):
            raise SyncError(f"weight sync {version} broke off: {error}") from error
        raise
    finally:
        if not actor.hosts.dead():  # surviving ranks may wait forever for a dead one
            with contextlib.suppress(RLTrainError):
                actor.wait(actor.start("end_export"), beside=[rollout])
        with contextlib.suppress(OSError):  # the file remains only if its creator died
            os.unlink(path)


class _Engines:
    """The replicas that take part in a sync, and the actor's ranks on which their calls depend."""

    def __init__(self, hosts: Hosts, replicas: Sequence[int], actor: Hosts) -> None:
        self.hosts, self.replicas, self.actor = hosts, list(replicas), actor

    def start(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.hosts.start(ROLE, method, arguments, ranks=self.replicas)

    def wait(self, pending: list[Any]) -> list[Any]:
        return self.hosts.wait(pending, ranks=self.replicas, beside=[self.actor])

    def give_up(self, path: str, error: BaseException) -> None:
        """Tell the surviving replicas that the remaining buckets will not arrive."""
        reason = described(error)
        for replica in self.replicas:
            if replica not in self.hosts.dead():
                with contextlib.suppress(RLTrainError):
                    self.hosts.call(ROLE, "give_up_load", [(path, reason)], ranks=[replica])


def _stream(actor: Ranks, engines: _Engines, path: str, offers: Sequence[Offer], places: Sequence[str | None]) -> None:
    """Transfer all buckets, then let the engines finish the load."""
    shared = path if len({*(offer.where for offer in offers), *places}) == 1 and offers[0].where else None
    loaded: list[list[Any]] = []
    for number in range(offers[0].buckets):
        free = loaded[number - SLOTS] if number >= SLOTS else []
        parts = actor.start("export", number, shared, *free)
        before = loaded[-1] if loaded else [None] * len(engines.replicas)
        loaded.append(engines.start("load_bucket", [(path, own, *parts) for own in before]))
    engines.wait(engines.start("finish_load", [(path, own) for own in loaded[-1]]))
