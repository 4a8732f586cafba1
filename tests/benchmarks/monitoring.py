"""Measures the CPU time that metrics files, sample files, TensorBoard, the report and experiment trackers take.

Runs with everything on and runs with everything off take turns. Each run has a process of its own, in which one thread
trains. A step of the demo takes half a second, less than a step of any real model, so the demo shows the largest share.
The second workload is a real language model: the sums of `make demo-llm`, which installs the model. The run with
everything on uses each of W&B, MLflow and trackio that is installed for the Python interpreter of the runs, without any
service. The interpreter is the one in the virtual environment that the environment variable `TRACKERS_VENV` names, or
else the interpreter of the benchmark. `make bench` sets the variable.

All times are CPU seconds. The CPU time of monitoring is the sum of three parts, none of which contains any training:

1. the time that the training thread spends in the tracker (`rltrain.monitoring.tracking.Tracker`), without the console;
2. the time of all other threads, minus their time in the run with everything off;
3. the time of all other processes, minus their time in the run with everything off. These processes write the report
   during the run, or belong to a tracker.

Some of this work follows the elapsed time and not the number of steps: the report's processes take 1% of the elapsed
time, MLflow gets a request every five seconds, and trackio writes from time to time. On a busy machine, on which steps
take long, the share of monitoring is therefore too large.

The second row of a workload compares the total CPU time of the two runs. It contains all effects of monitoring, but
also the noise of the training, which can be larger than the difference.

    python -m tests.benchmarks.monitoring
"""

import contextlib
import importlib.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.benchmarks.job import OWN_ENVIRONMENT, ROOT, tree
from tests.benchmarks.row import Row

COMMAND = "make bench ARGS=monitoring"
MODEL = ROOT / "build" / "smollm2" / "model"
ON, OFF = "on", "off"
LIBRARIES = ("wandb", "mlflow", "trackio")
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "TRACKIO_DIR": "trackio"}
KINDS = ("training", "threads", "ended", "running")
WRITES = ("metrics.jsonl", "sample files", "TensorBoard")  # Parts of a step that the training thread executes.


@dataclass(frozen=True)
class Workload:
    """A training workload on which monitoring is measured.

    Attributes:
        name: name in the rows of results.
        settings: command-line arguments of a run.
        steps: number of training steps of a run.
        warm_up: number of steps at the start that are not measured.
        rounds: number of pairs of runs.
        target: limit of the share of monitoring in a step's CPU time, or "".
    """

    name: str
    settings: tuple[str, ...]
    steps: int
    warm_up: int
    rounds: int
    target: str

    @property
    def measured(self) -> int:
        """Return the number of measured steps."""
        return self.steps - self.warm_up


WORKLOADS = {
    "demo": Workload("the demo", (), steps=120, warm_up=5, rounds=3, target=""),
    "llm": Workload(
        "SmolLM2-135M",
        ("--config", str(ROOT / "examples" / "demo_llm" / "sums.yaml"), f"model.path={MODEL}",
         f"data.train={ROOT}/examples/demo_llm/sums.py:rows"),
        steps=6, warm_up=1, rounds=1, target="<= 0.02",
    ),
}  # fmt: skip


def spent() -> Counter[str]:
    """Return the elapsed seconds as "clock", and the CPU seconds of each of `KINDS`.

    The kinds are the training thread, all other threads, child processes that ended, and child processes that are
    running. The function must be called in the training thread.
    """
    own, children, thread = os.getpid(), resource.getrusage(resource.RUSAGE_CHILDREN), time.thread_time()
    running = sum(seconds for pid, seconds in tree(own).items() if pid != own)
    return Counter(
        training=thread, threads=time.process_time() - thread, ended=children.ru_utime + children.ru_stime,
        running=running, clock=time.perf_counter(),
    )  # fmt: skip


class Meter:
    """Measures one run of a workload.

    Attributes:
        seconds: CPU seconds after the warm-up, by the name of the measured part. The calls of a tracker that runs in a
            separate thread have the name of the tracker.
        marks: CPU seconds from the start of the process, in the form of `spent`: "warm" at the end of the warm-up,
            "last" at the end of the last step, and "closed" after the tracker is closed.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.seconds, self.marks = Counter[str](), dict[str, Counter[str]]()

    def timed(self, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its CPU seconds added to the part that `name` derives from the arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name(*args)] += time.thread_time() - start

        return call

    def end_step(self, tracker: Any, step: int) -> None:
        """Record the time and the CPU seconds after the warm-up and after the last step."""
        if step == self.workload.warm_up:
            catch_up(tracker)
            self.seconds.clear()
            self.marks["warm"] = spent()
        elif step == self.workload.steps:
            self.marks["last"] = spent()


def catch_up(tracker: Any) -> None:
    """Wait until the trackers in separate threads have started and have executed all earlier calls."""
    from rltrain.monitoring.trackers.background import BackgroundSink

    for sink in tracker.sinks:
        if isinstance(sink, BackgroundSink):
            done = threading.Event()
            sink._calls.put((done.set, False))
            if not done.wait(120):
                raise RuntimeError(f"the tracker {sink.name} did not start within 120 s")


def parts() -> list[tuple[Any, str, Callable[..., str]]]:
    """Return (owner, name, part) of each measured function, where `part` derives the part's name from the arguments."""
    from rltrain.monitoring import tracking
    from rltrain.monitoring.console import ConsoleDisplay
    from rltrain.monitoring.report.refresh import ReportFile
    from rltrain.monitoring.sample_files import SampleFiles
    from rltrain.monitoring.sinks import JsonLines, TensorBoard
    from rltrain.monitoring.trackers.background import BackgroundSink

    return [
        (ConsoleDisplay, "step", lambda *_: "console"),
        (JsonLines, "log_step", lambda *_: "metrics.jsonl"),
        (SampleFiles, "write_trained", lambda *_: "sample files"),
        (TensorBoard, "log_step", lambda *_: "TensorBoard"),
        (ReportFile, "refresh", lambda *_: "starting report processes"),
        (ReportFile, "close", lambda *_: "last report"),
        (BackgroundSink, "_try", lambda sink, _: sink.name),
        (tracking, "draw_learning_curve", lambda *_: "learning curve"),
    ]


def unrecorded(tracker: Any, step: int, metrics: dict[str, float], batch: Any, *_: Any) -> None:
    """Show a step on the console, and keep its metrics in memory, as the trainer needs them."""
    tracker.history.append({"step": step, **metrics})
    tracker.display.step(step, metrics, batch)


def close_only(tracker: Any) -> None:
    """Close the files of a tracker without writing a report."""
    for file in (*tracker.sinks, tracker.ledger, tracker.alarms):
        file.close()


@contextlib.contextmanager
def instruments(meter: Meter, side: str) -> Iterator[None]:
    """Measure the run that is made inside the context, and turn its files and its report off on the side `OFF`."""
    from rltrain.monitoring.tracking import Tracker

    log_step = Tracker.log_step if side == ON else unrecorded
    close = Tracker.close if side == ON else close_only
    timed_step, timed_close = (meter.timed(lambda *_: "tracker", function) for function in (log_step, close))

    def step_and_mark(self: Tracker, step: int, *args: Any) -> None:
        timed_step(self, step, *args)
        meter.end_step(self, step)

    def close_and_mark(self: Tracker) -> Path | None:
        curve: Path | None = timed_close(self)
        meter.marks["closed"] = spent()
        return curve

    with contextlib.ExitStack() as stack:
        for owner, name, part in parts():
            stack.enter_context(patch.object(owner, name, meter.timed(part, getattr(owner, name))))
        stack.enter_context(patch.object(Tracker, "log_step", step_and_mark))
        stack.enter_context(patch.object(Tracker, "close", close_and_mark))
        yield


def measure(key: str, side: str) -> None:
    """Make one run of a workload in the working directory, and write its measurements to the file measured.json."""
    from rltrain import main as program

    libraries = [name for name in LIBRARIES if side == ON and importlib.util.find_spec(name)]
    trackers = ",".join(["tensorboard", *libraries]) if side == ON else ""
    workload = WORKLOADS[key]
    meter, output = Meter(workload), Path("out").absolute()
    with instruments(meter, side):
        status = program.main([
            *workload.settings, "placement=inprocess", "rollout=hf", "data.val=null",
            f"trainer.total_steps={workload.steps}", f"trainer.trackers=[{trackers}]", f"trainer.output_dir={output}",
        ])  # fmt: skip
    if status:
        raise RuntimeError(f"the run with everything {side} ended with exit status {status}")
    if failed := [line for line in (output / "alarms.jsonl").read_text().splitlines() if "trainer.trackers" in line]:
        raise RuntimeError(failed[0])
    found = {"seconds": meter.seconds, "marks": meter.marks, "libraries": libraries}
    Path("measured.json").write_text(json.dumps(found))


@dataclass
class Run:
    """The measurements of one run: the attributes of its `Meter`, and the libraries whose trackers were used."""

    seconds: Counter[str]
    marks: dict[str, Counter[str]]
    libraries: list[str]

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read the measurements that `measure` wrote in a folder."""
        found = json.loads((folder / "measured.json").read_text())
        marks = {name: Counter[str](mark) for name, mark in found["marks"].items()}
        return cls(Counter[str](found["seconds"]), marks, found["libraries"])

    def between(self, first: str, last: str, *kinds: str) -> float:
        """Return the CPU seconds of threads and processes between two marks; without `kinds`, of all kinds."""
        return sum(self.marks[last][kind] - self.marks[first][kind] for kind in kinds or KINDS)


def run_side(key: str, side: str, folder: Path) -> Run:
    """Make a run of a workload in a new process and a new folder.

    Raises RuntimeError with the last line of the run's errors.
    """
    folder.mkdir()
    own = Path(os.environ["TRACKERS_VENV"], "bin", "python") if "TRACKERS_VENV" in os.environ else sys.executable
    given = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), given.get("PYTHONPATH")]))}
    done = subprocess.run(
        [own, "-m", "tests.benchmarks.monitoring", key, side], cwd=folder, text=True, stdout=subprocess.DEVNULL,
        env=given | OWN_ENVIRONMENT | OFFLINE | path | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return Run.read(folder)


def parts_per_step(on: Run, off: Run, steps: int) -> dict[str, float]:
    """Return the CPU seconds per step of each part of monitoring in the run `on`, of which `steps` are measured.

    The values in the run `off` are subtracted from the times of other threads and of other processes. What is
    written at the end of the run counts as a part of the steps, such as the last report and the values that wait in a
    tracker.
    """
    seconds = on.seconds
    more = {kind: on.between("warm", "closed", kind) - off.between("warm", "closed", kind) for kind in KINDS}
    calls = (*WRITES, "starting report processes", "last report", "console", "learning curve")
    totals = {name: seconds[name] for name in WRITES} | {
        "report during the run": seconds["starting report processes"] + more["ended"],
        "last report": seconds["last report"],
        "other work of the tracker": seconds["tracker"] - sum(seconds[name] for name in calls),
        "threads of trackers and TensorBoard": more["threads"],
        "processes of trackers": more["running"],
    }
    return {name: total / steps for name, total in totals.items()}


def medians(values: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each key's values."""
    return {name: statistics.median(one[name] for one in values) for name in values[0]}


def notes_of(workload: Workload, pairs: list[tuple[Run, Run]], parts: dict[str, float], calls: dict[str, float]) -> str:
    """Describe the runs, the CPU seconds of each part of monitoring, and the costs that do not grow with the run."""
    on = [one for one, _ in pairs]
    elapsed = statistics.median(one.between("warm", "last", "clock") for one in on) / workload.measured
    start = statistics.median(sum(one.marks["warm"][k] - off.marks["warm"][k] for k in KINDS) for one, off in pairs)
    curve = statistics.median(one.seconds["learning curve"] for one in on)
    absent = [name for name in LIBRARIES if name not in calls]
    notes = [
        f"{workload.steps} steps of {elapsed:.2f} s; trackers, without services: "
        + ", ".join(["TensorBoard", *calls, *(f"{name} is not installed" for name in absent)]),
        f"per step: {listed(parts)}",
        *([f"of the threads: {listed(calls)}"] if calls else []),
        f"once per run, not counted: start {start:.1f} s, learning curve {curve:.1f} s",
    ]
    return "; ".join(notes)


def rows_of(workload: Workload, pairs: list[tuple[Run, Run]]) -> list[Row]:
    """Return the rows of a workload, given the run with everything on and the run with everything off of each round."""
    steps = workload.measured
    parts = medians([parts_per_step(on, off, steps) for on, off in pairs])
    calls = medians([{name: on.seconds[name] / steps for name in on.libraries} for on, _ in pairs])
    step = statistics.median(off.between("warm", "last") / steps for _, off in pairs)
    own = sum(parts.values())
    whole = [
        (on.between("warm", "closed") - on.seconds["learning curve"] - off.between("warm", "closed")) / steps
        for on, off in pairs
    ]
    shares = [more / (off.between("warm", "last") / steps) for more, (_, off) in zip(whole, pairs, strict=True)]
    name = f"CPU time of metrics, samples, report and trackers, {workload.name}"
    return [
        Row(name, own / step, "of a step's CPU time", workload.target, f"{1e3 * own:.1f} ms",
            f"{1e3 * step:.0f} ms, a step without them", notes_of(workload, pairs, parts, calls), COMMAND,
            {f"{part}_s": value for part, value in (parts | calls).items()} | {"step_s": step}),
        Row(f"{name}, as the difference of whole runs", statistics.median(shares), "of a step's CPU time", "",
            f"{1e3 * (step + statistics.median(whole)):.0f} ms per step with everything on",
            f"{1e3 * step:.0f} ms with everything off", "rounds: " + ", ".join(f"{share:+.1%}" for share in shares),
            COMMAND),
    ]  # fmt: skip


def listed(seconds: dict[str, float]) -> str:
    """Write CPU seconds as a list of names and milliseconds."""
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())


def run_pairs(key: str, rounds: int) -> list[tuple[Run, Run]]:
    """Make the runs of a workload with everything on and with everything off in turn."""
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as folder:
        return [
            (run_side(key, ON, Path(folder, f"{number}-{ON}")), run_side(key, OFF, Path(folder, f"{number}-{OFF}")))
            for number in range(rounds)
        ]


def run() -> list[Row]:
    """Measure both workloads, and return the rows of results."""
    if not (MODEL / "config.json").exists():
        raise RuntimeError(f"{MODEL} does not exist: run `make demo-llm`, which installs the model")
    rows = [rows_of(workload, run_pairs(key, workload.rounds)) for key, workload in WORKLOADS.items()]
    return list(itertools.chain(*rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(*sys.argv[1:])
    else:
        for row in run():
            sys.stdout.write(f"{row}\n")
