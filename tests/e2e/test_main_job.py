"""Runs of the whole program, which is started as users start it."""

import os
import signal
import time

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from runs import SMALL, WHOLE_STACK, finish, start, train, train_here
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow


def check_outputs(run, steps: int) -> None:
    """Check every documented output of a run by reading the output with the libraries that users would use."""
    assert [row["step"] for row in run.metrics()] == list(range(1, steps + 1))
    assert [row["step"] for row in run.lines("evaluations.jsonl")] == [0, steps]
    table = pq.read_table(run.output / "rollouts" / f"step_{steps:06d}.parquet")
    assert table.num_rows == 32
    rows = table.to_pylist()
    assert all(len(row["response_ids"]) == len(row["rollout_log_probs"]) == len(row["advantages"]) for row in rows)
    assert {len(row["prompt"]) for row in rows} == {8}
    assert "trainer:" in (run.output / "config.yaml").read_text()
    assert any((run.output / "tensorboard").glob("events.*"))
    with Image.open(run.output / "learning_curve.png") as picture:
        assert picture.size[0] > 400
    model = AutoModelForCausalLM.from_pretrained(run.output / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.output / "model")
    logits = model(torch.tensor([tokenizer("2299907=")["input_ids"]])).logits
    assert bool(logits.isfinite().all())


def test_ray_vllm_and_two_fsdp_ranks_train_end_to_end_and_leave_no_process(vllm_run):
    run, _ = vllm_run
    assert run.status == 0, run.stderr
    assert run.stderr == ""
    assert "8 prompts x 4 samples = 32 sequences" in run.stdout
    assert "held-out accuracy after 0 steps" in run.stdout
    assert "learning_curve.png" in run.stdout
    assert run.survivors == []
    check_outputs(run, 3)
    for row in run.metrics():
        assert row["rollout/log_prob_gap_max"] < 1e-4  # In float32, engine and trainer compute almost equal log-probs.
        assert row["actor/grad_norm"] > 0
    assert run.metrics()[0]["rollout/log_prob_gap"] > 0  # A gap of 0 would mean that nothing was measured.


@pytest.mark.usefixtures("settings_restored")
def test_one_process_without_ray_trains_end_to_end_and_a_seed_reproduces_it(tmp_path):
    """Equal seeds give bitwise equal metrics, except for times, and different seeds give different metrics."""
    common = [*SMALL, "placement=inprocess", "rollout=hf", "trainer.total_steps=3", "trainer.deterministic=true"]
    first, again = (train(tmp_path / name, *common) for name in ("first", "again"))
    other = train_here(tmp_path / "other", *common, "trainer.seed=1")
    for run in (first, again, other):
        assert run.status == 0, run.stderr
        check_outputs(run, 3)
    assert first.timeless() == again.timeless()
    assert first.timeless() != other.timeless()


@pytest.mark.broad
def test_with_vllm_two_synchronous_runs_have_the_same_samples(vllm_run, tmp_path):
    (first, _), again = vllm_run, train(tmp_path / "again", *WHOLE_STACK)
    assert again.status == 0, again.stderr
    for one, other in zip(first.samples().values(), again.samples().values(), strict=True):
        for column in ("uid", "prompt_ids", "response_ids", "response", "score", "finish_reason"):
            assert one[column] == other[column], column


@pytest.mark.usefixtures("settings_restored")
@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "dr_grpo", "dapo", "rloo"])
def test_every_preset_runs_with_kl_terms_on(tmp_path, algorithm):
    run = train_here(
        tmp_path / "run", *SMALL, "placement=inprocess", "rollout=hf", "trainer.total_steps=2",
        f"algorithm={algorithm}",
        "algorithm.kl_loss.kl_loss_coef=0.01", "algorithm.kl_in_reward.kl_coef=0.02", "data.val=null",
        "algorithm.kl_in_reward.controller=adaptive", "algorithm.entropy_coef=0.001",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    first, second = run.metrics()
    assert first["reward/kl"] == pytest.approx(0, abs=1e-6)  # The actor starts with the reference model's weights.
    assert second["reward/kl"] > 0
    assert first["actor/ref_kl"] > 0
    assert second["reward/kl_coef"] != first["reward/kl_coef"]
    assert first["actor/entropy"] > 0
    assert ("critic/value_loss" in first) == (algorithm == "ppo")


def test_ctrl_c_saves_the_model_and_leaves_no_process(tmp_path):
    output = tmp_path / "run"
    process = start(output, *SMALL, "trainer.total_steps=100000", "data.val=null")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = (output / "metrics.jsonl").read_text().count("\n") if (output / "metrics.jsonl").exists() else 0
        if lines >= 3:
            break
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # On Ctrl-C, a terminal signals every process of the foreground group.
    run = finish(process, output)
    assert run.status == 130, run.stdout + run.stderr
    assert run.survivors == []
    assert "Stopped early" in run.stdout
    assert "Traceback" not in run.stderr
    assert len(run.metrics()) >= 3
    AutoModelForCausalLM.from_pretrained(output / "model")
