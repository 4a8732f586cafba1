"""Generation beside training: a step at staleness 1 against the longer of its two halves, and what is learnt.

Each half is measured in a synchronous run, where engine and trainer take turns and each has one thread, so that each is
alone on its core. Generation is tuned to the time of training by the number of sequences that the engine runs at once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, stdev

from tests.benchmarks.row import Row

COMMAND = "python -m tests.benchmarks.overlap"
TUNED = [  # one optimizer step a step, so many answers that each half takes seconds, and weights that stand still
    "trainer.prompts_per_step=640", "trainer.prompts_per_minibatch=640", "data.val=null", "actor.lr=1e-12",
    "placement.threads_per_worker=1", "trainer.sample_every=0",
]  # fmt: skip
TRAINING = ("old_log_probs", "advantages", "update_actor")
AT_ONCE = (2048, 1024, 512, 256, 128, 64)
SEEDS = (0, 1, 2)


def run() -> list[Row]:
    """Both rows."""
    return [overlap(), learning()]


def overlap() -> Row:
    """max(T_generate, T_train) / T_step."""
    halves = {}
    for count in AT_ONCE:
        steps = job(*TUNED, f"rollout.max_concurrent_sequences={count}", "trainer.total_steps=4")[1:]
        halves[count] = tuple(
            median(sum(step[f"timing/{phase}"] for phase in phases) for step in steps)
            for phases in (("generate", "rewards"), TRAINING)
        )
        if halves[count][0] > halves[count][1]:
            break
    count = min(halves, key=lambda number: abs(halves[number][0] / halves[number][1] - 1))
    generate, train = halves[count]
    # The first step waits for its answers, and the last generates none.
    steps = job(*TUNED, f"rollout.max_concurrent_sequences={count}", "trainer.max_staleness=1", "trainer.total_steps=8")
    step = median(row["timing/step"] for row in steps[2:-1])
    return Row(
        name="a step at staleness 1", ratio=max(generate, train) / step, unit="of it is the longer half",
        target=">= 0.90", ours=f"{step:.2f} s a step",
        theirs=f"generation {generate:.2f} s, training {train:.2f} s, each alone",
        notes=f"5,120 answers, vLLM with {count} sequences at once, one thread each; load {os.getloadavg()[0]:.1f}",
        command=COMMAND,
    )  # fmt: skip


def learning() -> Row:
    """Held-out accuracy after as many steps."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for seed in SEEDS:
        for staleness, accuracies in found.items():
            accuracies.append(
                job(f"trainer.max_staleness={staleness}", f"trainer.seed={seed}", "trainer.total_steps=40", last=True)
            )
    means = {staleness: mean(accuracies) for staleness, accuracies in found.items()}
    return Row(
        name="accuracy after 40 steps", ratio=means[1] / means[0], unit="of that at staleness 0", target="within noise",
        ours=f"{means[1]:.1%} +- {stdev(found[1]):.1%}", theirs=f"{means[0]:.1%} +- {stdev(found[0]):.1%}",
        notes=f"held-out, sampled; {len(SEEDS)} seeds each, mean and standard deviation", command=COMMAND,
    )  # fmt: skip


def job(*overrides: str, last: bool = False):
    """Metrics of each step of a run; or, with `last`, its last evaluation's accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rltrain.main", *overrides, f"trainer.output_dir={output}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        name = "evaluations.jsonl" if last else "metrics.jsonl"
        rows = [json.loads(line) for line in (output / name).read_text().splitlines()]
    return rows[-1]["eval/sampled_accuracy"] if last else rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("overlap", "learning"))
    chosen = parser.parse_args().only
    for row in run() if chosen is None else [{"overlap": overlap, "learning": learning}[chosen]()]:
        print(row)  # noqa: T201
