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


def begun(output, name: str, *overrides: str, steps: int):
    """A run after so many steps, and the process of it that is called so."""
    process, metrics = start(output, *RUN, *overrides), output / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it takes no steps"
        time.sleep(0.01)
    return process, pid_of(output, name)


def pid_of(output, name: str) -> int:
    return json.loads((output / "processes.json").read_text())[name]["pid"]


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("rollout replica 0", signal.SIGSTOP, "rollout replica 0 has been stopped (SIGSTOP) for 3 s: another is"),
        ("training rank 1", signal.SIGKILL, "the training ranks start again"),
        ("reward worker 0", signal.SIGSTOP, ""),
    ],
)
def test_F4_the_death_of_one_process_changes_nothing_in_what_is_learnt(undisturbed, tmp_path, name, number, said):
    # Fewer replicas change nothing either.
    process, pid = begun(tmp_path / "run", name, "placement.rollout_replicas=1", steps=2)
    os.kill(pid, number)
    run = finish(process, tmp_path / "run")
    assert run.status == 0, run.stderr
    assert pid_of(run.output, name) != pid, "it was not replaced"
    assert run.survivors == []
    assert said in run.stderr
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    model = "model/model.safetensors"
    assert (run.output / model).read_bytes() == (undisturbed.output / model).read_bytes()
    assert "Traceback" not in run.stderr


def test_a_run_whose_training_ranks_may_not_restart_ends_with_one_line(tmp_path):
    output = tmp_path / "run"
    process, pid = begun(output, "training rank 1", "trainer.max_restarts=0", "trainer.total_steps=1000", steps=1)
    os.kill(pid, signal.SIGKILL)
    run = finish(process, output)
    assert (run.status, run.survivors) == (1, [])
    (line,) = [one for one in run.stderr.splitlines() if one.startswith("error: ")]
    assert "training rank 1 (pid" in line
    assert "trainer.max_restarts=0" in line
