"""Compare rltrain with TRL's GRPOTrainer on answers of very different lengths.

A third of the answers do not end before the limit of 256 tokens.

The initial model has 5M parameters. The learning rate is so small that a third of the answers are still endless at the
end of training.

    python -m tests.benchmarks.trl_rambling
"""

import sys
import tempfile
from pathlib import Path

from tests.benchmarks.job import Job, best, in_turn
from tests.benchmarks.rambling import LIMIT, rambling_start
from tests.benchmarks.row import Row
from tests.benchmarks.trl import ROUNDS, our_sides, seconds_of, step_row, trl_sides


def run() -> list[Row]:
    """Compare the seconds per step of TRL and rltrain."""
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as name:
        folder = Path(name)
        job = Job(
            str(rambling_start()),
            steps=5,
            prompts_per_step=16,
            minibatches=4,
            max_response_length=LIMIT,
            lr=1e-7,
            warm_up=1,
        )
        theirs, their_trials = best(trl_sides(), job, folder / "trial-theirs", steps=2)
        ours, our_trials = best(
            our_sides("rollout.vllm.kv_cache_mb=512")[-1:] + our_sides()[2:4],
            job,
            folder / "trial-ours",
            steps=2,
        )
        runs = in_turn([ours, theirs], job, folder, rounds=ROUNDS)
        notes = f"trials, s per step: {seconds_of(our_trials | their_trials)}; 16 x 8 answers per step"
        return [
            step_row(
                "rambling answers, 5M parameters", runs[0], runs[1], job, ">= 2", notes, "make bench ARGS=trl_rambling"
            )
        ]


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
