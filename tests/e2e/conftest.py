"""Let tests import the shared helpers in the folder tests/e2e by name."""

import logging
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def no_idle_ranks():
    """End the rank processes of distributed tests that ran before in this process of pytest."""
    if "ranks" in sys.modules:
        sys.modules["ranks"].end_processes()


@pytest.fixture(scope="session")
def vllm_run(tmp_path_factory):
    """Do a training run with vLLM and two FSDP ranks.

    Returns the run, and a pair (address, process) for each socket that listened during the run.
    """
    from runs import WHOLE_STACK, finish, start
    from sockets import look

    output, found = tmp_path_factory.mktemp("vllm") / "run", {}
    process = start(output, *WHOLE_STACK)
    while process.poll() is None:
        look(output, found)
        time.sleep(0.2)
    return finish(process, output), list(found.values())


@pytest.fixture
def settings_restored():
    """Undo the changes that `main` makes to environment variables and log levels of the test process."""
    names = ("torch", "transformers", "vllm", "ray", "httpx")
    environment, levels = dict(os.environ), {name: logging.getLogger(name).level for name in names}
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
