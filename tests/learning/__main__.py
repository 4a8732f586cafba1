"""Measure what presets learn over three seeds, and write the results to config/algorithm/README.md.

    python -m tests.learning presets [NAME ...] [--jobs 2]   # all presets, or the named ones
    python -m tests.learning claims [NAME ...] [--jobs 2]    # all comparisons, or the named ones

Complete runs are kept in build/learning and are not repeated. Remove this folder after a change of the code.
"""

import argparse
import sys

from tests.learning.claims import CLAIMS
from tests.learning.presets import measure, names, write
from tests.learning.trials import ROOT


def main() -> int:
    """Run the chosen measurements."""
    parser = argparse.ArgumentParser(prog="python -m tests.learning", description=__doc__)
    parser.add_argument("what", choices=("presets", "claims"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time")
    arguments = parser.parse_args()
    known = names() if arguments.what == "presets" else list(CLAIMS)
    if unknown := sorted(set(arguments.names) - set(known)):
        parser.error(f"{', '.join(unknown)}: not known; known are {', '.join(known)}")
    output, wanted = ROOT / "build" / "learning", arguments.names or known
    if arguments.what == "presets":
        write(measure(wanted, output, arguments.jobs), output)
        return 0
    for name in wanted:
        for line in CLAIMS[name](output, arguments.jobs):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
