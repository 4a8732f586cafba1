"""Compare rltrain with TRL's GRPOTrainer on a real language model, SmolLM2-135M-Instruct.

The model learns the sums of `make demo-llm`. Both trainers have the same prompts in the same order, the same reward and
the same number of optimizer steps. TRL runs with vLLM and with transformers, on two threads. rltrain runs with its
fastest engine and placement, at staleness 0 and at staleness 1. Every side is evaluated on the same held-out sums.

The model is installed by `make demo-llm`, and TRL by `make bench`.

    python -m tests.benchmarks.trl_smollm2
"""

import math
import os
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.job import ROOT, Job, Run, Side, best, describe, in_turn, median_of, rltrain_side
from tests.benchmarks.row import Row
from tests.benchmarks.trl import seconds_of, trl_sides

STEPS = int(os.environ.get("BENCH_STEPS", "9"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "1"))
GOAL = 0.7
MODEL = ROOT / "build" / "smollm2" / "model"
COMMAND = "make bench ARGS=trl_smollm2"


def sums_job() -> Job:
    """Return the job with the numbers of examples/demo_llm/sums.yaml."""
    if not (MODEL / "config.json").exists():
        raise RuntimeError(f"{MODEL} does not exist: run `make demo-llm`, which installs the model")
    return Job(
        str(MODEL),
        STEPS,
        task="sums",
        prompts_per_step=16,
        minibatches=2,
        max_prompt_length=64,
        max_response_length=32,
        lr=1e-5,
        stop_id=2,
        eval_every=3,
        warm_up=1,
    )


def our_sides(*overrides: str) -> list[Side]:
    """Return the configurations of rltrain to try."""
    return [
        rltrain_side("vllm", *overrides),
        rltrain_side("vllm 2 threads a worker", "placement.threads_per_worker=2", *overrides),
        rltrain_side("hf in process 2 threads", "rollout=hf", "placement=inprocess", *overrides, threads=2),
    ]


def rows_against(ours: list[Run], theirs: list[Run], job: Job, which: str, notes: str) -> list[Row]:
    """Return two rows of results: how many times as long as rltrain TRL takes for a step, and to reach the goal.

    If TRL does not reach the goal, the time of all its training steps takes the place of the time to the goal, so the
    ratio is a lower bound, and the row says so.
    """
    rows = []
    notes = f"{describe(ours)}; {describe(theirs)}; {notes}"
    goal_notes = f"held-out reward {held_out(ours)} and {held_out(theirs)}; {notes}"
    for name, figure, note in (
        ("step", lambda run: run.step_s(job.warm_up), notes),
        (f"time until {GOAL:.0%} held-out reward", lambda run: run.to_held_out_s(GOAL, job.warm_up), goal_notes),
    ):
        a, b = median_of(ours, figure), median_of(theirs, figure)
        theirs_text = f"{b:.1f} s"
        if math.isinf(b):
            b = job.steps * median_of(theirs, lambda run: run.step_s(job.warm_up))
            theirs_text = f"not reached in {job.steps} steps, {b:.1f} s: the ratio is a lower bound"
        rows.append(
            Row(
                name=f"{name}, SmolLM2-135M, against {theirs[0].side}, {which}",
                ratio=b / a,
                unit="times less time",
                target=">= 2",
                ours=f"{a:.1f} s, {ours[0].side}",
                theirs=f"{theirs_text}, {theirs[0].side}",
                notes=note,
                command=COMMAND,
                extra={"ours_s": a, "theirs_s": b},
            )
        )
    return rows


def held_out(runs: list[Run]) -> str:
    """Return the held-out rewards of each run by step, such as `3: 0.41, 6: 0.72`."""
    return " | ".join(", ".join(f"{step}: {reward:.2f}" for step, reward in run.held_out.items()) for run in runs)


def run() -> list[Row]:
    """Make all rows of the benchmark."""
    job = sums_job()
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as name:
        folder = Path(name)
        ours, trials = best(our_sides(), job, folder / "trial", steps=2)
        stale, stale_trials = best(our_sides("trainer.max_staleness=1")[:2], job, folder / "trial-stale", steps=2)
        theirs = [side for side in trl_sides() if side.threads == 2]
        runs = in_turn([ours, stale, *theirs], job, folder, rounds=ROUNDS)
    notes = f"trials, s per step: {seconds_of(trials)}; at staleness 1: {seconds_of(stale_trials)}"
    return [
        row
        for their_runs in runs[2:]
        for own, which in ((runs[0], "staleness 0"), (runs[1], "staleness 1"))
        for row in rows_against(own, their_runs, job, which, notes)
    ]


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
