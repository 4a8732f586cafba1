"""Code shared by `rltrain.doctor`, `rltrain.export` and `rltrain.report`: usage, one-line errors and exit statuses."""

import sys
from collections.abc import Callable, Sequence

from rltrain.base.errors import ConfigError, RLTrainError, described, one_line

LONGEST = 1000  # Maximum length of a printed line, in characters.
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # Exit statuses of a program.


def run_program(
    program: Callable[[list[str]], int | None],
    usage: str,
    argv: Sequence[str] | None,
    *,
    remedy: Callable[[OSError], str],
) -> int:
    """Run a program with command-line arguments, handle the program's errors, and return the exit status.

    An error is printed as one line on stderr. If `--help` is the only argument, the program's usage is printed.

    Args:
        program: function that gets the arguments, prints its results, and returns the exit status (None counts as 0).
        usage: text that the option `--help` prints.
        argv: the command-line arguments. If `argv` is None, the arguments of this process are used.
        remedy: function that returns the error message for an OSError.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--help"], ["-h"]):
        print(usage)  # noqa: T201
        return 0
    try:
        return program(words) or 0
    except RLTrainError as error:
        return _fail(str(error), BAD_INPUT if isinstance(error, ConfigError) else FAILED)
    except OSError as error:
        return _fail(remedy(error), FAILED)
    except Exception as error:  # A file system driver, or the reader of a damaged file, can raise any exception.
        return _fail(f"unexpected {described(error, LONGEST)}", FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(message: str, status: int) -> int:
    print(f"error: {one_line(' '.join(message.split()), LONGEST)}", file=sys.stderr)  # noqa: T201
    return status
