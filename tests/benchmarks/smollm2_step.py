"""Whole training steps of SmolLM2-135M-Instruct, with and without shared prefixes.

The model learns the sums of `make demo-llm`, with answers of up to 10 tokens. The prompts have about 45 tokens, and
each prompt has eight answers. The two sides run alternately, twice each. The model is installed by `make demo-llm`.

    python -m tests.benchmarks.smollm2_step
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.job import describe, in_turn, median_of, rltrain_side
from tests.benchmarks.row import Row
from tests.benchmarks.trl_smollm2 import sums_job

ROUNDS = 2
THREADS = "placement.threads_per_worker=2"


def run() -> list[Row]:
    """Run the benchmark, and return its row of the results table."""
    job = replace(sums_job(), steps=4, max_response_length=10, eval_every=0)
    sides = [rltrain_side("shared", THREADS), rltrain_side("not shared", THREADS, "actor.share_prefixes=false")]
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as name:
        shared, unshared = in_turn(sides, job, Path(name), rounds=ROUNDS)
    ours, theirs = (median_of(runs, lambda run: run.step_s(job.warm_up)) for runs in (shared, unshared))
    return [
        Row(
            name="shared prefixes: whole step, SmolLM2-135M",
            ratio=theirs / ours,
            unit="times as fast as without sharing",
            target=">= 2",
            ours=f"{ours:.1f} s",
            theirs=f"{theirs:.1f} s",
            notes=f"vLLM, 2 threads a worker; 16 prompts with 8 answers; {describe(shared)}; {describe(unshared)}",
            command="make bench ARGS=smollm2_step",
            extra={"ours_s": ours, "theirs_s": theirs},
        )
    ]


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
