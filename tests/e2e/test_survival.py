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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = train(tmp_path_factory.mktemp("survival") / "run", *RUN)
    assert run.status == 0, run.stderr
    return run


def struck(output, name: str, number: int, *overrides: str):
    """A run in which this process is sent a signal after the second step; it must be replaced for the run to go on."""
    process = start(output, *RUN, *overrides)
    table, metrics = output / "processes.json", output / "metrics.jsonl"

    def steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    deadline = time.monotonic() + 200
    while steps() < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = json.loads(table.read_text())[name]["pid"]
    os.kill(pid, number)
    run = finish(process, output)
    assert json.loads(table.read_text())[name]["pid"] != pid, "it was not replaced"
    return run


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("rollout replica 0", signal.SIGKILL, "rollout replica 0 serves again"),
        ("rollout replica 0", signal.SIGSTOP, "rollout replica 0 has been stopped (SIGSTOP) for 3 s: another is"),
        ("training rank 1", signal.SIGKILL, "the training ranks start again"),
        ("training rank 0", signal.SIGSTOP, "has been stopped (SIGSTOP) for 3 s: the training ranks start again"),
        ("reward worker 0", signal.SIGSTOP, ""),
    ],
)
def test_F4_the_death_of_one_process_changes_nothing_in_what_is_learnt(undisturbed, tmp_path, name, number, said):
    run = struck(tmp_path / "run", name, number, "placement.rollout_replicas=1")  # which changes nothing either
    assert run.status == 0, run.stderr
    assert run.survivors == []
    assert said in run.stderr
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    model = "model/model.safetensors"
    assert (run.output / model).read_bytes() == (undisturbed.output / model).read_bytes()
    assert "Traceback" not in run.stderr


def test_a_run_whose_training_ranks_may_not_restart_ends_with_one_line(tmp_path):
    output = tmp_path / "run"
    process = start(output, *RUN, "trainer.max_restarts=0")
    deadline = time.monotonic() + 200
    while not (output / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    while "training rank 1" not in (output / "processes.json").read_text():
        time.sleep(0.01)
    os.kill(json.loads((output / "processes.json").read_text())["training rank 1"]["pid"], signal.SIGKILL)
    run = finish(process, output)
    assert (run.status, run.survivors) == (1, [])
    (line,) = [one for one in run.stderr.splitlines() if one.startswith("error: ")]
    assert "training rank 1 (pid" in line
    assert "trainer.max_restarts=0" in line
