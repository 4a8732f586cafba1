"""Tests of the memory limit of an environment process."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
# The test runs in a new process, because a process cannot raise its own memory limit again.
RUN = """
import asyncio, json
from pathlib import Path
from tests.scripted_turns import REQUEST, Script, call, limits, say
from workers.environments.episode import run_episode
from workers.environments.messages import EnvironmentSource
from workers.environments.worker import EnvironmentWorker

tools = {name: "greedy_tools:" + name for name in ("hoard", "modest")}
worker = EnvironmentWorker("w", EnvironmentSource("", tools), limits(), Path("turns"), threaded=True, memory_mb=200)
engine = Script(call(("hoard", {})), call(("modest", {})), say("done"))
found = asyncio.run(run_episode(REQUEST, engine, worker._environment, limits()))
print(json.dumps([message["content"] for message in found.messages if message["role"] == "tool"]))
"""
TOOLS = '''
def hoard() -> int:
    """Allocate a gigabyte."""
    return len(bytearray(1 << 30))


def modest() -> int:
    """Allocate a megabyte."""
    return len(bytearray(1 << 20))
'''


def test_a_tool_that_allocates_too_much_gets_an_error_and_the_process_goes_on(tmp_path):
    (tmp_path / "greedy_tools.py").write_text(TOOLS)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused, modest = json.loads(done.stdout)
    assert refused.startswith("error:")
    assert "MemoryError" in refused
    assert modest == str(1 << 20)
