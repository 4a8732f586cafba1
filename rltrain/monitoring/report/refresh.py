"""Rewrites the report of an active run from time to time, in processes that use at most about 1% of a CPU core.

Writing the report of a long run takes seconds of CPU time and more than 100 MB of memory. The report is not written in
a thread of the driver, because the thread would enlarge the driver's memory and hold Python's global interpreter lock.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rltrain.base.errors import described, one_line
from rltrain.monitoring.report.page import REPORT, write_report
from workers.cluster.process_tree import end_with_parent

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 10.0  # The first report is written after 10 seconds; a shorter run writes a report only at its end.
SHARE = 0.01  # The CPU time of all report processes together is at most about 1% of the run's duration.
_NICE = 10  # The niceness of the report process gives priority to the other processes of the run.
_START = (
    "import sys; sys.path[:] = {path!r}; from rltrain.monitoring.report.refresh import run; run({folder!r}, {parent})"
)


class ReportFile:
    """Writer that keeps the file `report.html` of a run up to date.

    An error while writing the report never ends the run.

    Args:
        output_dir: output folder of the run; must exist.
        clock: function that returns the current time in seconds.
    """

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.output_dir, self.clock = output_dir, clock
        self.next_at = clock() + FIRST_AFTER_S
        self.process: subprocess.Popen[str] | None = None
        self.failed = False

    def refresh(self) -> None:
        """Start a process that writes the report, unless the report is being written or was written recently."""
        if self.process is not None and self.process.poll() is not None:
            self._ended(self.process)
            self.process = None
        if self.process is None and self.clock() >= self.next_at:
            self.process = _started(self.output_dir)

    def _ended(self, process: subprocess.Popen[str]) -> None:
        """Read the output of a report process that has ended, and decide when the next report process may start."""
        said, complaints = process.communicate()
        if process.returncode == 0:
            self.next_at = self.clock() + float(said) / SHARE
            return
        self._warn(
            (complaints.strip().splitlines() or [f"the report process ended with status {process.returncode}"])[-1]
        )
        self.next_at = self.clock() + FIRST_AFTER_S / SHARE

    def close(self) -> Path | None:
        """Write the report of the run for the last time.

        Return the path of the report, or None if the report could not be written.
        """
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
        try:
            write_report([self.output_dir], self.output_dir / REPORT)
        except Exception as error:  # An error while the report is written must not end the run.
            self._warn(described(error))
            return None
        return self.output_dir / REPORT

    def _warn(self, reason: str) -> None:
        """Log why the report of the run was not written. Only a run's first failure to write its report is logged."""
        if not self.failed:
            logger.warning("%s is not written: %s", REPORT, one_line(reason))
        self.failed = True


def _started(folder: Path) -> "subprocess.Popen[str]":
    code = _START.format(path=sys.path, folder=str(folder.absolute()), parent=os.getpid())
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # The report process runs in a new session, so terminal signals such as Ctrl-C do not reach the report process.
        # The driver kills a report process that is still running at the end of the run.
        start_new_session=True,
    )


def run(folder: str, parent: int) -> None:
    """Write the report of a run, and print the CPU time of the current process in seconds.

    Args:
        folder: output folder of the run.
        parent: pid of the run's driver. The process that calls `run` is killed when the driver ends.
    """
    end_with_parent(parent)
    os.nice(_NICE)
    try:
        write_report([Path(folder)], Path(folder) / REPORT)
    except Exception as error:  # If the report fails, the user sees one line of text instead of a traceback.
        sys.exit(described(error))
    sys.stdout.write(f"{time.process_time()}\n")
