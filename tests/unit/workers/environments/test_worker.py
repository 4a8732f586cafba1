"""Tests of the process of an environment worker."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
# The process builds the worker as a Ray actor does, and runs a trajectory with a tool and a game.
RUN = """
import json, sys
from pathlib import Path
from tests.environment_processes import Turns
from tests.scripted_turns import limits
from workers.cluster.worker_process import Host
from workers.environments.engines import LocalConnection
from workers.environments.messages import EnvironmentSource, EpisodeRequest

host = Host({})
source = EnvironmentSource("small_game:Game", {"work": "small_game:work"})
given = "w", source, limits(), Path("turns")
host.build("environment", "workers.environments.worker:EnvironmentWorker", *given, threaded=True)
request = EpisodeRequest((4, 0), [{"role": "user", "content": "go"}], {}, 1.0, 0)
host.call("environment", "submit", (0, 1), LocalConnection(Turns()), [request])
found = []
while not found:
    found = host.call("environment", "poll", 1.0)
heavy = [name for name in ("torch", "transformers", "tensordict", "vllm", "ray") if name in sys.modules]
print(json.dumps([found[0].stop_reason, found[0].environment_reward, heavy]))
"""
GAME = '''
def work(uid: int) -> int:
    """Return the number."""
    return uid


class Game:
    def step(self, text):
        return "", 0.5, True
'''


def test_the_process_of_an_environment_worker_imports_no_torch(tmp_path):
    (tmp_path / "small_game.py").write_text(GAME)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["done", 0.5, []]
