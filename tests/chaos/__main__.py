"""`python -m tests.chaos`: runs that are struck, and a table of what came of each; status 1 if any went wrong.

python -m tests.chaos --runs 66 --seed 0
python -m tests.chaos --only actor:update_actor:KILL driver:checkpoint:KILL
python -m tests.chaos --asynchronous --runs 11
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.runs import ASYNCHRONOUS, Outcome, run, start, usual
from tests.chaos.strikes import PHASES, ROLES, draw, is_strike, named

HEAD = ("role", "phase", "signal", "step", "detected after", "serving again after", "steps repeated", "run", "wrong")


def cells(outcome: Outcome) -> tuple[str, ...]:
    """One line of the table."""
    strike = outcome.strike
    times = (f"{s:.1f} s" if s is not None else "-" for s in (outcome.detected_s, outcome.serving_s))
    wrong = "; ".join(outcome.wrong) or "nothing"
    return (
        strike.role, strike.phase, strike.signal, str(strike.step), *times, str(outcome.repeated),
        f"{outcome.seconds:.0f} s", wrong,
    )  # fmt: skip


def summary(outcomes: list[Outcome]) -> Iterator[str]:
    """Recovery times by role."""
    for role in dict.fromkeys(outcome.strike.role for outcome in outcomes):
        own = [
            outcome.serving_s for outcome in outcomes if outcome.strike.role == role and outcome.serving_s is not None
        ]
        if own:
            yield (
                f"{role}: serving again after {statistics.median(own):.1f} s (median), {max(own):.1f} s (longest of "
                f"{len(own)}); most steps repeated {max(o.repeated for o in outcomes if o.strike.role == role)}"
            )


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=66)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROLE:PHASE:SIGNAL")
    parser.add_argument("--asynchronous", action="store_true", help="with answers under way while the actor trains")
    parser.add_argument("--out", type=Path, help="folder for the runs; kept where it is given")
    arguments = parser.parse_args()
    if wrong := [text for text in arguments.only if not is_strike(text)]:
        parser.error(f"{wrong[0]}: not ROLE:PHASE:SIGNAL with {', '.join(ROLES)}; {', '.join(PHASES)}; KILL or STOP")
    strikes = named(arguments.only) if arguments.only else draw(arguments.runs, seed=arguments.seed)
    outcomes, overrides = [], ASYNCHRONOUS if arguments.asynchronous else []
    with tempfile.TemporaryDirectory(prefix="rltrain-chaos-") as temporary:
        folder = arguments.out or Path(temporary)
        undisturbed = folder / "undisturbed"
        status, said = start(undisturbed, None, {}, *overrides)
        if status:
            sys.stdout.write(f"the undisturbed run failed: {said}\n")
            return 1
        usual_s = usual(undisturbed)
        sys.stdout.write(" | ".join(HEAD) + "\n")
        for strike in strikes:
            outcomes.append(run(strike, folder / strike.name, undisturbed, usual_s, *overrides))
            sys.stdout.write(" | ".join(cells(outcomes[-1])) + "\n")
            sys.stdout.flush()
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    sys.stdout.write("\n".join([*summary(outcomes), f"{len(outcomes)} runs, {wrong} with something wrong"]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
