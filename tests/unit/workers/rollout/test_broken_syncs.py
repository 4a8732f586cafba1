"""Tests of rollout pools in which a weight sync fails, or in which engines are idle."""

import time

import pytest

from rltrain.base.errors import SyncError, WorkerLost
from tests.fake_replicas import (
    LOST_RANKS,
    RANKS,
    fail_syncs,
    give_weights,
    keys_of,
    pool_of,
    request,
    settled,
)
from workers.rollout import pool as pool_module
from workers.rollout.replica import ReplicaState


@pytest.fixture
def made(monkeypatch, tasks):
    return lambda size, **more: pool_of(size, monkeypatch, tasks, **more)


async def test_after_a_sync_that_a_training_rank_broke_off_engines_are_left_alone_until_they_have_weights(
    made, monkeypatch
):
    pool, replicas = await made(2, busy=True)

    async def broken(*_, **__):
        replicas.processes[0].fail_poll()
        raise WorkerLost("training rank 0 is gone")

    monkeypatch.setattr(pool_module, "sync", broken)
    with pytest.raises(WorkerLost, match="training rank 0"):
        await pool.load(LOST_RANKS, 1, check=True)
    replicas.told.clear()
    await settled()
    replicas.processes[1].say()  # the replica answers a poll that was started before the sync
    # the pool stays idle, as it does while new training ranks start
    assert ([await keys_of(pool), await keys_of(pool)], replicas.told) == ([[], []], [])
    assert replicas.liveness.scopes == set()  # a replica that has to wait for weights does not count as hanging
    await pool.abort()
    # the replicas still hold requests that were sent before the sync
    assert sorted(replicas.told) == [(0, "abort"), (1, "abort")]
    monkeypatch.setattr(pool_module, "sync", give_weights)
    await pool.load(RANKS, 1, check=True)
    await pool.abort()  # the abort does not raise the error of the failed sync
    pool.submit([[request(0)]])
    await settled()
    replicas.processes[0].answer((0, 0))
    assert await keys_of(pool) == [(0, 0)]


async def test_a_replica_that_dies_in_a_sync_does_not_keep_the_others_from_the_next(made, monkeypatch, tasks):
    pool, replicas = await made(2, busy=True)
    syncs = []

    async def sync(ranks, engines, *arguments, **options):
        syncs.append([engine.process.name for engine in engines])
        if len(syncs) == 1:
            replicas.processes[0].alive = False
            replicas.processes[1].fail_poll()
        else:
            await settled()  # let all other tasks run, as in a sync that waits for the actor
        await give_weights(ranks, engines, *arguments, **options)

    monkeypatch.setattr(pool_module, "sync", sync)
    await pool.load(RANKS, 1, check=True)
    assert syncs == [["rollout replica 0", "rollout replica 1"], ["rollout replica 1"]]
    assert replicas.states == [ReplicaState.STARTING, ReplicaState.SERVING]
    await settled()
    tasks.check()
    replicas.processes[1].answer((1, 0))
    assert await keys_of(pool) == [(1, 0)]


async def test_an_engine_that_says_of_itself_that_a_sync_failed_is_believed(made, tasks):
    pool, replicas = await made(1, busy=True)
    replicas.processes[0].fail_poll()
    with pytest.raises(SyncError, match="of two versions"):
        await tasks.until(pool.poll())


async def test_a_replica_that_is_replaced_and_ready_before_its_sync_ends_is_still_the_one_to_blame(made, monkeypatch):
    pool, replicas = await made(2)
    syncs = []

    async def sync(ranks, engines, *arguments, **options):
        syncs.append([engine.process.name for engine in engines])
        if len(syncs) == 1:
            replicas.processes[0].die()
            await settled()
            replicas.processes[0].built.give()
            await settled()
            raise WorkerLost("a process died in the sync")
        await give_weights(ranks, engines, *arguments, **options)

    monkeypatch.setattr(pool_module, "sync", sync)
    await pool.load(RANKS, 1, check=True)
    assert (syncs, replicas.versions) == ([["rollout replica 0", "rollout replica 1"]] * 2, [1, 1])


async def test_answers_that_came_with_an_error_are_not_lost(made, tasks):
    pool, replicas = await made(2, busy=True)
    replicas.processes[0].answer((0, 0))
    replicas.processes[1].fail_poll()
    await settled()
    with pytest.raises(SyncError, match="of two versions"):
        tasks.check()
    assert pool.pending == 2
    assert await keys_of(pool) == [(0, 0)]
    assert pool.pending == 1


async def test_who_had_nothing_to_do_is_seen_before_it_gets_work(made, monkeypatch, tasks):
    """The time during which no process observes a replica must not count towards the replica's hang timeout."""
    pool, replicas = await made(1)
    process, now = replicas.processes[0], [time.monotonic()]
    monkeypatch.setattr("workers.cluster.liveness.time", type("Clock", (), {"monotonic": lambda: now[0]}))
    replicas.liveness.hang_timeout_s = 10.0
    assert replicas.liveness.scopes == set()
    now[0] += 1000.0
    pool.submit([[request(0)]])
    await settled()
    (scope,) = replicas.liveness.scopes
    assert scope.processes == [process]
    await scope.check_progress()
    assert process.how_lost == ""
    now[0] += 10.0
    await scope.check_progress()
    assert process.how_lost == "made no progress for 10 s"


async def test_engines_that_wait_for_weights_are_closed_too(made, monkeypatch):
    pool, replicas = await made(2)
    fail_syncs(monkeypatch, SyncError("weights differ"))
    with pytest.raises(SyncError, match="weights differ"):
        await pool.load(RANKS, 1, check=True)
    assert replicas.states == [ReplicaState.WAITING] * 2
    replicas.told.clear()
    await pool.close()
    assert replicas.told == [(0, "close"), (1, "close")]
