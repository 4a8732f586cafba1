"""Rewrites the report of an active run from time to time, in a process that uses at most 1% of the run's time.

The report of a long run takes seconds of CPU time and more than 100 MB of memory. In a thread of the driver, the memory
would stay with the driver, and the training step would wait for Python's global lock.
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

FIRST_AFTER_S = 10.0  # seconds before the first report; a shorter run writes a report only at the end
SHARE = 0.01  # maximum share of the run's time for which the process may use a CPU core
_NICE = 10  # the process yields to the processes of the run
_START = (
    "import sys; sys.path[:] = {path!r}; from rltrain.monitoring.report.refresh import run; run({folder!r}, {parent})"
)


class ReportFile:
    """Keeps the file `report.html` of a run up to date. An error while the report is written never ends the run.

    Args:
        output_dir: output folder of the run; must exist.
        clock: returns the time in seconds.
    """

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.output_dir, self.clock = output_dir, clock
        self.next_at = clock() + FIRST_AFTER_S
        self.process: subprocess.Popen[str] | None = None
        self.failed = False

    def refresh(self) -> None:
        """Start a process that writes the report, unless another one is writing the report or wrote it recently."""
        if self.process is not None and self.process.poll() is not None:
            self._ended(self.process)
            self.process = None
        if self.process is None and self.clock() >= self.next_at:
            self.process = _started(self.output_dir)

    def _ended(self, process: subprocess.Popen[str]) -> None:
        """Read what a process that has ended says, and decide when the next process may start."""
        said, complaints = process.communicate()
        if process.returncode == 0:
            self.next_at = self.clock() + float(said) / SHARE
            return
        self._warn((complaints.strip().splitlines() or [f"its process ended with status {process.returncode}"])[-1])
        self.next_at = self.clock() + FIRST_AFTER_S / SHARE

    def close(self) -> Path | None:
        """Write the report for the last time.

        Return the path of the report, or None if the report could not be written.
        """
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
        try:
            write_report([self.output_dir], self.output_dir / REPORT)
        except Exception as error:  # an error in the report must not end the run
            self._warn(described(error))
            return None
        return self.output_dir / REPORT

    def _warn(self, reason: str) -> None:
        """Log why the report was not written. Only the first failure of a run is logged."""
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
        start_new_session=True,  # signals of the terminal end the run, which then ends this process
    )


def run(folder: str, parent: int) -> None:
    """Write the report of a run, and print the CPU time of this process in seconds.

    Args:
        folder: output folder of the run.
        parent: pid of the run's driver. This process is killed when the driver ends.
    """
    end_with_parent(parent)
    os.nice(_NICE)
    try:
        write_report([Path(folder)], Path(folder) / REPORT)
    except Exception as error:  # a traceback would be no help to the user
        sys.exit(described(error))
    sys.stdout.write(f"{time.process_time()}\n")
