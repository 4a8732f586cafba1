"""Two runs on the same CPU cores do not slow each other down by waiting for each other's threads."""

import os
import subprocess
import sys
from pathlib import Path

from runs import ROOT, SMALL

STEPS = 10


def begin(output: Path, threads: int) -> subprocess.Popen[bytes]:
    """Start a run in one process with `threads` OpenMP threads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    overrides = [
        *SMALL, "placement=inprocess", "rollout=hf", f"placement.threads_per_worker={threads}", "data.val=null",
        f"trainer.total_steps={STEPS}", f"trainer.output_dir={output}",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "rltrain.main", *overrides], env=environment | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Wait until a process ends successfully, and return the CPU seconds that the process used."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_threads_of_two_runs_on_the_same_cores_do_not_spin(tmp_path):
    """Compare CPU seconds, because a thread that spins while another run holds its core uses CPU time.

    With `OMP_WAIT_POLICY=ACTIVE`, each of two runs with two threads uses about three times the CPU seconds of a run
    with one thread. With passive waiting, each run uses 1.2 times as many.
    """
    alone = cpu_s(begin(tmp_path / "alone", threads=1))
    beside = [begin(tmp_path / name, threads=2) for name in ("first", "second")]
    assert max([cpu_s(process) for process in beside]) < 2 * alone
