"""Restarts of the training ranks after a rank died or hung, up to a maximum number of restarts per run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rltrain.base.errors import WorkerError, WorkerLost

logger = logging.getLogger(__name__)

# Seconds to wait before the first, second, third and fourth restart. From the fourth restart on, the pause is always
# the last value of PAUSES_S.
PAUSES_S = (0.0, 2.0, 8.0, 30.0)


class Restarts:
    """Restarts the training ranks and counts the restarts of one run.

    Args:
        restart: coroutine function that ends all processes of the training ranks and starts new processes. If `restart`
            is None, the training ranks cannot be restarted.
        limit: maximum number of restarts.

    Attributes:
        count: number of restarts so far.
    """

    def __init__(self, restart: Callable[[], Awaitable[None]] | None, limit: int) -> None:
        self.restart, self.limit, self.count = restart, limit, 0

    async def after(self, error: WorkerLost, step: int) -> None:
        """Restart the training ranks after one of them has died or stopped responding.

        Args:
            error: the error that reported that a training rank died or stopped responding.
            step: training step from which the run will continue; used in the log message.

        Raises:
            WorkerError: the limit of restarts is reached, or the training ranks cannot be restarted.
        """
        first = error
        while True:
            if self.restart is None or self.count >= self.limit:
                # After a failed restart, `error` is the error of the restart, which may say only that the remaining
                # machines lack free devices. The message of the WorkerError then begins with `first`, the error before
                # the failed restart, because `first` names the lost machine.
                before = "" if error is first else f"{first}; "
                raise WorkerError(
                    f"{before}{error}; the training ranks were restarted {self.count} times, and "
                    f"trainer.max_restarts={self.limit} allows no further restart: continue with trainer.resume=auto"
                ) from error
            pause_s = PAUSES_S[min(self.count, len(PAUSES_S) - 1)]
            self.count += 1
            logger.warning(
                "%s: the training ranks start again%s, from step %d (restart %d of %d)",
                error,
                f" in {pause_s:g} s" if pause_s else "",
                step,
                self.count,
                self.limit,
            )
            await asyncio.sleep(pause_s)
            try:
                await self.restart()
                return
            except WorkerLost as again:
                error = again
