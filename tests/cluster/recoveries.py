"""Print how long runs on a cluster take to recover from each fault; `python -m tests.cluster.recoveries` needs root.

python -m tests.cluster.recoveries
python -m tests.cluster.recoveries --only "link down" --out build/recoveries
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from faults import FAULTS, Fault, Outcome, suffer
from hosts import Cluster, hosts

HEAD = ("fault", "phase", "noticed or ended after", "trains again after", "steps repeated", "exit status")


def cells(fault: Fault, outcome: Outcome) -> tuple[str, ...]:
    """Format the outcome of a fault as the cells of one table row."""
    noticed, trains = (f"{s:.1f} s" if s is not None else "-" for s in (outcome.detected_s, outcome.trains_s))
    return fault.name, fault.phase, noticed, trains, str(outcome.repeated), str(outcome.status)


def main() -> int:
    """Do a run for each fault, and print the table of recovery times. The exit status is 1 if a run has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.recoveries", description=__doc__)
    parser.add_argument("--only", default="", help="run only faults whose name or phase contains this text")
    parser.add_argument("--out", type=Path, help="folder for the runs; by default, a temporary folder")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rltrain-faults-") as temporary, hosts(3) as made:
        cluster = Cluster(made, {"OMP_NUM_THREADS": "1"})
        sys.stdout.write(" | ".join(HEAD) + "\n")
        chosen = [fault for fault in FAULTS if arguments.only in f"{fault.name} {fault.phase}"]
        for number, fault in enumerate(chosen):
            outcome = suffer(cluster, fault, (arguments.out or Path(temporary)) / str(number))
            sys.stdout.write(" | ".join(cells(fault, outcome)) + "\n")
            sys.stdout.flush()
            failed += outcome.status != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
