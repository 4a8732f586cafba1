"""Tests of the reward pool on Ray: known scores, reward functions that misbehave, and the overhead of the pool."""

import asyncio
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from rltrain.base.errors import WorkerError
from rltrain.settings.compose import compose
from rltrain.settings.reward_config import RewardFunctionConfig
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.pool import RewardPool
from workers.reward.worker import RewardWorker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]

REWARDS = r"""
import ctypes, os, pathlib, re, sys, time

def number(response):
    return float(response)

def nap(response):
    time.sleep(0.01)
    return float(response)

def where(response):
    return float("torch" in sys.modules) if response == "torch" else float(os.getpid())

def misbehave(response, log):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    if response == "raise":
        raise ValueError("not today")
    if response == "hang":
        time.sleep(1000)
    if response == "power":
        return 7 ** 10**9 % 10  # one operation inside C that keeps the interpreter's lock
    if response == "regex":
        return bool(re.match("(a+)+$", "a" * 50 + "b"))
    if response == "exit":
        os._exit(0)
    if response == "segfault":
        ctypes.string_at(0)
    return float(response)
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """Return a function that makes the configs of reward functions, given the names of these functions.

    The path of the file that contains the reward functions is relative to the driver's working directory.
    """
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)

    def configs(*names: str) -> list[RewardFunctionConfig]:
        return [reward_function(name, f"rewards.py:{name}") for name in names]

    return configs


def on_ray(functions, *, workers: int = 1, spares: int = 0, runtime_env=None, **changes) -> RewardPool:
    config = replace(compose([])[0].reward, functions=functions, **{"timeout_s": 20.0} | changes)
    return RewardPool.on_ray(config, workers=workers, spares=spares, start_timeout_s=60.0, runtime_env=runtime_env)


def request(number: int, response: str, **columns) -> RewardRequest:
    return RewardRequest((number // 8, number % 8), "p", response, columns)


async def finish(pool: RewardPool) -> list[SampleScores]:
    results: list[SampleScores] = []
    while pool.pending:
        results += await pool.poll()
    return sorted(results, key=lambda result: result.key)


# Tests that a reward function gives the same scores in a reward process as in the test's own process, and that reward
# processes do not import torch


GOLDEN = [
    ("0227999#7", "7", "stop", 1.0),
    ("#7", "7", "stop", 1.0),
    ("#7", "7", "length", 0.0),
    ("#8", "7", "stop", 0.0),
]


async def test_G1_a_golden_set_scores_the_same_here_in_an_actor_and_in_the_pool():
    config = reward_function("final", "rltrain.rewards.final_answer:final_answer")
    requests = [request(i, r, answer=a, finish_reason=f) for i, (r, a, f, _) in enumerate(GOLDEN)]
    expected = [SampleScores(r.key, (score,)) for r, (*_, score) in zip(requests, GOLDEN, strict=True)]
    here = RewardWorker([config]).score(requests)
    actor = ray.remote(RewardWorker).options(num_cpus=0).remote([config])
    in_actor = ray.get(actor.score.remote(requests))
    ray.kill(actor)
    with on_ray([config]) as pool:
        assert pool._transport.idle() == []
        async with asyncio.timeout(60.0):
            assert await pool._transport.events() == [], "the start of a worker must not be an event"
        assert pool._transport.idle() == [0]
        pool.submit(requests)
        assert pool._transport.idle() == []
        in_pool = await finish(pool)
        assert pool._transport.idle() == [0]
    assert here == in_actor == in_pool == expected


ZERO_COPY = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"  # the variable makes Ray itself import torch when a process starts


@pytest.mark.parametrize("runtime_env", [None, {"env_vars": {ZERO_COPY: "1"}}], ids=["plain", "zero_copy"])
async def test_reward_processes_never_import_torch(functions, monkeypatch, runtime_env):
    if runtime_env:
        monkeypatch.setenv(ZERO_COPY, "1")
    with on_ray(functions("where"), runtime_env=runtime_env) as pool:
        pool.submit([request(0, "torch"), request(1, "pid")])
        torch, pid = (result.scores[0] for result in await finish(pool))
    assert torch == 0.0
    assert pid != os.getpid()


# Tests of reward functions that misbehave or whose file takes long to import


def survivors(log: Path) -> list[int]:
    """Return the pids of processes that ran a misbehaving call and are still alive after 5 s.

    The process that ran the last call is never returned.
    """
    pids = list(dict.fromkeys(int(line) for line in log.read_text().split()))
    for _ in range(100):
        alive = [pid for pid in pids[:-1] if os.path.exists(f"/proc/{pid}") and "Z" not in state(pid)]
        if not alive:
            break
        time.sleep(0.05)
    return alive


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.parametrize(
    ("misdeed", "said"),
    [
        ("raise", "raised ValueError: not today"),
        ("hang", "did not return within 0.7 s"),
        ("power", "did not return within 0.7 s"),
        ("regex", "did not return within 0.7 s"),
        ("exit", "ended its process (exit status 0)"),
        ("segfault", "ended its process (SIGSEGV)"),
    ],
)
async def test_G2_a_reward_that_misbehaves_is_failed_in_time_and_the_pool_is_whole_again(
    functions, tmp_path, misdeed, said
):
    log = tmp_path / "pids"
    with on_ray(functions("misbehave"), timeout_s=0.7) as pool:
        pool.submit([request(99, "0", log=str(log))])
        await finish(pool)
        start = time.monotonic()
        pool.submit(request(n, misdeed if n == 2 else str(n), log=str(log)) for n in range(6))
        results = await finish(pool)
        seconds = time.monotonic() - start
        pool.submit(request(n, str(n), log=str(log)) for n in range(20, 28))
        after = await finish(pool)
    bad = results.pop(2)
    assert (bad.key, bad.failed, bad.scores) == ((0, 2), True, (None,))
    assert bad.error.startswith(f"reward function 'misbehave' {said}")
    assert results == [SampleScores((0, n), (float(n),)) for n in (0, 1, 3, 4, 5)]
    assert after == [SampleScores((n // 8, n % 8), (float(n),)) for n in range(20, 28)]
    assert seconds < 20  # time for two calls that time out and two process starts on a busy machine
    assert survivors(log) == []


async def test_G2_a_slow_start_does_not_count_as_a_call_that_takes_too_long(functions, tmp_path):
    slow = tmp_path / "slow_start.py"
    slow.write_text("import time\ntime.sleep(1.5)\ndef score(response):\n    return float(response)\n")
    config = reward_function("slow", f"{slow}:score")
    with on_ray([config], timeout_s=0.5) as pool:
        pool.submit([request(1, "4")])
        assert await finish(pool) == [SampleScores((0, 1), (4.0,))]


# Tests that every score belongs to its response


async def test_G3_scores_belong_to_their_responses_while_workers_are_killed(functions):
    with on_ray(functions("nap"), workers=2) as pool:
        pool.submit(request(n, str(n)) for n in range(150))
        results, kills = [], 0
        while pool.pending:
            results += await pool.poll()
            if len(results) > 30 * (kills + 1) and kills < 2:
                ray.kill(pool._transport._slots[kills].actor)
                kills += 1
    assert kills == 2
    assert sorted(results, key=lambda r: r.key) == [SampleScores((n // 8, n % 8), (float(n),)) for n in range(150)]


# Tests of the start and the overhead of the pool


async def test_a_worker_that_cannot_start_stops_the_run_with_its_reason(tmp_path):
    path = tmp_path / "picky.py"
    path.write_text("import sys\nif 'ray' not in sys.modules:\n    raise OSError('no key')\ndef score(): ...\n")
    with on_ray([reward_function("picky", f"{path}:score")]) as pool:
        pool.submit([request(1, "4")])
        with pytest.raises(WorkerError, match=r"did not start in 3 attempts: .*picky.py does not import .*no key"):
            await finish(pool)


async def test_the_runtime_env_reaches_the_workers(tmp_path):
    path = tmp_path / "env.py"
    path.write_text("import os\ndef score():\n    return int(os.environ['RLTRAIN_TEST_SCORE'])\n")
    config = reward_function("env", f"{path}:score")
    with on_ray([config], runtime_env={"env_vars": {"RLTRAIN_TEST_SCORE": "17"}}) as pool:
        pool.submit([request(1, "")])
        assert await finish(pool) == [SampleScores((0, 1), (17.0,))]


async def test_512_cheap_samples_cost_less_than_64_that_are_scored_one_by_one(functions):
    async def seconds_of(pool, count):
        start = time.monotonic()
        pool.submit(request(n, str(n), answer="7", finish_reason="stop") for n in range(count))
        results = await finish(pool)
        assert [r.scores for r in results] == [(float(n),) for n in range(count)]
        return time.monotonic() - start

    with on_ray(functions("number")) as pool:
        await seconds_of(pool, 512)  # the first call waits until the process has started
        rounds = [(await seconds_of(pool, 512), [await seconds_of(pool, 1) for _ in range(16)]) for _ in range(4)]
    together, alone = min(seconds for seconds, _ in rounds), min(statistics.median(single) for _, single in rounds)
    assert together < 64 * alone


# Tests of slow calls

SLOW = """
import os, time

def quick(response):
    return 2.0

def hangs(response, log):
    with open(log, "a") as file:
        file.write(f"{response} {os.getpid()}\\n")
    if int(response) % 16 == 5:
        time.sleep(1000)
    return float(response)

async def patient(response):
    return 3.0
"""


@pytest.fixture
def slow(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    return lambda *names: [reward_function(name, f"{tmp_path}/slow.py:{name}") for name in names]


@pytest.mark.parametrize("names", [["hangs"], ["quick", "hangs"]])
async def test_other_samples_go_on_while_calls_hang_which_are_made_once_and_named(slow, tmp_path, names):
    log = tmp_path / "calls"
    with on_ray(slow(*names), spares=3, timeout_s=8.0) as pool:
        pool.submit([request(99, "0", log=str(log))])
        await finish(pool)
        pool.submit(request(n, str(n), log=str(log)) for n in range(48))
        results = []
        while pool.pending:
            results += await pool.poll()
    good, bad = results[:45], results[45:]
    own = (2.0,) * (len(names) - 1)
    assert sorted(r.scores for r in good) == [(*own, float(n)) for n in range(48) if n % 16 != 5], "hangs delay others"
    assert {r.error for r in bad} == {"reward function 'hangs' did not return within 8 s"}
    assert {r.key for r in bad} == {request(n, "").key for n in (5, 21, 37)}
    assert {r.failed_function for r in bad} == {len(names) - 1}
    calls = [line.split() for line in log.read_text().splitlines()]
    assert sorted(int(n) for n, _ in calls) == [0, *range(48)]
    assert 2 <= len({pid for _, pid in calls}) <= 4  # spare processes start only when a call hangs


async def test_without_spare_processes_a_hang_costs_its_own_sample_and_its_time_alone(slow, tmp_path):
    with on_ray(slow("hangs"), timeout_s=2.0) as pool:
        pool.submit(request(n, str(n), log=str(tmp_path / "calls")) for n in range(16))
        results = await finish(pool)
    assert [r.key for r in results if r.failed] == [request(5, "").key]
    assert sorted(int(line.split()[0]) for line in (tmp_path / "calls").read_text().splitlines()) == [*range(16)]


async def test_a_hang_beside_an_async_function_is_found_sample_by_sample(slow, tmp_path):
    with on_ray(slow("hangs", "patient"), spares=1, timeout_s=2.0) as pool:
        pool.submit(request(n, str(n), log=str(tmp_path / "calls")) for n in range(8))
        results = await finish(pool)
    assert [r.key for r in results if r.failed] == [request(5, "").key]
    assert [r.scores for r in results if not r.failed] == [(float(n), 3.0) for n in range(8) if n != 5]


async def test_a_spare_process_that_cannot_start_is_done_without(tmp_path):
    (tmp_path / "once.py").write_text(
        f"import os, sys, time\nif 'ray' not in sys.modules:\n    os.mkdir('{tmp_path}/taken')\n"
        "def score(response):\n    if response == 'slow':\n        time.sleep(1.5)\n    return 1.0\n"
    )
    with on_ray([reward_function("once", f"{tmp_path}/once.py:score")], spares=2, timeout_s=6.0) as pool:
        pool.submit([request(0, "slow"), *(request(n, "") for n in range(1, 6))])
        assert [r.scores for r in await finish(pool)] == [(1.0,)] * 6


async def test_G3_a_worker_killed_with_calls_in_several_of_its_processes_costs_no_sample(slow, tmp_path):
    with on_ray(slow("hangs"), spares=2, timeout_s=3.0) as pool:
        pool.submit(request(n, str(n), log=str(tmp_path / "calls")) for n in range(40))
        results = []
        while len(results) < 15:
            results += await pool.poll()
        ray.kill(pool._transport._slots[0].actor)
        while pool.pending:
            results += await pool.poll()
    assert sorted(r.key for r in results) == sorted(request(n, "").key for n in range(40))
    assert {r.key for r in results if r.failed} == {request(n, "").key for n in (5, 21, 37)}
