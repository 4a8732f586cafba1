"""Helpers that start the program as users do, and find the files and processes that a run leaves behind."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "trainer.prompts_per_step=8", "trainer.prompts_per_minibatch=4", "rollout.samples_per_prompt=4", "data.val_size=16",
    "trainer.sample_every=2",
]  # fmt: skip
WHOLE_STACK = [
    *SMALL, "trainer.total_steps=3", "trainer.deterministic=true", "placement.actor_ranks=2",
    "placement.reward_workers=2",
]  # fmt: skip


@dataclass
class Run:
    """A finished run: its exit status, output and leftover processes."""

    status: int
    stdout: str
    stderr: str
    output: Path
    survivors: list[int]

    def metrics(self) -> list[dict[str, float]]:
        """Read the metrics of each training step."""
        return self.lines("metrics.jsonl")

    def lines(self, name: str) -> list[dict[str, float]]:
        """Read every object of a JSON lines file."""
        return [json.loads(line) for line in (self.output / name).read_text().splitlines()]

    def timeless(self) -> list[dict[str, float]]:
        """Return the records of training steps and evaluations, without the metrics that measure time."""
        rows = self.metrics() + self.lines("evaluations.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(("timing/", "perf/"))} for row in rows]

    def samples(self) -> dict[str, pa.Table]:
        """Read the samples of each step as tables, by file name."""
        return {file.name: pq.read_table(file) for file in sorted((self.output / "rollouts").glob("*.parquet"))}


def start(
    output: Path, *overrides: str, program=("-m", "rltrain.main"), python_path=str(ROOT), **options
) -> subprocess.Popen[str]:
    """Start `python -m rltrain.main`, or Python with the words of `program`, in its own process group.

    An environment variable marks every process of the run.
    """
    command = [sys.executable, *program, f"trainer.output_dir={output}", *overrides]
    environment = {**os.environ, "RLTRAIN_TEST_RUN": str(output), "PYTHONPATH": python_path}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=_default_signals, **options,
    )  # fmt: skip


def _default_signals() -> None:
    """Restore the default actions of SIGINT and SIGHUP.

    A shell makes background programs ignore SIGINT, and `nohup` makes a program ignore SIGHUP. Child processes inherit
    both.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def finish(process: subprocess.Popen[str], output: Path, timeout_s: float = 240) -> Run:
    """Wait until a run ends, and look for processes of the run that still live."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in marked(output):
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s} s\n{stdout}\n{stderr}") from None
    deadline = time.monotonic() + 10
    while (survivors := marked(output)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return Run(process.returncode, stdout, stderr, output, survivors)


def train(output: Path, *overrides: str) -> Run:
    """Start a run in a process of its own, and wait until it ends."""
    return finish(start(output, *overrides), output)


def train_here(output: Path, *overrides: str) -> Run:
    """Do a whole run in the test process, for tests that do not need a new process.

    A run in the test process saves the time of importing libraries.

    Tests that call `train_here` must use the fixture `settings_restored`.
    """
    from rltrain.main import main

    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = main([f"trainer.output_dir={output}", *overrides])
    return Run(status, said.getvalue(), complained.getvalue(), output, [])


def marked(output: Path) -> list[int]:
    """Return the pids of live processes that a run with the output directory `output` started."""
    mark = f"RLTRAIN_TEST_RUN={output}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment, state = (
                (entry / "environ").read_bytes(),
                (entry / "stat").read_text().rsplit(")", 1)[1].split()[0],
            )
        except OSError:
            continue
        if mark in environment.split(b"\0") and state != "Z":
            found.append(int(entry.name))
    return found
