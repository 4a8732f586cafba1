"""Inject faults into training runs, and print tables of the results. The exit status is 1 if a check of any run fails.

python -m tests.chaos --runs 120 --seed 0 --jobs 3
python -m tests.chaos --only actor:update_actor:KILL driver:checkpoint:KILL
python -m tests.chaos --asynchronous --runs 11
python -m tests.chaos --conversations --runs 60
python -m tests.chaos --conversations --asynchronous --runs 60
python -m tests.chaos --distillation
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.chaos.runs import ASYNCHRONOUS, CONVERSATIONS, Outcome, distillation, run, start, usual
from tests.chaos.strikes import (
    EVERY_PHASE,
    EVERY_ROLE,
    GENERATE,
    PHASES,
    START,
    Strike,
    distillation_kinds,
    draw,
    draw_in_conversations,
    is_strike,
    kinds,
    named,
)

HEAD = ("role", "phase", "signal", "step", "detected after", "serving again after", "steps repeated", "run", "wrong")
SUMMARY = (
    "role", "runs", "detected after: median, longest", "serving again after: median, longest", "most steps repeated",
)  # fmt: skip


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Format the result of a run with an injected fault as the cells of one table row."""
    strike = outcome.strike
    times = (f"{s:.1f} s" if s is not None else "-" for s in (outcome.detected_s, outcome.serving_s))
    wrong = "; ".join(outcome.wrong) or "nothing"
    return (
        strike.role, strike.phase, strike.signal, str(strike.step), *times, str(outcome.repeated),
        f"{outcome.seconds:.0f} s", wrong,
    )  # fmt: skip


def summary(outcomes: list[Outcome]) -> Iterator[str]:
    """Format a table of recovery times by role."""
    yield " | ".join(SUMMARY)
    for kind in sorted({outcome.strike.kind for outcome in outcomes}):
        own = [outcome for outcome in outcomes if outcome.strike.kind == kind]
        times = (_typical([outcome.detected_s for outcome in own]), _typical([outcome.serving_s for outcome in own]))
        yield " | ".join([kind, str(len(own)), *times, str(max(outcome.repeated for outcome in own))])


def _typical(seconds: list[float | None]) -> str:
    """Format the median and the maximum of the times, leaving out unknown times."""
    known = [one for one in seconds if one is not None]
    return f"{statistics.median(known):.1f} s, {max(known):.1f} s" if known else "-"


def drawn(arguments: argparse.Namespace) -> list[Strike]:
    """Draw the faults of the kind of runs that the command line requests."""
    every = distillation_kinds() if arguments.distillation else kinds()
    count = len(every) if arguments.runs is None else arguments.runs
    if arguments.conversations:
        phases = PHASES if arguments.asynchronous else (GENERATE,)
        return draw_in_conversations(count, seed=arguments.seed, phases=phases)
    return draw(count, seed=arguments.seed, of=every)


def parsed() -> argparse.Namespace:
    """Parse the command line, and end the program if a named fault does not exist."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, help="number of runs; by default, every kind of fault comes once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROLE:PHASE:SIGNAL")
    parser.add_argument("--asynchronous", action="store_true", help="generate answers while the actor trains")
    variants = parser.add_mutually_exclusive_group()
    variants.add_argument("--conversations", action="store_true", help="make each answer a conversation")
    variants.add_argument("--distillation", action="store_true", help="learn from a teacher on the training ranks")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time; a run uses less than one core")
    parser.add_argument("--out", type=Path, help="folder for the runs; by default, a temporary folder")
    arguments = parser.parse_args()
    if wrong := [text for text in arguments.only if not is_strike(text)]:
        parser.error(
            f"{wrong[0]}: not ROLE:PHASE:SIGNAL with a role of {', '.join(EVERY_ROLE)}, a phase of "
            f"{', '.join(EVERY_PHASE)}, and KILL or STOP (the driver: KILL or HUP, Ray's daemons: KILL); or "
            f"driver:{START}:KILL"
        )
    return arguments


def main() -> int:
    """Do a training run for each fault that the command line requests, and print the tables of results."""
    arguments = parsed()
    strikes = named(arguments.only) if arguments.only else drawn(arguments)
    overrides = [*ASYNCHRONOUS * arguments.asynchronous, *CONVERSATIONS * arguments.conversations]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="rltrain-chaos-") as temporary:
        folder = arguments.out or Path(temporary)
        if arguments.distillation:
            # torch is loaded only in another process, because the processes of the runs are forked from this one.
            with ProcessPoolExecutor(1) as process:
                overrides += process.submit(distillation, folder.absolute()).result()
        undisturbed = folder / "undisturbed"
        life = start(undisturbed, None, {}, *overrides)
        if life.status != 0 or life.left:
            sys.stdout.write(f"the undisturbed run failed: {'; '.join([life.said, *life.left])}\n")
            return 1
        usual_s = usual(undisturbed)
        sys.stdout.write(" | ".join(HEAD) + "\n")
        # Orphans of a run become children of the process that started the run, so each run has a process of its own.
        with ProcessPoolExecutor(arguments.jobs) as jobs:
            started = [
                jobs.submit(run, strike, folder / strike.name, undisturbed, usual_s, *overrides) for strike in strikes
            ]
            for done in as_completed(started):
                outcomes.append(done.result())
                sys.stdout.write(" | ".join(cells(outcomes[-1])) + "\n")
                sys.stdout.flush()
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    sys.stdout.write("\n".join([*summary(outcomes), f"{len(outcomes)} runs, {wrong} with failed checks"]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
