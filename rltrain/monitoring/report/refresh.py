"""Rewrites the report of an active run from time to time, in a thread that uses at most 1% of the run's time."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rltrain.base.errors import described
from rltrain.monitoring.report.page import REPORT, write_report

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 10.0  # seconds before the first report; a shorter run writes a report only at the end
SHARE = 0.01  # maximum share of the run's time for which the thread may use the CPU


class ReportFile:
    """Keeps the file `report.html` of a run up to date. An error while the report is written never ends the run.

    Args:
        output_dir: output folder of the run; must exist.
        clock: returns the time in seconds.
    """

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.output_dir, self.clock = output_dir, clock
        self.next_at = clock() + FIRST_AFTER_S
        self.thread: threading.Thread | None = None
        self.failed = False

    def refresh(self) -> None:
        """Start a thread that writes the report, unless another thread is writing the report or wrote it recently."""
        if self.clock() < self.next_at or (self.thread is not None and self.thread.is_alive()):
            return
        self.thread = threading.Thread(target=self._refresh, name="report", daemon=True)
        self.thread.start()

    def _refresh(self) -> None:
        began = time.thread_time()
        self._write()
        self.next_at = self.clock() + (time.thread_time() - began) / SHARE

    def close(self) -> Path | None:
        """Write the report for the last time.

        Return the path of the report, or None if the report could not be written.
        """
        if self.thread is not None:
            self.thread.join()
        return self.output_dir / REPORT if self._write() else None

    def _write(self) -> bool:
        try:
            write_report([self.output_dir], self.output_dir / REPORT)
            return True
        except Exception as error:  # an error in the report must not end the run
            if not self.failed:
                logger.warning("%s is not written: %s", REPORT, described(error))
            self.failed = True
            return False
