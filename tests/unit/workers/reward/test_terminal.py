"""Tests of reward functions that print, read the terminal or call a debugger, in a child process or in the driver."""

import asyncio
import bdb
import subprocess
import sys
from dataclasses import replace

import pytest

from rltrain.settings.compose import compose
from rltrain.settings.reward_config import RewardFunctionConfig
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.pool import RewardPool
from workers.reward.transport import Answer, Call
from workers.reward.worker import RewardWorker

FILE = """import asyncio, io, pdb, sys

print("imported")

def stops(response):
    try:
        breakpoint()
    except Exception:
        return 0.0

def asks(response):
    return float(input("score? "))

def traces(response):
    pdb.set_trace()
    return 1.0

async def waits(response):
    breakpoint()

def prints(response):
    print()
    print("got", response)
    print("more")
    return 1.0

def warns(response):
    print("unfinished", end="", file=sys.stderr)
    return float(sys.stdout.fileno())

async def prints_async(response):
    await asyncio.sleep(0)
    print("async", len(response))
    return 1.0

def quits(response):
    pdb.Pdb(stdin=io.StringIO("quit\\n"), stdout=io.StringIO(), nosigint=True).set_trace()
    return 1.0

async def quits_async(response):
    return quits(response)

def quits_batch(prompts, responses):
    return [quits(response) for response in responses]
"""
SCRIPT = """
import sys
from rltrain.settings.reward_config import RewardFunctionConfig
from workers.reward.guard import GuardedWorker
from workers.reward.messages import RewardRequest

path, *names = sys.argv[1:]
functions = [
    RewardFunctionConfig(name=n, path=f"{path}:{n}", weight=1.0, gate=False, outcome=True, success=None, kwargs={})
    for n in names
]
guard = GuardedWorker(functions, memory_mb=64)
guard.ping()
for number in range(len(functions)):
    (result,) = guard.score([RewardRequest((0, 0), "p", "abc", {})], deadline_s=60.0, function=number)
    print(result.error or result.scores, result.printed)
guard.stop()
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def function(path, name: str) -> RewardFunctionConfig:
    return reward_function(name, f"{path}:{name}")


def in_a_child(path, *names: str, **environment: str) -> list[str]:
    """Run each function on one sample in a child process, and return the printed lines and answers."""
    command = [sys.executable, "-c", SCRIPT, str(path), *names]
    variables = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110, env=variables)
    return done.stdout.splitlines()


def test_a_function_in_a_child_process_that_asks_for_the_terminal_fails_at_once_with_the_way_out(path):
    needs = "needs the driver's terminal: run with placement=inprocess ()"
    # Ray sets PYTHONBREAKPOINT to its own debugger in the processes from which the child processes are started.
    *found, traced = in_a_child(path, "stops", "asks", "waits", "traces", PYTHONBREAKPOINT="ray.util.rpdb.set_trace")
    assert found == [
        f"reward function 'stops' stops at {path}:7: breakpoint() {needs}",
        f"reward function 'asks' stops at {path}:12: input() {needs}",
        f"reward function 'waits' stops at {path}:19: breakpoint() {needs}",
    ]
    assert traced.startswith(f"reward function 'traces' stops at {path}:16: the debugger needs the driver's terminal")


def test_a_debugger_that_needs_no_terminal_is_left_to_the_user(path):
    (path.parent / "remote.py").write_text("def stop():\n    print('a remote debugger')\n")
    assert in_a_child(path, "stops", PYTHONBREAKPOINT="remote.stop") == ["(None,) (('stops', 'a remote debugger'),)"]
    assert in_a_child(path, "stops", PYTHONBREAKPOINT="0") == ["(None,) ()"]


def test_the_first_line_that_each_function_prints_in_a_child_process_comes_with_its_results(path):
    assert in_a_child(path, "prints", "warns", "prints_async") == [
        "(1.0,) (('prints', 'got abc'),)",
        "(1.0,) (('prints', 'got abc'), ('warns', 'unfinished'))",
        "(1.0,) (('prints', 'got abc'), ('warns', 'unfinished'), ('prints_async', 'async 3'))",
    ]


class Printing:
    """A fake transport in which a reward function has printed one line before every answer."""

    size = 1

    def __init__(self) -> None:
        self._call: Call | None = None

    def idle(self) -> list[int]:
        return [0] if self._call is None else []

    def start(self, slot: int, call: Call) -> None:
        self._call = call

    async def events(self) -> list[Answer]:
        await asyncio.sleep(0)
        call, self._call = self._call, None
        printed = (("score", "got abc"),)
        return [Answer(0, [SampleScores(r.key, (1.0,), printed=printed) for r in call.requests])] if call else []

    def close(self) -> None: ...


def test_the_pool_shows_the_first_printed_line_of_a_function_once(path, caplog):
    reward = replace(compose([])[0].reward, functions=[function(path, "prints")])

    async def scored() -> list[SampleScores]:
        pool, results = RewardPool(Printing(), reward), []
        pool.submit(RewardRequest((0, n), "p", "abc", {}) for n in range(40))
        while pool.pending:
            results += await pool.poll()
        return results

    results = asyncio.run(scored())
    assert len(results) == 40
    # the results contain no printed text, so checkpoints contain no printed text either
    assert all(result.printed == () for result in results)
    assert [record.getMessage() for record in caplog.records] == [
        "reward function 'score' printed: \"got abc\"; reward processes discard printed text; to see it, run with "
        "placement=inprocess"
    ]


@pytest.mark.parametrize("name", ["quits", "quits_async", "quits_batch"])
def test_quitting_the_debugger_in_the_driver_stops_the_run_and_fails_no_sample(path, name):
    request = RewardRequest((0, 0), "p", "abc", {})
    with pytest.raises(bdb.BdbQuit):
        RewardWorker([function(path, name)]).score([request])
    reward = replace(compose([])[0].reward, functions=[function(path, name)])

    async def polled() -> None:
        pool = RewardPool.in_process(reward)
        pool.submit([request])
        await pool.poll()

    with pytest.raises(bdb.BdbQuit):
        asyncio.run(polled())


def test_a_BdbQuit_in_a_child_process_fails_only_the_sample(path):
    (found,) = in_a_child(path, "quits")
    assert "reward function 'quits' raised BdbQuit" in found
