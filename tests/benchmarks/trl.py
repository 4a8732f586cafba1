"""Compare rltrain with TRL's GRPOTrainer on the same model, prompts, reward and number of optimizer steps.

Each trainer runs with its fastest engine.

TRL is installed in a virtual environment of its own, in `build/trl` (which `make bench` makes) or in the folder
`TRL_VENV`. The time to the goal is also measured for a run of rltrain at staleness 1. The environment variable
`BENCH_STALENESS` replaces the staleness 1 by another value.

    python -m tests.benchmarks.trl
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.job import ROOT, Job, Run, Side, best, describe, in_turn, median_of, program_side, rltrain_side
from tests.benchmarks.row import Row

STEPS = int(os.environ.get("BENCH_STEPS", "48"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
GOAL = 0.9


def trl_sides() -> list[Side]:
    """Return the configurations of TRL to try: both engines, with one and with two threads."""
    python = Path(os.environ.get("TRL_VENV", ROOT / "build" / "trl")) / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"{python} does not exist: run `make bench`, which makes the environment, or set TRL_VENV")
    return [
        program_side(f"TRL {engine} {threads} threads", python, "tests.benchmarks.trl_side", engine, threads=threads)
        for engine in ("hf", "vllm")
        for threads in (1, 2)
    ]


def our_sides(*overrides: str) -> list[Side]:
    """Return the configurations of rltrain to try: the engines and placements that two CPU cores allow."""
    return [
        rltrain_side("hf in process", "rollout=hf", "placement=inprocess", *overrides),
        rltrain_side("hf in process 2 threads", "rollout=hf", "placement=inprocess", *overrides, threads=2),
        rltrain_side("hf", "rollout=hf", *overrides),
        rltrain_side(
            "hf two replicas",
            "rollout=hf",
            "placement.rollout_replicas=2",
            "placement.threads_per_worker=1",
            *overrides,
        ),
        rltrain_side("vllm", *overrides),
    ]


def median_rows(folder: Path) -> list[Row]:
    """Compare seconds per step and seconds to the goal on the built-in task."""
    from rltrain.tasks import TASKS
    from rltrain.tasks.tiny_model import cached_start

    job = Job(str(cached_start(TASKS["median"])), STEPS)
    theirs, their_trials = best(trl_sides(), job, folder / "trial-theirs")
    ours, our_trials = best(our_sides(), job, folder / "trial-ours")
    staleness = os.environ.get("BENCH_STALENESS", "1")
    stale, stale_trials = best(our_sides(f"trainer.max_staleness={staleness}"), job, folder / "trial-stale")
    runs = in_turn([ours, theirs, stale], job, folder, rounds=ROUNDS)
    fresh, late = (f"trials, s per step: {seconds_of(trials)}" for trials in (our_trials | their_trials, stale_trials))
    return [
        step_row("median", runs[0], runs[1], job, ">= 1.1", fresh, "make bench ARGS=trl"),
        goal_row("staleness 0", runs[0], runs[1], job, "", fresh),
        goal_row(f"staleness {staleness}", runs[2], runs[1], job, ">= 1.4", late),
    ]


def step_row(task: str, ours: list[Run], theirs: list[Run], job: Job, target: str, notes: str, command: str) -> Row:
    """Make the row that divides TRL's seconds per step by rltrain's."""
    a, b = (median_of(runs, lambda run: run.step_s(job.warm_up)) for runs in (ours, theirs))
    lengths = "/".join(f"{median_of(runs, lambda run: run.lengths[-1]):.1f}" for runs in (ours, theirs))
    return Row(
        name=f"time per step against TRL, {task}", ratio=b / a, unit="times less time per step", target=target,
        ours=f"{a:.3f} s, {ours[0].side}", theirs=f"{b:.3f} s, {theirs[0].side}",
        notes=f"{describe(ours)}; {describe(theirs)}; tokens per answer in the last step {lengths}; {notes}",
        command=command,
        extra={
            "ours_s": a, "theirs_s": b,
            "ours_peak_mb": max(run.peak_mb for run in ours), "theirs_peak_mb": max(run.peak_mb for run in theirs),
        },
    )  # fmt: skip


def goal_row(which: str, ours: list[Run], theirs: list[Run], job: Job, target: str, notes: str) -> Row:
    """Make the row that divides TRL's training seconds to the goal by rltrain's.

    A run reaches the goal when the mean reward of three steps is at least `GOAL`.

    The goal is near the best reward that the model can reach. The time to the goal therefore varies much with the seed,
    so medians over runs are compared.
    """
    a, b = (median_of(runs, lambda run: run.to_reward_s(GOAL, job.warm_up)) for runs in (ours, theirs))
    steps = " and ".join("/".join(f"{run.steps_to(GOAL):.0f}" for run in runs) for runs in (ours, theirs))
    return Row(
        name=f"time until {GOAL:.0%} reward against TRL, {which}", ratio=b / a, unit="times less time", target=target,
        ours=f"{a:.1f} s, {ours[0].side}", theirs=f"{b:.1f} s, {theirs[0].side}",
        notes=f"reached after {steps} steps of {job.steps}; {describe(ours)}; {describe(theirs)}; {notes}",
        command="make bench ARGS=trl",
        extra={"ours_s": a, "theirs_s": b},
    )  # fmt: skip


def seconds_of(trials: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in trials.items())


def run() -> list[Row]:
    """Make all rows of the benchmark."""
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as folder:
        return median_rows(Path(folder))


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
