"""Finds out what went wrong in finished or running training runs, by reading the files in their output folders.

Usage: `python -m rltrain.doctor RUN_DIR [RUN_DIR ...]`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rltrain.base.small_program import FAILED, run_program
from rltrain.monitoring.doctor.diagnosis import diagnose
from rltrain.monitoring.doctor.output import show
from rltrain.monitoring.report.run_files import read_run
from rltrain.settings.typed import require

USAGE = (
    "usage: python -m rltrain.doctor RUN_DIR [RUN_DIR ...] (the output folders of runs); "
    "exit status 0: no findings, 1: findings, or a file that cannot be read, 2: wrong arguments"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the runs given as command-line arguments, print the findings, and return the exit status.

    Returns:
        0 if no problem was found in any run, 1 if a problem was found or a run's files could not be read, and 2 if the
        arguments are wrong.
    """
    return run_program(_examine, USAGE, argv, remedy=_remedy)


def _examine(words: list[str]) -> int:
    runs = [read_run(folder, texts=False) for folder in parse(words)]
    console, sick = Console(highlight=False), 0
    for run in runs:
        findings = diagnose(run)
        show(run, findings, console)
        sick += bool(findings or run.notes)
    return FAILED if sick else 0


def _remedy(error: OSError) -> str:
    return f"{error.filename}: {error.strerror or error}; give the output folder of a run (trainer.output_dir)"


def parse(words: Sequence[str]) -> list[Path]:
    """Return the run folders given as command-line arguments."""
    unknown = next((word for word in words if word.startswith("-")), "")
    require(not unknown, f"unknown flag '{unknown}': the only flag is --help")
    require(bool(words) and all(words), USAGE)
    return [Path(word).expanduser() for word in words]


if __name__ == "__main__":
    sys.exit(main())
