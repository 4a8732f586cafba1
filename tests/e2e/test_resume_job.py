"""Tests that a run that is killed at any moment and resumed gives the results of an undisturbed run."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import SMALL, finish, start, train, train_here
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
COMMON = [*SMALL, "placement=inprocess", "rollout=hf", "data.val=null", "trainer.deterministic=true"]


def lines(output: Path, name="metrics.jsonl") -> int:
    return (output / name).read_text().count("\n") if (output / name).exists() else 0


def wait_for(process, condition, timeout_s=200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def final_state(output: Path) -> dict[str, bytes]:
    """Return the files of the final weights, training state and ledger as bytes, by name.

    The contents of the returned files depend only on the training and not on interruptions.
    """
    (newest,) = (output / "checkpoints").glob("step_*")
    files = [newest / "model/model.safetensors", *(newest / "state").glob("*/__*"), output / "ledger.jsonl"]
    return {file.name if file.parent == output else str(file.relative_to(newest)): file.read_bytes() for file in files}


@pytest.mark.timeout(900)  # The test runs four programs one after the other.
@pytest.mark.usefixtures("settings_restored")
def test_F4_a_run_killed_at_random_moments_again_and_again_ends_as_the_undisturbed_one(tmp_path):
    common = [*COMMON, "trainer.total_steps=5", "trainer.save_every=1", "trainer.keep_checkpoints=1"]
    whole = train(tmp_path / "whole", *common)
    assert whole.status == 0, whole.stderr
    output, draw, kills = tmp_path / "killed", random.Random(0), 0
    for target in (1, 3):
        process = start(output, *common, "trainer.resume=auto")
        wait_for(process, lambda target=target: lines(output) >= target)
        time.sleep(draw.random() * 0.5)  # The run is killed at a random moment.
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        finish(process, output)
    assert kills > 0
    last = train(output, *common, "trainer.resume=auto")
    assert last.status == 0, last.stderr
    assert final_state(output) == final_state(tmp_path / "whole")
    used = [uid for line in last.lines("ledger.jsonl") for uid in line["used"]]
    assert used == list(range(40))
    assert [row["step"] for row in last.metrics()] == [1, 2, 3, 4, 5]
    again = train_here(output, *common, "trainer.resume=auto")
    assert (again.status, again.stderr) == (0, "")
    assert "nothing to do" in again.stdout


@pytest.mark.usefixtures("settings_restored")
def test_F4_sigterm_saves_a_checkpoint_says_how_to_go_on_and_a_new_folder_can_take_over(tmp_path):
    output = tmp_path / "run"
    process = start(output, *COMMON, "trainer.total_steps=100000", "actor.lr_schedule=constant")
    wait_for(process, lambda: lines(output) >= 2)
    process.send_signal(signal.SIGTERM)
    run = finish(process, output)
    assert run.status == 143, run.stdout + run.stderr
    assert "stopping: saving a checkpoint of step" in run.stdout
    assert f"trainer.output_dir={output} trainer.resume=auto" in run.stdout
    assert run.survivors == []
    AutoModelForCausalLM.from_pretrained(output / "model")
    (folder,) = (output / "checkpoints").iterdir()
    step = int(folder.name.removeprefix("step_"))
    assert step >= 2
    exported = subprocess.run(
        [sys.executable, "-m", "rltrain.export", str(folder), str(tmp_path / "exported")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(tmp_path / "exported") in exported.stdout
    weights = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert weights == (output / "model" / "model.safetensors").read_bytes()
    new = train(
        tmp_path / "new", *COMMON, f"trainer.total_steps={step + 1}", f"trainer.resume={output}",
        "actor.lr_schedule=constant",
    )  # fmt: skip
    assert new.status == 0, new.stderr
    # The metrics contain every step exactly once.
    assert [row["step"] for row in new.metrics()] == list(range(1, step + 2))
    used = [uid for line in new.lines("ledger.jsonl") for uid in line["used"]]
    assert used == list(range(8 * (step + 1)))
    other = train_here(output, *COMMON, "trainer.total_steps=100000", "trainer.resume=auto", "actor.lr=1e-5")
    assert other.status == 2
    assert other.stderr.startswith("error: actor.lr=1e-05: the checkpoint has 0.0004")


@pytest.mark.broad
def test_ray_ranks_go_on_from_a_checkpoint_also_as_another_number_of_them(tmp_path):
    output, common = tmp_path / "run", [*SMALL, "rollout=hf", "data.val=null", "algorithm=ppo", "trainer.save_every=1"]
    first = train(output, *common, "trainer.total_steps=2", "placement.actor_ranks=2")
    assert (first.status, first.stderr) == (0, "")
    manifest = json.loads((output / "checkpoints/step_2/manifest.json").read_text())["manifest"]["files"]
    assert {f"state/{role}/__{rank}_0.distcp" for role in ("actor", "critic") for rank in (0, 1)} <= manifest.keys()
    second = train(output, *common, "trainer.total_steps=3", "trainer.resume=auto")
    assert second.status == 0, second.stderr
    assert "the run continues after step 2" in second.stdout
    rows = second.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["actor/engine_gap"] < 1e-5
