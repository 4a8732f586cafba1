"""The doctor finds the cause of the problem in runs that are broken on purpose, and finds no problem in healthy runs.

`make doctor-test` repeats the doctor's tests with runs of 40 training steps that have the sizes of the demo.
"""

import os

import pytest
from runs import train_here

from rltrain.monitoring.doctor.diagnosis import diagnose
from rltrain.monitoring.report.run_files import read_run
from workers.rollout.engines.hf.engine import HFEngine

FULL = os.environ.get("RLTRAIN_DOCTOR_TEST") == "full"
ONE_PROCESS = ["placement=inprocess", "rollout=hf", "trainer.sample_every=0", "trainer.trackers=[]"]
SIZE = [] if FULL else [
    "trainer.prompts_per_step=16", "trainer.prompts_per_minibatch=4", "data.val_size=16", "actor.lr_schedule=constant",
]  # fmt: skip
REWARDS = """
def constant(response):
    return 1.0


def fails(response, answer):
    if len(response) % 2:
        raise ValueError("odd length")
    return float(response[-2:] == f"#{answer}")


def some(prompt, response, answer):
    return float(response[-2:] == f"#{answer}") if prompt[0] in "012" else None


def always(response):
    return 0.7 * (response == "#5")
"""

# Each entry maps the name of a run to (training steps, reward function, arguments, names of the expected findings).
BROKEN = {
    "a constant reward": (6, "constant", [], ["dead reward"]),
    "a reward that raises for some answers": (
        3, "fails", ["reward.max_failed_fraction=1"], ["reward function fails"],
    ),
    "a reward that raises too often": (3, "fails", [], ["reward function fails"]),
    "a reward that applies to few prompts": (3, "some", [], ["reward never applies"]),
    "a learning rate a hundred times too high": (7, "", ["actor.lr=4e-2"], ["learning rate too high"]),
    "the same with one update a step": (
        7, "", ["actor.lr=4e-2", f"trainer.prompts_per_minibatch={64 if FULL else 16}"], ["learning rate too high"],
    ),
    "a length limit that no answer keeps": (4, "", ["rollout.max_response_length=2"], ["answers cut"]),
    "one answer that is always paid for": (
        16, "always", ["actor.lr=8e-4"], ["entropy collapsed", "reward hacking"],
    ),
    "stale answers without correction": (
        8, "", ["trainer.max_staleness=4", "algorithm.correction.level=null"], ["stale answers without correction"],
    ),
}  # fmt: skip


def findings(folder, steps, *words, reward=""):
    """Train for `steps` training steps, and return the names of the doctor's findings in the run."""
    (folder / "rewards.py").write_text(REWARDS)
    function = f"{{name: made, path: '{folder}/rewards.py:{reward}', success: 1.0}}"
    rewards = [f"reward.functions=[{function}]"] if reward else []
    count = f"trainer.total_steps={40 if FULL else steps}"
    train_here(folder / "run", *ONE_PROCESS, *SIZE, count, *rewards, *words)
    return diagnose(read_run(folder / "run", texts=False))


@pytest.mark.slow
@pytest.mark.timeout(1800 if FULL else 300)
@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_of_a_broken_run_is_named(tmp_path, settings_restored, name):
    steps, reward, words, expected = BROKEN[name]
    assert [finding.name for finding in findings(tmp_path, steps, *words, reward=reward)] == expected


@pytest.mark.slow
@pytest.mark.timeout(1800 if FULL else 300)
def test_an_engine_that_keeps_its_first_weights_is_recognised(tmp_path, settings_restored, monkeypatch):
    monkeypatch.setattr(HFEngine, "_copy", lambda self, tensors: None)
    found = findings(tmp_path, 6, "rollout.verify_sync=false")
    assert [finding.name for finding in found] == ["stale weights"]


@pytest.mark.slow
@pytest.mark.timeout(1800 if FULL else 300)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dapo"])
def test_a_healthy_run_has_no_finding(tmp_path, settings_restored, algorithm):
    assert findings(tmp_path, 10, f"algorithm={algorithm}") == []
