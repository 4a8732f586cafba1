"""Defines a training job, runs the job with any trainer, and measures each run from outside its processes.

A side is one way to run the job, such as a trainer with some settings. All sides get the same model, the same prompts
in the same order, the same reward and the same optimizer steps. By default, a job is the built-in task `median` with
the numbers of `config/profile/demo.yaml`. After each training step, the trainer appends a line of JSON to its
progress file. The function `watch` records when the lines are written, and how much memory the process tree uses.
"""

import dataclasses
import json
import math
import os
import runpy
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# seconds between reads of the progress file, and between measurements of the process tree's memory
LOOK_S, WEIGH_S = 0.01, 2.0
WARM_UP = 5
OWN_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip


TASK_ARGUMENTS = {"median": ("profile=demo",), "sums": ("--config", "examples/demo_llm/sums.yaml")}


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        model: Directory of the initial model.
        task: "median" for the built-in task, or "sums" for the questions of examples/demo_llm.
        steps: Number of training steps. The learning rate falls linearly to 0 over the optimizer steps of the job.
        max_prompt_length: Maximum length of a prompt in tokens.
        max_response_length: Maximum length of an answer in tokens, including the end token.
        eval_every: Number of steps between two evaluations on held-out prompts; 0 for no evaluation.
        eval_samples: Number of sampled answers to each held-out prompt.
        warm_up: Number of training steps at the start of a run that medians do not include.
    """

    model: str
    steps: int
    task: str = "median"
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    minibatches: int = 4
    max_prompt_length: int = 8
    max_response_length: int = 16
    lr: float = 4e-4
    seed: int = 0
    stop_id: int = 3
    eval_every: int = 0
    eval_samples: int = 4
    warm_up: int = WARM_UP

    @property
    def rows(self) -> int:
        """Return the number of answers per training step."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True)
class Side:
    """A way to run a job with some trainer and its settings.

    Attributes:
        command: Function that returns the command line of a run, given the folder of the run, the job and the number of
            threads.
        lines: Path of the progress file, relative to the folder of the run.
        evaluations: Path of the file with one line of JSON per evaluation, relative to the folder of the run.
    """

    name: str
    command: Callable[[Path, Job, int], list[str]]
    lines: str
    evaluations: str
    threads: int = 1


@dataclass
class Run:
    """Measurements of one run.

    Attributes:
        times: For each step, the seconds from the start of the program until the step's progress line was written.
        rewards: Mean reward of each step.
        lengths: Mean answer length of each step, in tokens.
        held_out: Mean reward of sampled answers to the held-out prompts, by the number of training steps before the
            evaluation.
        cpu: For each step, the CPU seconds that the process tree had used when the step's progress line was written.
        peak_mb: Peak memory of the process tree, with shared pages counted once.
        load: Load average of the machine at the start of the run.
    """

    side: str
    times: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    load: float = 0.0

    def step_s(self, warm_up: int) -> float:
        """Return the median seconds per step, without the first `warm_up` steps."""
        between = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return statistics.median(between[max(0, warm_up - 1) :])

    def step_cpu_s(self, warm_up: int) -> float:
        """Return the mean CPU seconds per step, without the first `warm_up` steps.

        In contrast to wall seconds, CPU seconds hardly depend on other programs that run on the machine.
        """
        first = min(max(0, warm_up - 1), len(self.cpu) - 2)
        return (self.cpu[-1] - self.cpu[first]) / (len(self.cpu) - 1 - first)

    def steps_to(self, goal: float) -> float:
        """Return the number of steps until the mean reward of three consecutive steps reaches `goal`.

        If the mean reward never reaches `goal`, the result is infinity.
        """
        means = (statistics.fmean(self.rewards[end - 3 : end]) for end in range(3, len(self.rewards) + 1))
        return next((float(end) for end, mean in enumerate(means, 3) if mean >= goal), float("inf"))

    def to_held_out_s(self, goal: float, warm_up: int) -> float:
        """Return the training time in seconds until the mean reward on held-out prompts is at least `goal`.

        The time is the number of training steps, multiplied by the median seconds per step. Evaluations are not part of
        the time.
        """
        steps = (step for step, reward in sorted(self.held_out.items()) if step > 0 and reward >= goal)
        return next(steps, math.inf) * self.step_s(warm_up)

    def to_reward_s(self, goal: float, warm_up: int) -> float:
        """Return the training time in seconds until the mean reward of three consecutive steps reaches `goal`."""
        steps = self.steps_to(goal)
        if steps == float("inf"):
            return steps
        return self.times[int(steps) - 1] - self.times[0] + self.step_s(warm_up)


def rows_of(job: Job, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split, "train" or "val", of the job's task."""
    if job.task == "sums":
        rows = runpy.run_path(str(ROOT / "examples" / "demo_llm" / "sums.py"))["rows"]
        return list(rows(split))
    from rltrain.tasks import TASKS

    return TASKS[job.task].prompts(split, job.seed, 8192)


def write_job(folder: Path, job: Job, threads: int) -> Path:
    """Write the job and its prompts to files in `folder`, and return the path of the job's file, job.json.

    The prompts are in the order in which rltrain would use them, so that a program that does not import rltrain can
    train on the same prompts.
    """
    from rltrain.data.prompt_order import PromptOrder

    rows = rows_of(job, "train")
    order = PromptOrder(len(rows), job.seed, True).next(job.steps * job.prompts_per_step)
    _write_rows(folder / "data.jsonl", [rows[index] for index in order])
    _write_rows(folder / "held_out.jsonl", rows_of(job, "val") if job.eval_every else [])
    files = {"data": "data.jsonl", "val": "held_out.jsonl"}
    files |= {"progress": "progress.jsonl", "evaluations": "evaluations.jsonl"}
    words = dataclasses.asdict(job) | {name: str(folder / file) for name, file in files.items()} | {"threads": threads}
    (folder / "job.json").write_text(json.dumps(words))
    return folder / "job.json"


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rltrain_side(name: str, *overrides: str, threads: int = 1) -> Side:
    """Return a side that runs `python -m rltrain.main` with the job's values and `overrides`.

    The argument `threads` sets the
    number of threads of a run in one process. Worker processes under Ray use `placement.threads_per_worker` threads
    instead.
    """

    def command(folder: Path, job: Job, _: int) -> list[str]:
        values = {
            "model.path": job.model, "actor.lr": job.lr, "actor.lr_schedule": "linear",
            "trainer.total_steps": job.steps, "trainer.prompts_per_step": job.prompts_per_step,
            "trainer.prompts_per_minibatch": job.prompts_per_step // job.minibatches, "trainer.seed": job.seed,
            "trainer.output_dir": folder / "out", "rollout.samples_per_prompt": job.samples_per_prompt,
            "rollout.max_response_length": job.max_response_length,
        }  # fmt: skip
        if job.eval_every:
            values |= {"trainer.eval_every": job.eval_every, "trainer.eval_samples": job.eval_samples}
        else:
            values["data.val"] = "null"
        own = (f"{name}={value}" for name, value in values.items())
        return [sys.executable, "-m", "rltrain.main", *TASK_ARGUMENTS[job.task], *own, *overrides]

    return Side(f"rltrain {name}", command, "out/metrics.jsonl", "out/evaluations.jsonl", threads)


def program_side(name: str, python: Path | str, module: str, *arguments: str, threads: int) -> Side:
    """Return a side that runs `python -m module JOB.json arguments` with the Python interpreter `python`."""

    def command(folder: Path, job: Job, threads: int) -> list[str]:
        return [str(python), "-m", module, str(write_job(folder, job, threads)), *arguments]

    return Side(name, command, "progress.jsonl", "evaluations.jsonl", threads)


def watch(
    side: Side, job: Job, folder: Path, *, timeout_s: float = 1800.0, look_s: float = LOOK_S, weigh_s: float = WEIGH_S
) -> Run:  # fmt: skip
    """Run the job on one side, and measure the run.

    Args:
        side: Way to run the job.
        job: Job to run.
        folder: Folder for the files of the run, which must not exist yet.
        timeout_s: Maximum seconds of the run.
        look_s: Seconds between reads of the progress file. Each read of the progress file costs CPU time.
        weigh_s: Seconds between measurements of the memory, which also cost CPU time; `math.inf` for no measurements.

    Raises RuntimeError with the end of the run's output if the run fails or takes too long.
    """
    folder.mkdir(parents=True)
    run, lines, log = Run(side.name, load=os.getloadavg()[0]), folder / side.lines, folder / "log.txt"
    environment = os.environ | OWN_ENVIRONMENT | {"OMP_NUM_THREADS": str(side.threads)}
    with log.open("w") as output:
        process = subprocess.Popen(
            side.command(folder, job, side.threads), cwd=ROOT, env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            began, weighed = time.perf_counter(), 0.0
            while process.poll() is None:
                now = time.perf_counter() - began
                if now > timeout_s:
                    raise RuntimeError(f"{side.name}: did not end within {timeout_s:.0f} s; {_tail(log)}")
                if _read(lines, run, now):
                    run.cpu += [tree_cpu_s(process.pid)] * (len(run.times) - len(run.cpu))
                if now - weighed > weigh_s:
                    weighed, run.peak_mb = now, max(run.peak_mb, tree_mb(process.pid))
                time.sleep(look_s)
            if _read(lines, run, time.perf_counter() - began):
                run.cpu += run.cpu[-1:] * (len(run.times) - len(run.cpu))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode or len(run.times) < job.steps:
        raise RuntimeError(f"{side.name}: exit status {process.returncode} after {len(run.times)} steps; {_tail(log)}")
    run.held_out = _held_out(folder / side.evaluations)
    return run


def _held_out(path: Path) -> dict[int, float]:
    """Read the mean reward of each evaluation in a file, by training step.

    One evaluation can have several lines, one for each of its batches, which have the same number of answers.
    """
    if not path.exists():
        return {}
    rewards = dict[int, list[float]]()
    for line in path.read_text().splitlines():
        values = json.loads(line)
        rewards.setdefault(values["step"], []).append(values["eval/sampled_reward"])
    return {step: statistics.fmean(found) for step, found in rewards.items()}


def _read(path: Path, run: Run, now: float) -> bool:
    """Record the progress lines that were written since the last call, and return whether there are any such lines."""
    try:
        text = path.read_text() if path.stat().st_size else ""
    except OSError:
        return False
    whole = text[: text.rfind("\n") + 1].splitlines()
    for line in whole[(known := len(run.times)) :]:
        values: dict[str, Any] = json.loads(line)
        run.times.append(now)
        run.rewards.append(values["reward/mean"])
        run.lengths.append(values["rollout/length_mean"])
    return len(whole) > known


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]


def tree(root: int) -> dict[int, float]:
    """Return the CPU seconds of a process and of each descendant, by process id.

    The CPU seconds of a process include those of its children that have ended.
    """
    parents, seconds = dict[int, int](), dict[int, float]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            parents[int(entry.name)] = int(words[1])
            seconds[int(entry.name)] = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    members = {root}
    while grown := {child for child, parent in parents.items() if parent in members} - members:
        members |= grown
    return {pid: seconds.get(pid, 0.0) for pid in members}


def tree_cpu_s(root: int) -> float:
    """Return the total CPU seconds of a process and all its descendants."""
    return sum(tree(root).values())


def tree_mb(root: int) -> float:
    """Return the total memory in MB of a process and all its descendants, where shared pages count only once."""
    return sum(map(pss_mb, tree(root)))


def pss_mb(pid: int) -> float:
    """Return the proportional set size (PSS) of one process in MB, or 0 if the process has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError):
        pass  # the process has ended
    return 0.0


def best(sides: Sequence[Side], job: Job, folder: Path, *, steps: int = 5) -> tuple[Side, dict[str, float]]:
    """Try each side with a short run, and return the fastest side and the seconds per step of all sides.

    A trial has `steps` training steps after the warm-up. Sides whose trial fails are left out, unless all trials fail.
    """
    trial, seconds = dataclasses.replace(job, steps=job.warm_up + steps), dict[str, float]()
    failures = []
    for side in sides:
        try:
            seconds[side.name] = watch(side, trial, folder / side.name.replace(" ", "-")).step_s(job.warm_up)
        except RuntimeError as error:
            failures.append(str(error))
    if not seconds:
        raise RuntimeError("; ".join(failures))
    return min((side for side in sides if side.name in seconds), key=lambda s: seconds[s.name]), seconds


def in_turn(sides: Sequence[Side], job: Job, folder: Path, *, rounds: int) -> list[list[Run]]:
    """Run the sides alternately (A B A B) for `rounds` rounds, with one seed per round, and return each side's runs."""
    runs: list[list[Run]] = [[] for _ in sides]
    for number in range(rounds):
        seeded = dataclasses.replace(job, seed=job.seed + number)
        for place, (side, own) in enumerate(zip(sides, runs, strict=True)):
            own.append(watch(side, seeded, folder / f"round-{number}-{place}-{side.name.replace(' ', '-')}"))
    return runs


def median_of(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    """Return the median over runs of the number that `figure` computes from a run."""
    return statistics.median(map(figure, runs))


def describe(runs: Sequence[Run]) -> str:
    """Describe the runs of a side: CPU time, mean rewards at steps 5, 10 and 20, peak memory and load averages."""
    marks = [step for step in (5, 10, 20) if all(len(run.rewards) >= step for run in runs)]
    rewards = ", ".join(f"{statistics.fmean(run.rewards[step - 1] for run in runs):.2f}" for step in marks)
    reached = f"reward at steps {'/'.join(map(str, marks))}: {rewards}; " if marks else ""
    loads = "/".join(f"{run.load:.1f}" for run in runs)
    cpu = median_of(runs, lambda run: run.step_cpu_s(WARM_UP))
    memory = max(run.peak_mb for run in runs)
    return f"{runs[0].side}: {cpu:.2f} CPU s per step; {reached}peak {memory:.0f} MB; load {loads}"
