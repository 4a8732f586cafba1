"""A run uses a host that joins the cluster during the run, and continues without loss when the host fails."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
from hosts import Cluster, hosts

pytestmark = [pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(900)]
LIMIT_S = 240.0


def test_a_joining_host_serves_and_a_leaving_host_takes_nothing_with_it(tmp_path):
    output, log = tmp_path / "run", tmp_path / "log.txt"
    with hosts(3) as made:
        cluster = Cluster(made, {"OMP_NUM_THREADS": "1"})
        for host in made[:2]:
            cluster.join(host, 1)  # one training rank and one engine use all CPUs of these two hosts
        with log.open("w") as stream:
            run = made[0].popen(
                [sys.executable, "-m", "rltrain.main", f"placement.address={cluster.address}",
                 f"trainer.output_dir={output}", "placement=disaggregated", "rollout=hf",
                 "placement.rollout_replicas=1-2", "trainer.total_steps=10000", "trainer.prompts_per_step=4",
                 "trainer.prompts_per_minibatch=4", "rollout.samples_per_prompt=2", "data.val=null"],
                cluster.env, stdout=stream, stderr=stream,
            )  # fmt: skip

        def steps() -> list[int]:
            metrics = output / "metrics.jsonl"
            return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

        def wait_for(what: str | Callable[[], bool]) -> None:
            deadline = time.monotonic() + LIMIT_S
            while not (what() if callable(what) else what in log.read_text()):
                assert run.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, f"timeout while waiting for {what}\n{log.read_text()[-3000:]}"
                time.sleep(0.2)

        wait_for(lambda: len(steps()) >= 3)
        assert "replica 1" not in log.read_text()
        cluster.join(made[2], 1)
        wait_for("rollout replica 1 starts, because the cluster has room for it")
        wait_for("rollout replica 1 serves, with weights of version ")
        table = json.loads((output / "processes.json").read_text())
        assert len({one["node"] for name, one in table.items() if name.startswith(("actor", "rollout"))}) == 3
        made[2].power_off()
        wait_for("the run goes on with the other engines")
        last = len(steps())
        wait_for(lambda: len(steps()) >= last + 20)
        for pid, words in made[0].processes().items():
            if "-m rltrain.main" in words:
                os.kill(pid, signal.SIGTERM)
        assert run.wait(120) == 128 + signal.SIGTERM, log.read_text()[-3000:]
    assert steps() == list(range(1, len(steps()) + 1))
    assert "start again" not in log.read_text()
