"""Check a long run of small training steps for leaks, with `python -m tests.chaos.soak --minutes 20`.

Every few seconds the program records the private memory, open files and threads of each process of the run. The private
memory of a process consists of the pages that it has written and shares with no other process. The program also records
the files in /dev/shm and the run's own folder of Ray's logs. At the end, the program prints the slope of each series of
measurements over the last two thirds of the run. The exit status is 1 if a series rises by more than its tolerance, or
if a process's memory grows by more than 5 MB per hour.

The memory of a training process varies by several MB from step to step. The slope of its memory is therefore the slope
of the minimum in each minute, and it is printed with its standard error. If the slope of a process is less than two
standard errors from 5 MB per hour when the time is over, the run goes on, for at most the same time again.
"""

import argparse
import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.benchmarks.job import tree
from tests.chaos.processes import command
from tests.chaos.runs import lines
from tests.chaos.trends import Points, Trend, minima, trend

ROOT = Path(__file__).parents[2]
EVERY_S = 5.0
WARM_UP = 1 / 3  # Share of the run, at its start, that the slopes leave out.
SHARE, LEAST = 0.05, 8.0  # A series may grow by max(SHARE * mean, LEAST), in MB, files or threads.
MEMORY_MB_AN_HOUR = 5.0  # Maximum growth of a process's memory, in MB per hour.
JOB = [
    "trainer.total_steps=1000000", "trainer.prompts_per_step=8", "trainer.prompts_per_minibatch=4",
    "trainer.save_every=100", "trainer.eval_every=100", "trainer.sample_every=0", "data.val_size=16",
    "actor.lr_schedule=constant", "actor.lr=1e-5",
]  # fmt: skip
MEMORY = "memory, MB"  # The end of the name of each series of a process's memory.
Series = dict[str, Points]  # Maps each measured quantity to its points (seconds, value).


def look(root: int, series: Series, now: float) -> None:
    """Append the current measurements to `series`."""
    for pid in tree(root):
        name = title(pid)
        if not name:
            continue
        series[f"{name} {MEMORY}"].append((now, private_mb(pid)))
        for folder, what in (("fd", "open files"), ("task", "threads")):
            try:
                series[f"{name} {what}"].append((now, float(len(os.listdir(f"/proc/{pid}/{folder}")))))
            except OSError:  # The process has ended.
                continue
    shared = sum(status.st_blocks for status in statuses(Path("/dev/shm").iterdir())) * 512
    series["/dev/shm, MB"].append((now, shared / 1e6))
    size = sum(status.st_size for status in statuses(ray_session(root).rglob("*.*")))
    series["Ray's logs, MB"].append((now, size / 1e6))


def statuses(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the status of each path that is a file, leaving out files that the run deletes meanwhile."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield status


def ray_session(root: int) -> Path:
    """Return the log folder of the Ray cluster that a run has started."""
    for pid in tree(root):
        if found := re.search(r"session_dir=(\S+)", command(pid)):
            return Path(found[1]) / "logs"
    return Path("/nowhere")


def title(pid: int) -> str:
    """Return the name of a process in the series of measurements.

    The name of a Ray worker is its role and pid. The name of any other program is the first word of its command line
    and its pid.
    """
    words = command(pid).split()
    if not words:
        return ""
    if words[0].startswith("ray::"):
        return f"{words[0].split('.')[0]} {pid}"
    return f"{Path(words[-1] if words[0].endswith('python') and len(words) < 3 else words[0]).name} {pid}"


def private_mb(pid: int) -> float:
    """Return the memory in MB that a process shares with no other process, or 0 if the process has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in rows if line.startswith(("Private_Dirty:", "Swap:"))) / 1024


def trends(series: Series, seconds: float) -> dict[str, Trend]:
    """Return the trend after the warm-up of each series that has measurements until the end of the run."""
    found = {}
    for name, points in sorted(series.items()):
        late = after_warm_up(points, seconds)
        if len(late) >= 10 and late[-1][0] >= seconds - 5 * EVERY_S:
            found[name] = trend(minima(late) if name.endswith(MEMORY) else late)
    return found


def after_warm_up(points: Points, seconds: float) -> Points:
    """Return the points of the last two thirds of a run of `seconds`."""
    return [point for point in points if point[0] >= WARM_UP * seconds]


def decided(series: Series, seconds: float) -> bool:
    """Return whether the slope of each process's memory is clearly below or clearly above the maximum."""
    found = trends(series, seconds)
    return all(found[name].differs_from(MEMORY_MB_AN_HOUR) for name in found if name.endswith(MEMORY))


def report(series: Series, seconds: float) -> int:
    """Print a line for each series whose measurements cover the last two thirds of the run.

    Returns the number of series that rise by more than the tolerance.
    """
    rising = 0
    sys.stdout.write("measurement | after the warm-up | at the end | slope per hour | standard error | \n")
    for name, line in trends(series, seconds).items():
        late = after_warm_up(series[name], seconds)
        grown = line.slope * (late[-1][0] - late[0][0]) / 3600
        mean = sum(value for _, value in late) / len(late)
        leaks = name.endswith(MEMORY) and line.slope > MEMORY_MB_AN_HOUR
        rises = leaks or grown > max(SHARE * mean, LEAST)
        rising += rises
        ends = f"{late[0][1]:.1f} | {late[-1][1]:.1f}"
        sys.stdout.write(f"{name} | {ends} | {line.slope:+.1f} | {line.error:.1f} | {'rises' if rises else ''}\n")
    return rising


def goes_on(series: Series, now: float, seconds: float) -> bool:
    """Return whether a run that was planned for `seconds` needs more measurements at the time `now`."""
    return now < seconds or (now < 2 * seconds and not decided(series, now))


def main() -> int:
    """Start a training run, record measurements until its end, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("overrides", nargs="*", help="overrides of the run's config")
    arguments = parser.parse_args()
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="rltrain-soak-") as folder:
        output, log = Path(folder) / "out", Path(folder) / "log.txt"
        words = [sys.executable, "-m", "rltrain.main", *JOB, f"trainer.output_dir={output}", *arguments.overrides]
        with log.open("w") as file:
            process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        while not (output / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(1)
        began = time.monotonic()
        while goes_on(series, now := time.monotonic() - began, 60 * arguments.minutes) and process.poll() is None:
            look(process.pid, series, now)
            time.sleep(EVERY_S)
        ended_early = process.poll() is not None
        if not ended_early:
            process.send_signal(signal.SIGTERM)
        status = process.wait(120)
        said = log.read_text().strip().splitlines()[-3:]
        steps = len(lines(output / "metrics.jsonl"))
    rising = report(series, now)
    sys.stdout.write(f"{steps} steps in {now / 60:.1f} minutes; exit status {status}; {' | '.join(said)}\n")
    sys.stdout.write(f"{rising} series of measurements rise by more than the tolerance\n")
    return 1 if rising or ended_early else 0


if __name__ == "__main__":
    sys.exit(main())
