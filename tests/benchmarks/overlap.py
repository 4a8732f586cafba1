"""Measures how well generation and training overlap at staleness 1, and whether the staleness affects learning.

A training step has two halves: generation and training. The benchmark compares the time of a step at staleness 1 with
the longer of the times that generation and training take alone. Before the measurement, the number of concurrent
sequences of the engine is tuned so that generation takes about as long as training.

A single run then changes its staleness every few steps, where staleness is the number of training steps by which
generation runs ahead. At staleness 1, the engine and the trainer work at the same time, with one thread each. At
staleness 0, generation and training alternate. Some steps at staleness 0 use the whole machine, and the next steps
confine all processes to one core. In the steps on the whole machine, the second core does the work of Ray and the
driver. In the steps on one core, the times of generation and training include the work of Ray and the driver.

The compared steps are only seconds apart, because the machine's speed changes within minutes. The model has 4.9M
parameters. With the smaller built-in model, a step of the same duration would need thousands of answers, and the driver
would spend much time on handling answers. The CPU seconds show whether generation and training were both busy all the
time. The remaining loss of time arises because a core is slower while the other core is also busy.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from unittest.mock import patch

from rltrain import main as program
from rltrain.trajectories.prompt_groups import PromptGroups
from tests.benchmarks.job import Job, Run, Side, tree, watch
from tests.benchmarks.rambling import rambling_start
from tests.benchmarks.row import Row

CHANGING = "import sys; from tests.benchmarks.overlap import changing; sys.exit(changing())"
COMMAND = "python -m tests.benchmarks.overlap"
# The overrides give each training step one optimizer step, and so many answers that generation and training each take
# seconds. The tiny learning rate leaves the weights almost unchanged.
TUNED = [
    "trainer.prompts_per_step=128", "trainer.prompts_per_minibatch=128", "data.val=null", "actor.lr=1e-12",
    "placement.threads_per_worker=1", "trainer.sample_every=0",
]  # fmt: skip
GENERATION, TRAINING = ("generate", "rewards"), ("old_log_probs", "advantages", "update_actor")
AT_ONCE = (16, 12, 10, 8)
# Staleness of each step in a cycle. The step after a change of the staleness is not measured, because prompt groups
# that were generated at the previous staleness may be left over.
CYCLE = (1, 1, 1, 0, 0, 0, 0, 0)
BESIDE, ALONE, CONFINED = slice(1, 3), slice(4, 6), slice(6, 8)
CYCLES = 6  # The first cycle is a warm-up.
LOOK_S = 0.1  # Seconds between reads of the progress file, which take CPU time from the busy cores.
SEEDS = (0, 1, 2)


def run() -> list[Row]:
    """Run all measurements, and return their results as rows."""
    return [*overlap(), learning()]


def overlap() -> list[Row]:
    """Measure max(T_generate, T_train) / T_step with T_step at staleness 1, and measure how busy the cores are."""
    count = tuned()
    with tempfile.TemporaryDirectory() as folder:
        side = Side("changing", lambda home, job, _: changing_command(home, job, count), "out/metrics.jsonl")
        whole = Job("", len(CYCLE) * CYCLES + 1)
        watched = watch(side, whole, Path(folder) / "run", look_s=LOOK_S, weigh_s=math.inf)
        steps = written(Path(folder) / "run/out/metrics.jsonl")
    cycles = [range(start, start + len(CYCLE)) for start in range(len(CYCLE), len(steps) - 1, len(CYCLE))]
    return [
        longer_half(steps, cycles, CONFINED, "on one core", count, ">= 0.90"),
        longer_half(steps, cycles, ALONE, "on all cores", count),
        busy(watched, cycles),
    ]


def longer_half(
    steps: Sequence[Mapping[str, float]], cycles: Sequence[range], halves: slice, how: str, count: int,
    target: str = "",
) -> Row:  # fmt: skip
    """Compare the longer of generation and training, timed at staleness 0, with a whole step at staleness 1.

    The ratio in the returned row is the median over cycles. The slice `halves` selects the steps of a cycle in which
    generation and training are timed alone.
    """
    times = []
    for cycle in cycles:
        alone, beside = ([steps[number] for number in cycle[part]] for part in (halves, BESIDE))
        times.append((seconds(alone, GENERATION), seconds(alone, TRAINING), seconds(beside, ["step"])))
    ratios = [max(generate, train) / step for generate, train, step in times]
    generate, train, step = (median(column) for column in zip(*times, strict=True))
    return Row(
        name=f"longer of generation and training alone {how}, against a step at staleness 1",
        ratio=median(ratios), unit="of the time of the step", target=target, ours=f"{step:.2f} s per step",
        theirs=f"generation {generate:.2f} s, training {train:.2f} s",
        notes=f"1,024 answers of a 4.9M model, vLLM with {count} sequences at once, one thread each; cycles: "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}; load {os.getloadavg()[0]:.1f}",
        command=COMMAND,
    )  # fmt: skip


def busy(watched: Run, cycles: Sequence[range]) -> Row:
    """Compare the CPU seconds of steps at staleness 1 with their wall seconds and with steps at staleness 0."""
    beside, whole = spent(watched, [cycle[BESIDE] for cycle in cycles])
    alone, turns = spent(watched, [cycle[ALONE] for cycle in cycles])
    return Row(
        name="busy CPU cores in a step at staleness 1", ratio=beside / whole / 2, unit="of two cores", target="",
        ours=f"{beside:.1f} CPU s in {whole:.1f} s", theirs=f"at staleness 0 {alone:.1f} CPU s in {turns:.1f} s",
        notes=f"means of {len(cycles)} cycles; in the remaining time, the cores were idle or ran other programs",
        command=COMMAND,
    )  # fmt: skip


def spent(watched: Run, parts: Sequence[range]) -> tuple[float, float]:
    """Return the mean CPU seconds (summed over all processes) and the mean wall seconds of the given steps."""
    numbers = [number for part in parts for number in part]
    return tuple(mean(column[n] - column[n - 1] for n in numbers) for column in (watched.cpu, watched.times))


def changing() -> int:
    """Call `rltrain.main` with the overrides from the command line, and change its staleness and cores during the run.

    `CYCLE` gives the staleness of each step, and `CONFINED` selects the steps in which all processes use one core.
    """
    original, cores, held = PromptGroups.wanted, os.sched_getaffinity(0), False

    def wanted(self: PromptGroups, version: int) -> int:
        nonlocal held
        place = version % len(CYCLE)
        if (hold := place in range(len(CYCLE))[CONFINED]) != held:
            confine(os.getpid(), {min(cores)} if hold else cores)
            held = hold
        with patch.object(self, "max_staleness", CYCLE[place]):
            return original(self, version)

    with patch.object(PromptGroups, "wanted", wanted):
        return program.main(sys.argv[1:])


def confine(root: int, cores: Collection[int]) -> None:
    """Confine all threads of a process and its descendants to the given cores."""
    for process in tree(root):
        for thread in Path(f"/proc/{process}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def tuned() -> int:
    """Return the number of concurrent sequences for which the times of generation and training are closest."""
    ratios = {}
    for count in AT_ONCE:
        steps = job(*settings(count), "trainer.total_steps=3")[1:]
        ratios[count] = seconds(steps, GENERATION) / seconds(steps, TRAINING)
        if ratios[count] > 1:
            break
    return min(ratios, key=lambda count: abs(ratios[count] - 1))


def settings(count: int) -> list[str]:
    """Return the overrides for a run with `count` concurrent sequences in the engine."""
    return [*TUNED, "profile=demo", f"model.path={rambling_start()}", f"rollout.max_concurrent_sequences={count}"]


def seconds(steps: Sequence[Mapping[str, float]], phases: Sequence[str]) -> float:
    """Return the median over steps of the total seconds that the given phases take in a step."""
    return median(sum(step[f"timing/{phase}"] for phase in phases) for step in steps)


def learning() -> Row:
    """Compare the accuracy on held-out prompts after 40 training steps between staleness 0 and staleness 1."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for seed in SEEDS:
        for staleness, accuracies in found.items():
            overrides = f"trainer.max_staleness={staleness}", f"trainer.seed={seed}", "trainer.total_steps=40"
            accuracies.append(job(*overrides, name="evaluations.jsonl")[-1]["eval/sampled_accuracy"])
    means = {staleness: mean(accuracies) for staleness, accuracies in found.items()}
    return Row(
        name="accuracy after 40 steps at staleness 1", ratio=means[1] / means[0], unit="of the value at staleness 0",
        target="within noise",
        ours=f"{means[1]:.1%} +- {stdev(found[1]):.1%}", theirs=f"{means[0]:.1%} +- {stdev(found[0]):.1%}",
        notes=f"samples for held-out prompts; {len(SEEDS)} seeds each, mean and standard deviation", command=COMMAND,
    )  # fmt: skip


def changing_command(home: Path, job: Job, count: int) -> list[str]:
    """Return the command line that calls `changing` in a new process, with `count` concurrent sequences."""
    return [
        sys.executable, "-c", CHANGING, *settings(count), "trainer.max_staleness=1", f"trainer.total_steps={job.steps}",
        f"trainer.output_dir={home / 'out'}",
    ]  # fmt: skip


def job(*overrides: str, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """Run rltrain, and return the records in its file `name`, with one record per training step or evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rltrain.main", *overrides, f"trainer.output_dir={output}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return written(output / name)


def written(path: Path) -> list[dict[str, float]]:
    """Return the records of a JSON lines file that a run has written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("overlap", "learning"))
    chosen = parser.parse_args().only
    for row in {"overlap": overlap, "learning": lambda: [learning()], None: run}[chosen]():
        print(row)  # noqa: T201
