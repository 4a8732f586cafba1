"""A rollout worker's side of a weight sync: whether its engine holds whole weights, and so may generate."""

from collections.abc import Callable
from typing import Protocol

from rltrain.base.errors import SyncError, described
from workers.cluster.progress import tick
from workers.sync.buckets import Bucket, join
from workers.sync.memory import whereabouts


class Loads(Protocol):
    """What an engine does with weights."""

    def start_load(self) -> None:
        """Make ready for new weights, also when the last ones never became whole."""

    def load_bucket(self, bucket: Bucket) -> None:
        """Take these tensors. Raises SyncError when their bytes are not the sender's."""

    def finish_load(self, version: int) -> None:
        """Compute with what was taken. Raises SyncError unless every layer does."""


class Sleeps(Protocol):
    """What an engine does when it has nothing to do."""

    def sleep(self) -> bool:
        """Give up the device's memory, weights and caches, until weights are loaded; False where it keeps them."""


class Receiver:
    """Takes one sync after the other. An engine that sleeps, or is between `start` and `finish`, or whose sync failed,
    must not step.

    Attributes:
        asleep: whether the engine has given its weights up.
        sync: name of the sync that goes on.
        broken: why the last one did not end well; None when the engine's weights are whole.
    """

    def __init__(self) -> None:
        self.sync: str | None = None
        self.version = 0
        self.broken: str | None = None
        self.asleep = False

    @property
    def whole(self) -> bool:
        """Whether the engine may generate."""
        return self.sync is None and self.broken is None and not self.asleep

    def require(self) -> None:
        """Raise SyncError when the last sync failed."""
        if self.broken is not None:
            raise SyncError(
                f"weight sync {self.version} failed ({self.broken}): this engine has weights of two versions, and "
                "generates nothing until a sync succeeds"
            )

    def sleep(self, engine: Sleeps) -> bool:
        """The engine has nothing to do until the next sync; returns whether it gave up its memory meanwhile."""
        self.asleep = engine.sleep()
        return self.asleep

    def start(self, engine: Loads, sync: str, version: int) -> str | None:
        """Begin, waking the engine; returns `memory.whereabouts` of this process."""
        self.sync, self.version, self.broken, self.asleep = sync, version, None, False
        self._guarded(engine.start_load)
        return whereabouts()

    def bucket(self, engine: Loads, sync: str, parts: tuple[Bucket, ...]) -> None:
        """Take a bucket that these ranks wrote."""
        self._expect(sync)
        self._guarded(lambda: engine.load_bucket(join(parts)))

    def finish(self, engine: Loads, sync: str) -> None:
        """All buckets are there."""
        self._expect(sync)
        self._guarded(lambda: engine.finish_load(self.version))
        self.sync = None

    def give_up(self, sync: str, reason: str) -> None:
        """The rest of this sync does not come."""
        if self.sync == sync:
            self.sync, self.broken = None, reason

    def _expect(self, sync: str) -> None:
        if self.sync != sync:
            self.require()
            raise SyncError(f"weight sync {sync}: this engine was told of another, {self.sync}; report this")

    def _guarded(self, step: Callable[[], None]) -> None:
        tick()
        try:
            step()
        except BaseException as error:
            self.sync, self.broken = None, described(error)
            raise
