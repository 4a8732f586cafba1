"""Draw a random sample of the mutants of Cosmic Ray sessions, or report how many mutants the tests killed.

    python tests/mutation/draw.py sample SESSION... --count 300 --seed 0
    python tests/mutation/draw.py report SESSION...

`sample` keeps `count` mutants in total, spread over the sessions, and deletes all others. `report` prints how many
mutants were killed, and each surviving mutant with its change.
"""

import argparse
import random
import sys

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkItem


def sample(sessions: list[str], count: int, seed: int) -> None:
    """Keep `count` randomly drawn mutants in total, spread over the Cosmic Ray databases so that no mutant runs twice.

    Of n databases, database k keeps every n-th drawn mutant, starting with mutant k.
    """
    for number, path in enumerate(sessions):
        with use_db(path) as db:
            every = sorted(db.work_items, key=lambda item: str(item.mutations))
            drawn = random.Random(seed).sample(every, min(count, len(every)))
            total = len(every)
            db.clear()
            db.add_work_items(drawn[number :: len(sessions)])
            print(f"{path}: kept {db.num_work_items} of {total} mutants", file=sys.stderr)  # noqa: T201


def report(sessions: list[str]) -> None:
    """Print the share of killed mutants and all survivors."""
    outcomes, survivors = [], []
    for path in sessions:
        with use_db(path, WorkDB.Mode.open) as db:
            items = {item.job_id: item for item in db.work_items}
            for job, result in db.results:
                outcomes.append(result.test_outcome)
                if result.test_outcome == TestOutcome.SURVIVED:
                    survivors.append((items[job], result.diff))
    killed = sum(outcome != TestOutcome.SURVIVED for outcome in outcomes)
    for item, diff in survivors:
        print(describe(item), diff, sep="\n")  # noqa: T201
    print(f"{killed} of {len(outcomes)} mutants killed: {killed / max(len(outcomes), 1):.1%}")  # noqa: T201


def describe(item: WorkItem) -> str:
    """Return the module, line and mutation operator of each mutation of a mutant, as one line of text."""
    return "; ".join(f"{m.module_path}:{m.start_pos[0]} {m.operator_name} {m.occurrence}" for m in item.mutations)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("sample", "report"))
    parser.add_argument("sessions", nargs="+")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.action == "sample":
        sample(arguments.sessions, arguments.count, arguments.seed)
    else:
        report(arguments.sessions)
