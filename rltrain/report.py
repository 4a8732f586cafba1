"""Writes a report about one or several runs as one HTML page.

Usage: `python -m rltrain.report RUN_DIR [RUN_DIR ...] [--output FILE]`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rltrain.base.errors import one_line
from rltrain.base.small_program import LONGEST, run_program
from rltrain.settings.typed import require

USAGE = "usage: python -m rltrain.report RUN_DIR [RUN_DIR ...] [--output FILE] (the output folders of runs)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rltrain.report` with the given command-line arguments, and return the exit status.

    Each error is printed as a single line to stderr.
    """
    return run_program(_report, USAGE, argv, remedy=_remedy)


def _report(words: list[str]) -> None:
    folders, output = parse(words)
    try:
        notes = write(folders, output)
    except OSError as error:
        # The OSError that a full disk raises has no file name, so the path of the page is used for the error message.
        error.filename = error.filename or str(output)
        raise
    for note in notes:
        print(f"note: {one_line(note, LONGEST)}", file=sys.stderr)  # noqa: T201
    print(output)  # noqa: T201


def _remedy(error: OSError) -> str:
    return f"{error.filename}: {error.strerror or error}; name another file with --output"


def parse(words: Sequence[str]) -> tuple[list[Path], Path]:
    """Parse the command-line arguments, and return the folders of the runs and the path of the HTML page.

    Without `--output`, the path of the page is `report.html` in the folder of the first run.
    """
    left = [part for word in words for part in (word.split("=", 1) if word.startswith("--output=") else [word])]
    output = ""
    if "--output" in left:
        place = left.index("--output")
        require(len(left) > place + 1, USAGE)
        output = left.pop(place + 1)
        left.pop(place)
        require(bool(output), "--output='': names no file; omit --output, or give the path of the page")
        parent = Path(output).expanduser().parent
        require(parent.is_dir(), f"--output={output}: there is no folder {parent}; name another file")
    unknown = [word for word in left if word.startswith("-")]
    require(not unknown, f"unknown flag '{unknown[0] if unknown else ''}': the flags are --output and --help")
    require(bool(left) and all(left), USAGE)
    folders = [Path(word).expanduser() for word in left]
    return folders, Path(output).expanduser() if output else folders[0] / "report.html"


def write(folders: Sequence[Path], output: Path) -> list[str]:
    """Write the HTML page, and return a list with one message for each file, table or line that could not be read."""
    from rltrain.monitoring.report.config_differences import COMMAND
    from rltrain.monitoring.report.page import write_report

    # The module rltrain.run.command is imported late, because it imports torch.
    from rltrain.run.command import command_of

    require(not output.is_dir(), f"--output={output}: is a folder; give the path of the page, such as report.html")
    older = any(not (folder / COMMAND).exists() for folder in folders)
    return write_report(folders, output, defaults=command_of([]) if older else None)


if __name__ == "__main__":
    sys.exit(main())
