"""Distillation from a teacher that a real `vllm serve` serves."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from runs import train
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.settings.compose import compose
from rltrain.tasks import TASKS
from rltrain.tasks.tiny_model import make_start
from rltrain.trajectories.teacher_endpoint import TeacherEndpoint

pytestmark = [pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(900)]
START_S = 300
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Serve a tiny model with vLLM, and return the model's directory and the address of its API."""
    path = make_start(TASKS["median"], tmp_path_factory.mktemp("models") / "teacher", seed=1, steps=12)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` runs this module. The program `vllm` itself does not start if the package is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--port", str(port), "--max-model-len", "128", "--enforce-eager", "--dtype", "float32"]
    log = path.parent / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | ON_CPU)
    try:
        wait_for(f"http://127.0.0.1:{port}/v1/models", server, log)
        yield path, f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(url, timeout=5).read()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"vLLM did not start in {START_S} s: {log.read_text()[-2000:]}")


def test_log_probs_of_vllm_are_those_of_the_model(teacher):
    path, url = teacher
    config = compose(["algorithm=mopd", f"algorithm.distillation.teachers=[{url}]"])[0].algorithm.distillation
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    texts = [("2299907=", "0227999#7"), ("1234567=", "#4"), ("5=", "")]
    rows = [tuple(tokenizer.encode(text, add_special_tokens=False) for text in row) for row in texts]

    async def ask():
        endpoint = TeacherEndpoint(config.teachers[0], config)
        await endpoint.probe(tokenizer, rows[0][0], longest=100)
        return await endpoint.log_probs(rows)

    for (prompt, response), found in zip(rows, asyncio.run(ask()), strict=True):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_run_learns_from_a_teacher_that_vllm_serves(teacher, tmp_path):
    _, url = teacher
    run = train(
        tmp_path / "run", "placement=inprocess", "rollout=hf", "algorithm=mopd", "trainer.prompts_per_step=4",
        "trainer.prompts_per_minibatch=4", "rollout.samples_per_prompt=4", "data.val=null", "trainer.total_steps=2",
        f"algorithm.distillation.teachers=[{url}]",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert [step["actor/teacher_missing_fraction"] for step in run.metrics()] == [0.0, 0.0]
    assert all(0.0 < step["actor/teacher_kl"] < 10.0 for step in run.metrics())
