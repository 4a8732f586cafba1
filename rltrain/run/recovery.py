"""Starting the training ranks again when one of them died or hung, a bounded number of times in a run."""

import logging
import time
from collections.abc import Callable

from rltrain.base.errors import WorkerError, WorkerLost

logger = logging.getLogger(__name__)

PAUSES_S = (0.0, 2.0, 8.0, 30.0)  # before each restart; the last one again and again


class Restarts:
    """Restarts of the training ranks in one run.

    Args:
        restart: ends all their processes and starts them anew; None: they cannot be.
        limit: how often that may happen.

    Attributes:
        count: how often it did.
    """

    def __init__(self, restart: Callable[[], None] | None, limit: int) -> None:
        self.restart, self.limit, self.count = restart, limit, 0

    def after(self, error: WorkerLost, step: int) -> None:
        """Have fresh training ranks after this death, to go on from `step`.

        Raises:
            WorkerError: there were too many already, or they cannot be restarted here.
        """
        while True:
            if self.restart is None or self.count >= self.limit:
                raise WorkerError(
                    f"{error}; the training ranks were restarted {self.count} times, and trainer.max_restarts="
                    f"{self.limit}: go on with trainer.resume=auto"
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
            time.sleep(pause_s)
            try:
                self.restart()
                return
            except WorkerLost as again:
                error = again
