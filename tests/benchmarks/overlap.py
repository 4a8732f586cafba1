"""Generation beside training: a step at staleness 1 against the longer of its two halves, and what is learnt.

Generation is tuned to the time of training by the number of sequences that the engine runs at once. Then one run
changes how far ahead it generates every few steps. At 1, engine and trainer work beside each other, each with one
thread. At 0 they take turns, first with the whole machine to whichever it is, then with all processes confined to one
core: there a half does by itself what Ray and the driver do for it, which the idle second core does otherwise. What is
compared is seconds apart, on a machine whose speed changes within minutes. The model has 4.9M parameters: of the
built-in one, as many seconds of work would be thousands of answers, and the driver's work for each of them. Processor
seconds tell whether the two were at work all the time; what is lost beyond that is that each of two is slower than one
alone.
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
TUNED = [  # one optimizer step a step, so many answers that each half takes seconds, and weights that stand still
    "trainer.prompts_per_step=128", "trainer.prompts_per_minibatch=128", "data.val=null", "actor.lr=1e-12",
    "placement.threads_per_worker=1", "trainer.sample_every=0",
]  # fmt: skip
GENERATION, TRAINING = ("generate", "rewards"), ("old_log_probs", "advantages", "update_actor")
AT_ONCE = (16, 12, 10, 8)
CYCLE = (1, 1, 1, 0, 0, 0, 0, 0)  # steps ahead; the first after a change still has groups of before, or none
BESIDE, ALONE, CONFINED = slice(1, 3), slice(4, 6), slice(6, 8)
CYCLES = 6  # the first warms up
LOOK_S = 0.1  # at the run, whose processors are both at work
SEEDS = (0, 1, 2)


def run() -> list[Row]:
    """All rows."""
    return [*overlap(), learning()]


def overlap() -> list[Row]:
    """max(T_generate, T_train) / T_step, and how busy the processors are meanwhile."""
    count = tuned()
    with tempfile.TemporaryDirectory() as folder:
        side = Side("changing", lambda home, job, _: changing_command(home, job, count), "out/metrics.jsonl")
        whole = Job("", len(CYCLE) * CYCLES + 1)
        watched = watch(side, whole, Path(folder) / "run", look_s=LOOK_S, weigh_s=math.inf)
        steps = written(Path(folder) / "run/out/metrics.jsonl")
    cycles = [range(start, start + len(CYCLE)) for start in range(len(CYCLE), len(steps) - 1, len(CYCLE))]
    return [
        longer_half(steps, cycles, CONFINED, "on one core", count, ">= 0.90"),
        longer_half(steps, cycles, ALONE, "with the whole machine", count),
        busy(watched, cycles),
    ]


def longer_half(
    steps: Sequence[Mapping[str, float]], cycles: Sequence[range], halves: slice, how: str, count: int,
    target: str = "",
) -> Row:  # fmt: skip
    """The ratio of each cycle, and their median; `halves` are the steps of a cycle that are `how` a half is alone."""
    times = []
    for cycle in cycles:
        alone, beside = ([steps[number] for number in cycle[part]] for part in (halves, BESIDE))
        times.append((seconds(alone, GENERATION), seconds(alone, TRAINING), seconds(beside, ["step"])))
    ratios = [max(generate, train) / step for generate, train, step in times]
    generate, train, step = (median(column) for column in zip(*times, strict=True))
    return Row(
        name=f"a step at staleness 1, halves alone {how}", ratio=median(ratios),
        unit="of it is the longer half", target=target, ours=f"{step:.2f} s a step",
        theirs=f"generation {generate:.2f} s, training {train:.2f} s",
        notes=f"1,024 answers of a 4.9M model, vLLM with {count} sequences at once, one thread each; cycles: "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}; load {os.getloadavg()[0]:.1f}",
        command=COMMAND,
    )  # fmt: skip


def busy(watched: Run, cycles: Sequence[range]) -> Row:
    """Processor seconds against seconds, and against those of the same work when the halves take turns."""
    beside, whole = spent(watched, [cycle[BESIDE] for cycle in cycles])
    alone, turns = spent(watched, [cycle[ALONE] for cycle in cycles])
    return Row(
        name="processors at work in a step at staleness 1", ratio=beside / whole / 2, unit="of two", target="",
        ours=f"{beside:.1f} processor s in {whole:.1f} s", theirs=f"at staleness 0 {alone:.1f} in {turns:.1f} s",
        notes=f"means of {len(cycles)} cycles; what is missing had nothing to do, or was taken by others",
        command=COMMAND,
    )  # fmt: skip


def spent(watched: Run, parts: Sequence[range]) -> tuple[float, float]:
    """Processor seconds of all processes, and seconds, of one of these steps: means."""
    numbers = [number for part in parts for number in part]
    return tuple(mean(column[n] - column[n - 1] for n in numbers) for column in (watched.cpu, watched.times))


def changing() -> int:
    """`rltrain.main` on the command line's overrides, as far ahead as `CYCLE` says, and on as many cores."""
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
    """Let a process and all below it run on these cores only, every thread of theirs."""
    for process in tree(root):
        for thread in Path(f"/proc/{process}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def tuned() -> int:
    """The number of sequences at once with which generation takes most nearly as long as training."""
    ratios = {}
    for count in AT_ONCE:
        steps = job(*settings(count), "trainer.total_steps=3")[1:]
        ratios[count] = seconds(steps, GENERATION) / seconds(steps, TRAINING)
        if ratios[count] > 1:
            break
    return min(ratios, key=lambda count: abs(ratios[count] - 1))


def settings(count: int) -> list[str]:
    """Overrides of a run with so many sequences at once."""
    return [*TUNED, "profile=demo", f"model.path={rambling_start()}", f"rollout.max_concurrent_sequences={count}"]


def seconds(steps: Sequence[Mapping[str, float]], phases: Sequence[str]) -> float:
    """Of these phases together in one step: the median."""
    return median(sum(step[f"timing/{phase}"] for phase in phases) for step in steps)


def learning() -> Row:
    """Held-out accuracy after as many steps."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for seed in SEEDS:
        for staleness, accuracies in found.items():
            overrides = f"trainer.max_staleness={staleness}", f"trainer.seed={seed}", "trainer.total_steps=40"
            accuracies.append(job(*overrides, name="evaluations.jsonl")[-1]["eval/sampled_accuracy"])
    means = {staleness: mean(accuracies) for staleness, accuracies in found.items()}
    return Row(
        name="accuracy after 40 steps", ratio=means[1] / means[0], unit="of that at staleness 0", target="within noise",
        ours=f"{means[1]:.1%} +- {stdev(found[1]):.1%}", theirs=f"{means[0]:.1%} +- {stdev(found[0]):.1%}",
        notes=f"held-out, sampled; {len(SEEDS)} seeds each, mean and standard deviation", command=COMMAND,
    )  # fmt: skip


def changing_command(home: Path, job: Job, count: int) -> list[str]:
    """The words of a run of `changing`."""
    return [
        sys.executable, "-c", CHANGING, *settings(count), "trainer.max_staleness=1", f"trainer.total_steps={job.steps}",
        f"trainer.output_dir={home / 'out'}",
    ]  # fmt: skip


def job(*overrides: str, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """What a run wrote into this file, a line a step or an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rltrain.main", *overrides, f"trainer.output_dir={output}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return written(output / name)


def written(path: Path) -> list[dict[str, float]]:
    """The lines of a file of a run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("overlap", "learning"))
    chosen = parser.parse_args().only
    for row in {"overlap": overlap, "learning": lambda: [learning()], None: run}[chosen]():
        print(row)  # noqa: T201
