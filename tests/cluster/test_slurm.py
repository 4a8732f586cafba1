"""The SLURM script on two hosts, with stand-ins for `scontrol` and `srun` that run commands on the hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import hosts
from refusals import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/usr/bin/env bash
set -euo pipefail
while [[ "$1" == --* ]]; do
    case "$1" in
        --nodelist=*) node="${1#--nodelist=}" ;;
    esac
    shift
done
case "$node" in
    %s
esac
nsenter --target "$init" --net --mount --uts --pid --wd="$PWD" "$@" &
inside="$!"
trap 'pkill -TERM --parent "$inside"' TERM
wait "$inside" || { status="$?"; wait "$inside" 2>/dev/null || exit "$status"; }
"""


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_the_script_starts_a_cluster_trains_and_stops_the_cluster(tmp_path):
    with hosts(2) as made:
        tools = tmp_path / "bin"
        tools.mkdir()
        cases = "\n    ".join(f"{host.name}) init={host.init} ;;" for host in made)
        program(tools, "srun", SRUN % cases)
        program(tools, "scontrol", "#!/bin/sh\necho " + "; echo ".join(host.name for host in made) + "\n")
        environment = {
            **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
            "SLURM_JOB_NODELIST": "rlthost[1-2]", "SLURM_CPUS_PER_TASK": "2",
        }  # fmt: skip
        done = subprocess.run(
            [str(ROOT / "docker" / "slurm.sh"), *SMALL, f"trainer.output_dir={tmp_path}/run"],
            cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        left = [host.run(["pgrep", "-f", "raylet|gcs_server"]).stdout.split() for host in made]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    table = json.loads((tmp_path / "run" / "processes.json").read_text())
    assert len({one["node"] for one in table.values()}) == 2
    assert left == [[], []]
