"""Sweeps whose jobs train, started as users start them."""

import dataclasses
import json

import pytest
import yaml
from runs import SMALL, train

pytestmark = pytest.mark.slow

# The answers of the built-in task have one character, so each supervised answer has 8 characters, such as `7, "#" 7`.
ANSWER = '{answer}, "#" {answer}'
ANSWER_TOKENS = 8 + 1  # One token for each character, and the end token.
JOB = [
    *SMALL, "placement=inprocess", "rollout=hf", "trainer.total_steps=1", "trainer.trackers=[]",
    f"data.sft_response={ANSWER}", "algorithm.sft_coef=0.5",
]  # fmt: skip


def job_of(sweep, number: int):
    """Return one job of a sweep as a run, and the result that the sweep recorded for the job."""
    job = dataclasses.replace(sweep, output=sweep.output / str(number))
    return job, json.loads((job.output / "sweep_job.json").read_text())


def check_trained(job, result, *, seed: int) -> None:
    """Check that a job has trained one step with its seed, and with the supervised answers from the command line."""
    config = yaml.safe_load((job.output / "config.yaml").read_text())
    assert (config["trainer"]["seed"], config["trainer"]["output_dir"]) == (seed, str(job.output))
    assert config["data"]["sft_response"] == ANSWER
    (step,) = job.metrics()
    assert step["step"] == 1
    assert step["actor/sft_tokens"] == 8 * ANSWER_TOKENS  # Each step has 8 prompts.
    last = job.lines("evaluations.jsonl")[-1]
    assert last["step"] == 1
    assert result["status"] == 0
    assert result["objective"] == last["eval/sampled_accuracy"]


def test_each_job_of_a_sweep_trains_with_its_own_values_and_the_same_free_text(tmp_path):
    sweep = train(tmp_path / "my sweep", "-m", *JOB, "trainer.seed=1,2")
    assert sweep.status == 0, sweep.stdout + sweep.stderr
    assert sweep.survivors == []
    (first, first_result), (second, second_result) = job_of(sweep, 0), job_of(sweep, 1)
    check_trained(first, first_result, seed=1)
    check_trained(second, second_result, seed=2)
    assert first.timeless() != second.timeless()
    assert "trainer.seed=1" in sweep.stdout
    assert "trainer.seed=2" in sweep.stdout


@pytest.mark.broad
def test_a_job_that_fails_makes_the_status_of_the_sweep_1_and_the_next_job_trains(tmp_path):
    # With rollout.max_prompt_length=1, all prompts are too long. The job can find this out only when it loads its data.
    sweep = train(tmp_path / "sweep", "-m", *JOB, "trainer.seed=1", "rollout.max_prompt_length=1,24")
    assert sweep.status == 1, sweep.stdout + sweep.stderr
    assert "Traceback" not in sweep.stderr
    (failed, failed_result), (trained, trained_result) = job_of(sweep, 0), job_of(sweep, 1)
    assert (failed_result["status"], failed_result["objective"]) == (2, None)
    assert not (failed.output / "metrics.jsonl").exists()
    check_trained(trained, trained_result, seed=1)


def test_a_wrong_value_of_the_last_job_is_refused_before_the_first_job_starts(tmp_path):
    sweep = train(tmp_path / "sweep", "-m", *JOB, "trainer.seed=1,-1")
    assert sweep.status == 2, sweep.stdout + sweep.stderr
    assert sweep.stderr.strip().endswith(
        "error: job 1 of the sweep (trainer.seed=-1): trainer.seed must be >= 0, got -1; no job was started"
    )
    assert not sweep.output.exists()
