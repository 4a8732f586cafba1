"""Tests that a reward function that damages its process ends in time and leaves no processes or files."""

import asyncio
import importlib.util
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import ray

from rltrain.settings.compose import compose
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.pool import RewardPool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FILE = Path(__file__).with_name("torture_rewards.py")
SPEC = importlib.util.spec_from_file_location("torture_rewards", FILE)
TORTURE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TORTURE)
LIMIT_S = 2.0
GRACE_S = 20.0  # seconds in which a busy machine can kill and start a process twice


@pytest.fixture(scope="module")
def session(ray_here):
    """Return the folder of Ray's files, including logs."""
    return Path(ray._private.worker._global_node.get_session_dir_path())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(session):
    function = reward_function("torture", f"{FILE}:score")
    reward = replace(compose([])[0].reward, functions=[function], timeout_s=LIMIT_S, memory_mb=1024)
    with RewardPool.on_ray(reward, workers=1, spares=2, start_timeout_s=60.0) as made:
        yield made


def request(number: int, **columns) -> RewardRequest:
    return RewardRequest((0, number), "p", "r" * number, columns)


async def finish(pool: RewardPool) -> list[SampleScores]:
    results: list[SampleScores] = []
    while pool.pending:
        results += await pool.poll()
    return sorted(results, key=lambda result: result.key)


def left_behind() -> list[str]:
    """Return the test's descendant processes that belong neither to Ray nor to the reward pool."""
    known = ("ray", "gcs_server", "workers.reward.child", "raylet", "multiprocessing")
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.name(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        if not any(word in text for text in name for word in known):
            found.append(f"{process.pid} {name}")
    return found


def children_of_the_pool() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if is_reward_process(p)]


def is_reward_process(process: psutil.Process) -> bool:
    try:
        return "workers.reward.child" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize("deed", TORTURE.DEEDS)
async def test_G2_it_is_answered_in_time_the_pool_is_whole_and_nothing_stays(pool, session, deed):
    _, fails, said = TORTURE.DEEDS[deed]
    pool.submit([request(1)])
    assert await finish(pool) == [SampleScores((0, 1), (1.0,))]
    logs = sum(path.stat().st_size for path in session.rglob("*") if path.is_file())
    start = time.monotonic()
    pool.submit([request(n, deed=deed if n == 2 else None) for n in range(1, 5)])
    results = await finish(pool)
    seconds = time.monotonic() - start
    pool.submit([request(n) for n in range(10, 20)])
    assert await finish(pool) == [SampleScores((0, n), (float(n),)) for n in range(10, 20)]
    bad = results.pop(1)
    assert results == [SampleScores((0, n), (float(n),)) for n in (1, 3, 4)]
    if fails:
        assert (bad.failed, bad.scores, bad.failed_function) == (True, (None,), 0)
        assert bad.error.startswith(f"reward function 'torture' {said}")
    else:
        assert bad == SampleScores((0, 2), (2.0,))
    assert seconds < 2 * LIMIT_S + GRACE_S  # a sample may be scored with others, and then again alone
    until = time.monotonic() + 5.0
    started = sum(slot.attempts > 0 for slot in pool._transport._slots)  # started processes, including spare processes
    while (left := (left_behind(), len(children_of_the_pool()))) != ([], started) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    assert left == ([], started)
    grown = sum(path.stat().st_size for path in session.rglob("*") if path.is_file()) - logs
    assert grown < 1 << 20


async def test_what_a_file_starts_when_it_is_imported_stays(session, tmp_path):
    path = tmp_path / "helper.py"
    path.write_text(
        "import subprocess, sys\n"
        # The condition of the next line is true only in a reward process.
        "if 'ray' not in sys.modules:\n    HELPER = subprocess.Popen(['sleep', '3600'])\n"
        "def score():\n    subprocess.Popen(['sleep', '3600'])\n    return float(HELPER.poll() is None)\n"
    )
    function = reward_function("helped", f"{path}:score")
    with RewardPool.on_ray(
        replace(compose([])[0].reward, functions=[function]), workers=1, start_timeout_s=60.0
    ) as pool:
        for number in range(3):
            pool.submit([request(number)])
            assert (await finish(pool))[0].scores == (1.0,)
    assert [text for text in left_behind() if "sleep" in text] == []


async def test_closing_the_pool_ends_a_call_that_runs_and_all_that_it_started(session):
    function = reward_function("torture", f"{FILE}:score")
    others = {process.pid for process in children_of_the_pool()}
    with RewardPool.on_ray(
        replace(compose([])[0].reward, functions=[function], timeout_s=60.0), workers=1, start_timeout_s=60.0
    ) as pool:
        pool.submit([request(1)])
        await finish(pool)
        pool.submit([request(1, deed="fork and hang")])
        polling = asyncio.create_task(pool.poll())
        until = time.monotonic() + 10.0
        while len(children_of_the_pool()) <= len(others) + 15 and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert len(children_of_the_pool()) > len(others) + 15
        assert not polling.done()
    async with asyncio.timeout(10.0):
        assert await polling == []
    assert {process.pid for process in children_of_the_pool()} == others
