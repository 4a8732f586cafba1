"""Runs of `python -m rltrain.main` that differ in their settings and seeds, and the accuracies that the runs reach."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).parents[2]
# The tiny models of the built-in tasks are fastest in one process with one thread.
COMMON = ("placement=inprocess", "rollout=hf", "trainer.sample_every=0", "trainer.eval_samples=4")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        name: Name of the trial, which is the same for all seeds.
        seed: Seed of the run.
        settings: Command-line arguments of the run, besides `COMMON` and the seed.
    """

    name: str
    seed: int
    settings: tuple[str, ...]

    def folder(self, output: Path) -> Path:
        """Return the output folder of the run."""
        return output / self.name.replace(" ", "_") / f"seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The evaluations of one run.

    Attributes:
        sampled: Mean accuracy of sampled answers to the held-out prompts, by the number of training steps before it.
        greedy: Accuracy of greedy answers to the held-out prompts, by the number of training steps before it.
        solved: Share of the held-out prompts with at least one correct answer among the four sampled answers, by the
            number of training steps before it.
    """

    sampled: dict[int, float]
    greedy: dict[int, float]
    solved: dict[int, float]

    @property
    def last(self) -> float:
        """Return the sampled accuracy after training."""
        return max(self.sampled.items())[1]


def steps_to(accuracies: Mapping[int, float], goal: float) -> float:
    """Return the first step at which an accuracy is at least `goal`, or infinity.

    Args:
        accuracies: accuracies by the number of training steps before them.
        goal: the accuracy to reach.
    """
    return next((float(step) for step, accuracy in sorted(accuracies.items()) if accuracy >= goal), math.inf)


def over_seeds(name: str, seeds: Iterable[int], *settings: str) -> list[Trial]:
    """Return one trial for each seed, with the same settings."""
    return [Trial(name, seed, settings) for seed in seeds]


def run_all(trials: Sequence[Trial], output: Path, jobs: int) -> dict[str, list[Outcome]]:
    """Run trials, `jobs` at a time, and return the outcomes of each name in the order of the seeds.

    A trial that is already complete in `output` is not run again.
    """
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda trial: run_one(trial, output), trials))
    found = dict[str, list[Outcome]]()
    for trial, outcome in zip(trials, outcomes, strict=True):
        found.setdefault(trial.name, []).append(outcome)
    return found


def run_one(trial: Trial, output: Path) -> Outcome:
    """Run one trial, unless it is complete, and read its outcome.

    Raises:
        RuntimeError: the run fails; the message has the last lines of its output.
    """
    folder = trial.folder(output)
    if not (folder / "model" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = (f"trainer.seed={trial.seed}", f"trainer.output_dir={folder}")
        command = [sys.executable, "-m", "rltrain.main", *COMMON, *trial.settings, *own]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{trial.name}, seed {trial.seed}: {(done.stdout + done.stderr)[-800:]}")
    outcome = read(folder)
    sys.stderr.write(f"{trial.name}, seed {trial.seed}: {outcome.last:.1%}\n")
    return outcome


def read(folder: Path) -> Outcome:
    """Read the outcome of the complete run in a folder."""
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    return Outcome(
        {int(row["step"]): row["eval/sampled_accuracy"] for row in evaluations},
        {int(row["step"]): row["eval/greedy_accuracy"] for row in evaluations},
        {int(row["step"]): row["eval/sampled_pass_at_4"] for row in evaluations},
    )


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation of shares, such as `94.2% +- 0.8`."""
    return f"{fmean(values):.1%} +- {100 * stdev(values):.1f}"
