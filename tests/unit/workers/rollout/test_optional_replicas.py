"""Tests of optional replicas, which start when the cluster has free resources and whose loss does not end the run."""

import asyncio

import pytest

from rltrain.base.errors import WorkerError
from tests.fake_replicas import RANKS, Replicas, keys_of, of_worker, request, settled
from tests.fake_replicas import give_weights as give_fake_weights
from workers.rollout import pool as pool_module
from workers.rollout import replica as replica_module
from workers.rollout.pool import RolloutPool
from workers.rollout.replica import Replica, ReplicaState


class Room:
    """A fake of the cluster's free resources, which an optional replica waits for until a test sets `free`."""

    def __init__(self):
        self.free, self.asked = asyncio.Event(), 0

    async def wait(self):
        self.asked += 1
        await self.free.wait()


@pytest.fixture
async def made(monkeypatch, tasks):
    """Return a pool of a needed and an optional replica, the fake replicas, and the fake of the free resources."""
    monkeypatch.setattr(pool_module, "sync", give_fake_weights)
    monkeypatch.setattr(replica_module, "RETRY_S", 0.0)
    replicas, room = Replicas(1, tasks), Room()
    replicas.hold_builds = False
    replicas.processes.append(None)
    replicas.all.append(Replica(1, lambda: replicas._start(1), room=room.wait))
    return RolloutPool(replicas.all, tasks), replicas, room


async def test_the_start_of_a_run_does_not_wait_for_an_optional_replica(made):
    pool, replicas, room = made
    await pool.start()
    room.free.set()
    await settled()
    assert (replicas.started, room.asked) == (1, 0)  # training ranks may still be starting, and may need the free CPU
    pool.submit([[request(0)], [request(1)]])
    await pool.load(RANKS, 0, check=True)
    assert replicas.processes[0].keys == [(0, 0), (1, 0)]


async def test_an_optional_replica_serves_as_soon_as_there_is_room(made):
    pool, replicas, room = made
    await pool.start()
    await pool.load(RANKS, 4, check=True)
    await settled()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.DEAD]
    room.free.set()
    await settled()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.SERVING]
    assert replicas.versions == [4, 4]
    pool.submit([[request(0)], [request(1)]])
    assert replicas.keys == [[(0, 0)], [(1, 0)]]
    await pool.load(RANKS, 5, check=True)
    assert replicas.versions == [5, 5]


async def test_no_optional_replica_starts_while_weights_change_because_ranks_may_need_the_room(made):
    pool, replicas, room = made
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    await settled()
    await pool.hold_weights()
    room.free.set()
    await settled()
    assert replicas.states[1] is ReplicaState.DEAD
    await pool.load(RANKS, 1, check=True)
    await settled()
    assert replicas.versions == [1, 1]


async def test_a_lost_optional_replica_takes_nothing_with_it_and_joins_again(made, caplog):
    """The lost replica's unfinished prompt groups are submitted again, and the pool does not count its deaths."""
    pool, replicas, room = made
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    room.free.set()
    for number in range(12):
        await settled()
        assert replicas.states == [ReplicaState.SERVING, ReplicaState.SERVING]
        pool.submit([[request(2 * number)], [request(2 * number + 1)]])
        await settled()
        (lost,) = replicas.processes[1].keys
        room.free.clear()
        replicas.processes[1].die()
        await settled()
        assert pool.take_lost() == {lost[0]}
        assert replicas.states[1] is ReplicaState.DEAD
        pool.submit([[request(lost[0])]])
        assert lost in replicas.processes[0].keys
        replicas.processes[0].answer(*replicas.processes[0].keys)
        assert len(await keys_of(pool)) == 2
        room.free.set()
    assert caplog.text.count("is gone: the run goes on with the other engines") == 12


async def test_optional_replicas_end_if_a_process_that_the_run_needs_is_replaced(made, caplog):
    pool, replicas, room = made
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    room.free.set()
    await settled()
    pool.submit([[request(0)], [request(1)]])
    await settled()
    optional = replicas.processes[1]
    room.free.clear()
    replicas.hold_builds = True
    replicas.processes[0].die()
    await settled()
    assert optional.how_lost == "ends, to make room for rollout replica 0"
    assert pool.take_lost() == {0, 1}
    room.free.set()
    await settled()
    assert replicas.states == [ReplicaState.STARTING, ReplicaState.DEAD]  # the replica that the run needs starts first
    replicas.processes[0].built.give()
    replicas.hold_builds = False
    for _ in range(3):
        await settled()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.SERVING]
    pool.make_room("the training ranks")
    assert replicas.processes[1].how_lost == "ends, to make room for the training ranks"
    assert replicas.processes[0].how_lost == ""


async def test_two_optional_replicas_do_not_count_on_the_same_room(made, tasks):
    pool, replicas, room = made
    other = Room()
    replicas.processes.append(None)
    replicas.all.append(Replica(2, lambda: replicas._start(2), room=other.wait))
    pool = RolloutPool(replicas.all, tasks)
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    replicas.hold_builds = True
    room.free.set()
    other.free.set()
    await settled()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.STARTING, ReplicaState.DEAD]
    replicas.processes[1].built.give()
    await settled()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.SERVING, ReplicaState.STARTING]


async def test_an_optional_replica_whose_engine_fails_does_not_end_the_run(made, tasks, caplog):
    pool, replicas, room = made
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    room.free.set()
    await settled()
    room.free.clear()
    pool.submit([[request(0)], [request(1)]])
    await settled()
    replicas.processes[1].open.fail(of_worker(WorkerError("out of memory")))
    await settled()
    tasks.check()
    assert pool.take_lost() == {1}
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.DEAD]
    assert "out of memory: the run goes on with the other engines" in caplog.text


async def test_an_optional_replica_whose_engine_cannot_be_built_does_not_end_the_run(made, tasks, caplog):
    pool, replicas, room = made
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    replicas.hold_builds = True
    room.free.set()
    await settled()
    room.free.clear()
    replicas.processes[1].built.fail(of_worker(WorkerError("no model here")))
    await settled()
    tasks.check()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.DEAD]
    assert "did not start" in caplog.text
    assert "no model here" in caplog.text
