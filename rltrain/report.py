"""Writing of a report about one or several runs as one HTML page: `python -m rltrain.report RUN_DIR [RUN_DIR ...]
[--output FILE]`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rltrain.base.errors import ConfigError, RLTrainError, described, one_line
from rltrain.settings.typed import require

LONGEST = 1000  # maximum length of a printed line, in characters
USAGE = "usage: python -m rltrain.report RUN_DIR [RUN_DIR ...] [--output FILE] (the output folders of runs)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with command-line arguments, and return the exit status.

    Errors are printed as one line on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--help"], ["-h"]):
        print(USAGE)  # noqa: T201
        return 0
    try:
        folders, output = parse(words)
        notes = write(folders, output)
    except RLTrainError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        return _fail(f"{error.filename or output}: {error.strerror or error}; name another file with --output", 1)
    except Exception as error:  # the reader of a damaged file may raise any exception
        return _fail(f"unexpected {described(error, LONGEST)}", 1)
    except KeyboardInterrupt:
        return 130
    for note in notes:
        print(f"note: {one_line(note, LONGEST)}", file=sys.stderr)  # noqa: T201
    print(output)  # noqa: T201
    return 0


def parse(words: Sequence[str]) -> tuple[list[Path], Path]:
    """Return the folders of the runs and the path of the HTML page, given the command-line arguments.

    By default, the page is `report.html` in the folder of the first run.
    """
    left, output = list(words), ""
    if "--output" in left:
        place = left.index("--output")
        require(len(left) > place + 1, USAGE)
        output = left.pop(place + 1)
        left.pop(place)
        require(bool(output), "--output='': names no file; leave it out, or give the path of the page")
    unknown = [word for word in left if word.startswith("-")]
    require(not unknown, f"unknown flag '{unknown[0] if unknown else ''}': the flags are --output and --help")
    require(bool(left) and all(left), USAGE)
    folders = [Path(word).expanduser() for word in left]
    return folders, Path(output).expanduser() if output else folders[0] / "report.html"


def write(folders: Sequence[Path], output: Path) -> list[str]:
    """Write the HTML page, and return a list with one line about each file that could not be read."""
    from rltrain.monitoring.report.config_differences import COMMAND
    from rltrain.monitoring.report.page import write_report
    from rltrain.run.command import command_of  # this module imports torch, which takes seconds

    require(not output.is_dir(), f"--output={output}: is a folder; give the path of the page, such as report.html")
    older = any(not (folder / COMMAND).exists() for folder in folders)
    return write_report(folders, output, defaults=command_of([]) if older else None)


def _fail(message: str, status: int) -> int:
    print(f"error: {one_line(' '.join(message.split()), LONGEST)}", file=sys.stderr)  # noqa: T201
    return status


if __name__ == "__main__":
    sys.exit(main())
