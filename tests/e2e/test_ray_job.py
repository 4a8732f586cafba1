"""A run submitted by `ray job submit` to a running one-node cluster."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, SMALL

pytestmark = pytest.mark.slow
RAY = str(Path(sys.executable).parent / "ray")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run(*command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture
def cluster(tmp_path_factory):
    """Start a one-node Ray cluster.

    Yields the environment variables that reach the cluster, and the address of the cluster's job server.
    """
    gcs, dashboard, client, agent_http, agent_grpc, metrics = free_ports(6)
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [
        RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}", "--num-cpus=2",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}", "--disable-usage-stats",
    ]  # fmt: skip
    head = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield env, f"http://127.0.0.1:{dashboard}"
    head.terminate()
    head.wait(60)


def wait_until_served(address: str, env: dict[str, str]) -> None:
    for _ in range(60):
        if run(RAY, "job", "list", "--address", address, env=env).returncode == 0:
            return
    raise AssertionError(f"no job server answers at {address}")


def test_a_submitted_job_trains_two_steps_on_a_running_cluster(cluster, tmp_path):
    env, address = cluster
    wait_until_served(address, env)
    done = run(
        RAY, "job", "submit", "--address", address, "--working-dir", ".", "--", sys.executable, "-m", "rltrain.main",
        "placement=colocated", f"trainer.output_dir={tmp_path}/run", "trainer.total_steps=2", *SMALL, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (tmp_path / "run" / "model" / "config.json").is_file()

    refused = run(
        RAY, "job", "submit", "--address", address, "--working-dir", ".", "--", sys.executable, "-m", "rltrain.main",
        "placement=colocated", "trainer.output_dir=relative", env=env,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "give an absolute path" in refused.stdout + refused.stderr
