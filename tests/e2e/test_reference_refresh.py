"""A run that updates its reference model ends with the same weights in any placement, even if a process dies."""

import json
import os
import signal
import time

import pytest
import torch
from runs import SMALL, finish, start, train

from rltrain.base.storage import Folder
from workers.models.state_files import StateFiles

pytestmark = pytest.mark.slow
STEPS = 4
RUN = [
    *SMALL, "rollout=hf", f"trainer.total_steps={STEPS}", "trainer.deterministic=true", "trainer.save_every=1",
    "placement.threads_per_worker=1", "data.val=null", "actor.lr=3e-3",
    "algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.kl_loss.kl_estimator=full",
    "algorithm.reference.refresh_every=1", "algorithm.reference.refresh_coef=0.5",
]  # fmt: skip
MODEL = "model/model.safetensors"
# The trainer's program, on a machine that seems to have a core for each of the run's processes.
EIGHT_CORES = """
import sys
import rltrain.run.checks, workers.placement
for module in (rltrain.run.checks, workers.placement):
    module.cpu_cores = lambda: 8
from rltrain.main import main
sys.exit(main(sys.argv[1:]))
"""


def kill(process, output, name, *, after):
    """Kill the run's process `name` once the checkpoint of step `after` is complete."""
    manifest, deadline = output / f"checkpoints/step_{after}/manifest.json", time.monotonic() + 200
    while not manifest.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run saved no checkpoint"
        time.sleep(0.01)
    os.kill(json.loads((output / "processes.json").read_text())[name]["pid"], signal.SIGKILL)


@pytest.mark.broad
def test_F4_a_reference_in_processes_of_its_own_that_dies_comes_back_as_it_was_to_the_last_bit(tmp_path):
    """The undisturbed run has all roles in one process, and the other run has a process for each role."""
    undisturbed, output = train(tmp_path / "undisturbed", *RUN, "placement=inprocess"), tmp_path / "run"
    assert undisturbed.status == 0, undisturbed.stderr
    process = start(output, *RUN, "placement.share_ranks=false", program=("-c", EIGHT_CORES))
    kill(process, output, "reference rank 0", after=2)
    run = finish(process, output)
    assert run.status == 0, run.stderr
    assert run.survivors == []
    assert "the training ranks were restarted; training continues after step" in run.stderr
    assert [line["reference/refreshed"] for line in run.metrics()] == [1] * STEPS
    assert run.timeless() == undisturbed.timeless()
    assert (output / MODEL).read_bytes() == (undisturbed.output / MODEL).read_bytes()
    one, other = (
        StateFiles(Folder(str(path / f"checkpoints/step_{STEPS}/state/reference")))
        for path in (output, undisturbed.output)
    )
    names = one.names("model")
    assert names == other.names("model")
    assert len(names) > 10
    assert all(torch.equal(one.tensor(f"model.{name}"), other.tensor(f"model.{name}")) for name in names)
