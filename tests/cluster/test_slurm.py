"""The SLURM script, in which a stand-in for SLURM starts programs on two hosts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import hosts
from refusals import SMALL
from slurm import Slurm, child_of

from tests.documents import bash_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
(COMMAND,) = [line for line in bash_lines("docs/clusters.md") if line.startswith("sbatch ")]
FEW = ["placement.actor_ranks=2", "placement.rollout_replicas=1"]
ENV = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "SLURM_CPUS_PER_TASK": "2"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with hosts(2) as made, Slurm(made, tmp_path_factory.mktemp("bin")).running() as slurm:
        yield slurm


def left(slurm: Slurm) -> list[str]:
    """Return Ray's processes that still run on the hosts."""
    return [host.run(["pgrep", "--full", "raylet|gcs_server"]).stdout for host in slurm.hosts]


@pytest.mark.broad
def test_the_script_trains_on_all_nodes_is_requeued_at_its_time_limit_and_goes_on(slurm, tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    overrides = [*SMALL, *FEW, "trainer.total_steps=60", f"trainer.output_dir={output}"]
    with log.open("w") as file:
        job = slurm.sbatch(COMMAND, *overrides, env=ENV, stdout=file, stderr=file)
        until = time.monotonic() + 240
        while time.monotonic() < until and job.poll() is None and len(steps(output)) < 3:
            time.sleep(0.2)
        assert steps(output), log.read_text()[-3000:]
        os.kill(child_of(job), signal.SIGUSR1)
        assert job.wait(180) == 143, log.read_text()[-3000:]
        assert slurm.requeued == ["71"]
        assert left(slurm) == ["", ""]
        done = steps(output)
        assert done[-1] < 60
        overrides.append(f"trainer.total_steps={done[-1] + 1}")
        job = slurm.sbatch(COMMAND, *overrides, env=ENV, stdout=file, stderr=file)
        assert job.wait(300) == 0, log.read_text()[-3000:]
    assert steps(output) == [*done, done[-1] + 1]
    assert slurm.requeued == ["71"]
    assert left(slurm) == ["", ""]
    table = json.loads((output / "processes.json").read_text())
    assert len({one["node"] for one in table.values()}) == 2


def steps(output: Path) -> list[int]:
    file = output / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_a_node_on_which_ray_does_not_start_ends_the_job_with_one_line(slurm, tmp_path):
    broken = tmp_path / "srun"
    broken.write_text("#!/bin/sh\necho 'no such file' >&2\nexit 2\n")
    broken.chmod(0o755)
    env = {**ENV, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = slurm.sbatch(COMMAND, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, errors = job.communicate(timeout=240)
    assert job.returncode == 1
    assert errors.splitlines()[-1].startswith("error: not all 2 nodes joined Ray at 10.78.0.1:6379; the messages of ")
    assert left(slurm) == ["", ""]
