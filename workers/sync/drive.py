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

from rltrain.errors import RLTrainError, SyncError
from workers.group import Hosts
from workers.sync.memory import new_path
from workers.sync.sender import SLOTS, Offer

ROLE = "rollout"


class Ranks(Protocol):
    """The actor's ranks, as `WorkerGroup` has them."""

    def start(self, method: str, *args: Any) -> list[Any]:
        """Start a call on every rank."""

    def wait(self, pending: list[Any]) -> list[Any]:
        """Results by rank."""


def sync(actor: Ranks, rollout: Hosts, version: int, *, check: bool, share: bool = True) -> None:
    """Send the actor's weights to all engines.

    Args:
        actor: the ranks.
        rollout: the engines' processes, one a replica.
        version: of the weights.
        check: prove that they arrived (invariant E5).
        share: use shared memory where all are on one host.

    Raises:
        SyncError: the engines do not compute with these weights, or did not get all of them; then they generate
            nothing until a sync succeeds.
    """
    path = new_path()
    try:
        begun = actor.start("start_export", path if share and rollout.concurrent else None, version, check)
        told = rollout.start(ROLE, "start_load", [(path, version)] * rollout.size)
        offers, places = actor.wait(begun), rollout.wait(told)
        _stream(actor, rollout, path, offers, places)
    except BaseException as error:
        _give_up(rollout, path, error)
        if isinstance(error, RLTrainError) and not isinstance(error, SyncError):
            raise SyncError(f"weight sync {version} broke off: {error}") from error
        raise
    finally:
        with contextlib.suppress(RLTrainError):  # a rank that died has nothing to end
            actor.wait(actor.start("end_export"))
        with contextlib.suppress(OSError):  # where its creator died
            os.unlink(path)


def _stream(actor: Ranks, rollout: Hosts, path: str, offers: Sequence[Offer], places: Sequence[str | None]) -> None:
    """All buckets, and the end."""
    shared = path if len({*(offer.where for offer in offers), *places}) == 1 and offers[0].where else None
    loaded: list[list[Any]] = []
    for number in range(offers[0].buckets):
        free = loaded[number - SLOTS] if number >= SLOTS else []
        parts = actor.start("export", number, shared, *free)
        before = loaded[-1] if loaded else [None] * rollout.size
        loaded.append(rollout.start(ROLE, "load_bucket", [(path, own, *parts) for own in before]))
    rollout.wait(rollout.start(ROLE, "finish_load", [(path, own) for own in loaded[-1]]))


def _give_up(rollout: Hosts, path: str, error: BaseException) -> None:
    """Tell the engines that are left that the rest does not come."""
    reason = f"{type(error).__name__}: {error}"
    for replica in range(rollout.size):
        with contextlib.suppress(RLTrainError):
            rollout.call(ROLE, "give_up_load", [(path, reason)], ranks=[replica])
