"""The part of a weight sync that runs in a rollout worker and records whether the engine's weights are complete.

An engine is allowed to generate responses only while all of its weights have the same version.
"""

from collections.abc import Callable
from typing import Protocol

from rltrain.base.errors import SyncError, described
from workers.cluster.progress import tick
from workers.sync.buckets import Bucket, join
from workers.sync.memory import whereabouts


class Loads(Protocol):
    """Interface of an engine that loads weights."""

    def start_load(self) -> None:
        """Prepare to receive new weights, even if the previous load was not completed."""

    def load_bucket(self, bucket: Bucket) -> None:
        """Load the tensors of a bucket.

        Raises SyncError if the bytes of the bucket differ from the bytes that the sender wrote.
        """

    def finish_load(self, version: int) -> None:
        """Make the engine compute with the loaded weights.

        Raises SyncError if a layer of the engine does not compute with the loaded weights.
        """


class Sleeps(Protocol):
    """Interface of an engine that can release memory while it is idle."""

    def sleep(self) -> bool:
        """Release the device memory of the engine's weights and caches until new weights are loaded.

        Returns:
            Whether the engine has released its device memory.
        """


class Receiver:
    """Receiver of an engine's weight syncs, which records whether the engine is allowed to generate responses.

    The engine must not generate responses while it sleeps (its weights are released), during a weight sync (from the
    call of `start` to the end of the call of `finish`), or after a failed weight sync.

    Attributes:
        asleep: whether the engine has released its weights.
        sync: name of the current weight sync, or None if no sync is running.
        broken: reason why the last weight sync failed, or None if the last weight sync did not fail.
    """

    def __init__(self) -> None:
        self.sync: str | None = None
        self.version = 0
        self.broken: str | None = None
        self.asleep = False

    @property
    def whole(self) -> bool:
        """Return whether the engine is allowed to generate responses now."""
        return self.sync is None and self.broken is None and not self.asleep

    def require(self) -> None:
        """Raise SyncError if the last weight sync failed."""
        if self.broken is not None:
            raise SyncError(
                f"weight sync {self.version} failed ({self.broken}): this engine has weights of two versions, and "
                "generates no answers until another weight sync succeeds"
            )

    def sleep(self, engine: Sleeps) -> bool:
        """Make the engine release its device memory until the next weight sync.

        Return whether the engine has released its memory. An engine on a CPU never releases its memory.
        """
        self.asleep = engine.sleep()
        return self.asleep

    def start(self, engine: Loads, sync: str, version: int) -> str | None:
        """Start a weight sync, and wake the engine if the engine sleeps.

        Return None, or a string that is the same in two processes if the processes can map each other's shared files
        (`memory.whereabouts`).
        """
        self.sync, self.version, self.broken, self.asleep = sync, version, None, False
        self._guarded(engine.start_load)
        return whereabouts()

    def bucket(self, engine: Loads, sync: str, parts: tuple[Bucket, ...]) -> None:
        """Join all ranks' parts of a bucket, and load the bucket."""
        self._expect(sync)
        self._guarded(lambda: engine.load_bucket(join(parts)))

    def finish(self, engine: Loads, sync: str) -> None:
        """Finish the weight sync after the last bucket, so that the engine can generate responses again."""
        self._expect(sync)
        self._guarded(lambda: engine.finish_load(self.version))
        self.sync = None

    def give_up(self, sync: str, reason: str) -> None:
        """Mark the weight sync as failed, because its remaining buckets will not arrive."""
        if self.sync == sync:
            self.sync, self.broken = None, reason

    def _expect(self, sync: str) -> None:
        if self.sync != sync:
            self.require()
            raise SyncError(
                f"weight sync {sync}: this engine is receiving another sync, {self.sync}; please report this"
            )

    def _guarded(self, step: Callable[[], None]) -> None:
        tick()
        try:
            step()
        except BaseException as error:
            self.sync, self.broken = None, described(error)
            raise
