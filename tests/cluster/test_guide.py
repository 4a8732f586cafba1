"""The commands of docs/clusters.md, in their order, on two hosts. test_slurm.py runs the command for SLURM."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import hosts
from refusals import SMALL

from tests.documents import ROOT, bash_lines

pytestmark = [pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(900)]
BIN = Path(sys.executable).parent
ENV = {
    "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "2" * 64, "RAY_USAGE_STATS_ENABLED": "0",
    "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
}  # fmt: skip
SIZES = ["--num-cpus=2", "--object-store-memory=150000000"]
FEW = ["placement.actor_ranks=2", "placement.rollout_replicas=1"]


@pytest.fixture(scope="module")
def machines():
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def guide():
    """Return an iterator over the commands of the guide."""
    return iter(line for line in bash_lines("docs/clusters.md") if not line.startswith("sbatch "))


def on(host, command: str, *overrides: str) -> list[str]:
    """Return the command line that runs a command of the guide on a host, with overrides at its end."""
    text = command.replace("10.0.0.1", "10.78.0.1")
    return host.command(["bash", "-c", f'{text} "$@"', "bash", *overrides])


def run(host, command: str, *overrides: str, timeout: float = 300) -> str:
    """Run a command of the guide on a host, and return its output."""
    done = subprocess.run(
        on(host, command, *overrides), env={**os.environ, **ENV}, cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def steps(output: Path) -> list[int]:
    file = output / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_the_commands_of_the_guide_lead_from_two_machines_to_a_resumed_run(machines, guide, tmp_path):
    head, other = machines
    output = tmp_path / "run"
    small = [*SMALL, *FEW, "placement=colocated", f"trainer.output_dir={output}", "trainer.save_every=1"]
    run(head, next(guide), *SIZES)
    run(other, next(guide), *SIZES)
    status, until = next(guide), time.monotonic() + 30
    while (found := run(head, status)).count(" node_") != 2:  # Ray lists a new node only after a while.
        assert time.monotonic() < until, found
    checked = run(head, next(guide), *small)
    assert all(f"{host.name} ({host.address})" in checked for host in machines)
    assert "memory of 4 nodes" in run(head, next(guide))

    run(head, next(guide), *small, "trainer.total_steps=500")
    follow = next(guide)
    logs = subprocess.Popen(
        on(head, follow), env={**os.environ, **ENV}, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until = time.monotonic() + 240
    while time.monotonic() < until and logs.poll() is None and len(steps(output)) < 3:
        time.sleep(0.2)
    run(head, next(guide))
    printed, _ = logs.communicate(timeout=60)
    assert len(steps(output)) >= 3, printed[-3000:]
    assert "step 1" in printed

    done = steps(output)
    resumed = run(head, next(guide), *small, f"trainer.total_steps={done[-1] + 1}")
    assert "resum" in resumed
    assert steps(output) == list(range(1, done[-1] + 2))

    once = [*small, f"trainer.output_dir={tmp_path / 'once'}", "trainer.total_steps=1", "rollout=vllm"]
    run(head, next(guide), *once, "placement.address=10.78.0.1:6379")
    assert steps(tmp_path / "once") == [1]
    assert next(guide, None) is None
