"""Tests of a judge model that vLLM's own server serves on the loopback address."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from rltrain.rewards.judge import judge
from rltrain.rewards.loading import finish

pytestmark = [pytest.mark.slow, pytest.mark.broad]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """Start vLLM's server with the tiny model as a judge, and yield the server's URL.

    The tiny model knows only the task `median`, in which a question is a text such as 2299907=.
    """
    from rltrain.tasks import TASKS
    from rltrain.tasks.tiny_model import cached_start

    pytest.importorskip("vllm")
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    shutil.copytree(cached_start(TASKS["median"]), folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), "--host",
        "127.0.0.1", "--port", str(port), "--dtype", "float32", "--chat-template", str(folder / "template.jinja"),
        "--served-model-name", "tiny", "--max-model-len", "128", "--kv-cache-memory-bytes", str(64 << 20),
        "--block-size", "32", "--enforce-eager",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)  # kill the server and its engine, which are one process group
            server.wait()


def _wait_for(url, server, log):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(1000):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with direct.open(url, timeout=1):
                return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")


def test_vllms_server_judges_and_its_number_is_the_reward(endpoint):
    """The model answers with a # and a digit, and the digit is the score."""
    options = {"question": "{prompt}{response}=", "score": r"#(\d)", "max_tokens": 16}
    results = [
        finish(judge("22999", response, base_url=endpoint, model="tiny", **options)) for response in ("07", "07", "11")
    ]
    assert not any(result.failed for result in results), results
    assert all(result.score in range(10) for result in results)
    assert results[0] == results[1]  # at temperature 0, equal requests get equal answers


def test_a_model_that_the_server_does_not_have_is_failed_with_its_words(endpoint):
    result = finish(judge("1", "2", base_url=endpoint, model="huge"))
    assert result.failed
    assert "NotFoundError" in result.message
    assert "huge" in result.message
