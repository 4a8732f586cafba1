"""Helpers of tests in which a run on a cluster is refused before it starts."""

import subprocess
import time
from pathlib import Path

from hosts import Cluster

SMALL = [
    "placement=disaggregated", "rollout=hf", "placement.actor_ranks=2", "trainer.total_steps=2",
    "trainer.prompts_per_step=8", "trainer.prompts_per_minibatch=4", "rollout.samples_per_prompt=4", "data.val_size=16",
]  # fmt: skip


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Return the only line on stderr of a run that was refused."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def check(cluster: Cluster, shared: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `--check` on the cluster, and print how long it took."""
    began = time.monotonic()
    done = cluster.main("--check", *SMALL, f"trainer.output_dir={shared / 'run'}", *overrides)
    print(f"--check ended after {time.monotonic() - began:.1f} s")  # noqa: T201
    return done
