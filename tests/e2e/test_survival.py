"""Whoever dies, a run ends with the weights of a run in which nobody did."""

import json
import os
import signal
import time

import pytest
from runs import SMALL, finish, start, train

pytestmark = pytest.mark.slow
STEPS = 5
RUN = [
    *SMALL, "rollout=hf", f"trainer.total_steps={STEPS}", "data.val=null", "trainer.deterministic=true",
    "placement.actor_ranks=2", "placement.rollout_replicas=2",
]  # fmt: skip


def struck(process, output, name: str, number: int, *, after: int) -> int:
    """Strike the process of a run that is called so, after so many steps; returns what its pid was."""
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < after:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it takes no steps"
        time.sleep(0.01)
    pid = pid_of(output, name)
    os.kill(pid, number)
    return pid


def pid_of(output, name: str) -> int:
    return json.loads((output / "processes.json").read_text())[name]["pid"]


def test_F4_deaths_of_an_engine_a_reward_worker_and_a_rank_change_nothing_in_what_is_learnt(tmp_path):
    """Nor does it make a difference how many replicas there are."""
    undisturbed, output = train(tmp_path / "undisturbed", *RUN), tmp_path / "run"
    assert undisturbed.status == 0, undisturbed.stderr
    process = start(output, *RUN, "placement.rollout_replicas=1")
    pids = {
        name: struck(process, output, name, number, after=after)
        for name, number, after in (
            ("rollout replica 0", signal.SIGSTOP, 1),
            ("reward worker 0", signal.SIGSTOP, 2),
            ("training rank 1", signal.SIGKILL, 3),
        )
    }
    run = finish(process, output)
    assert run.status == 0, run.stderr
    assert [name for name, pid in pids.items() if pid_of(output, name) == pid] == [], "not replaced"
    assert run.survivors == []
    assert "rollout replica 0 has been stopped (SIGSTOP) for 3 s: another is" in run.stderr
    assert "the training ranks start again" in run.stderr
    assert "the training ranks are back; going on after step 0" in run.stderr
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
    model = "model/model.safetensors"
    assert (output / model).read_bytes() == (undisturbed.output / model).read_bytes()
    assert "Traceback" not in run.stderr


def test_a_run_whose_training_ranks_may_not_restart_ends_with_one_line(tmp_path):
    output = tmp_path / "run"
    process = start(output, *RUN, "trainer.max_restarts=0", "trainer.total_steps=1000")
    struck(process, output, "training rank 1", signal.SIGKILL, after=1)
    run = finish(process, output)
    assert (run.status, run.survivors) == (1, [])
    (line,) = [one for one in run.stderr.splitlines() if one.startswith("error: ")]
    assert "training rank 1 (pid" in line
    assert "trainer.max_restarts=0" in line
