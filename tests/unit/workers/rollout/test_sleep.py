"""Tests of replicas that die while engines and training ranks take turns on shared devices.

While training ranks compute, no engine may be built to replace a dead engine.
"""

import asyncio

import pytest

from tests.fake_replicas import RANKS, Reply, give_weights, pool_of, request, settled
from workers.rollout import pool as pool_module
from workers.rollout.replica import ReplicaState


@pytest.fixture
async def made(monkeypatch, tasks):
    """Return a pool of two engines that can sleep, and the pool's replicas.

    The test decides when replacement engines are built.
    """
    pool, replicas = await pool_of(2, monkeypatch, tasks)
    pool.sleeps = True
    return pool, replicas


def asleep(replicas):
    return [(process.alive, process.asleep) for process in replicas.processes]


async def test_one_that_dies_while_the_ranks_compute_is_replaced_by_the_next_load(made):
    pool, replicas = made
    await pool.sleep()
    before = replicas.processes[1]
    before.die()
    for _ in range(10):
        await settled()
    assert (replicas.states, pool._deaths) == ([ReplicaState.SERVING, ReplicaState.DEAD], 1)
    assert replicas.processes[1] is before
    await pool.load(RANKS, 1, check=True)
    await settled()
    assert replicas.processes[1] is not before
    assert (replicas.states, replicas.versions[0]) == ([ReplicaState.SERVING, ReplicaState.STARTING], 1)
    replicas.processes[1].built.give()
    await settled()
    pool.submit([[request(0)], [request(1)]])
    assert replicas.keys == [[(0, 0)], [(1, 0)]]


async def test_one_that_is_being_built_is_waited_for_and_sleeps_too(made):
    pool, replicas = made
    replicas.processes[1].die()
    await settled()
    sleeping = asyncio.ensure_future(pool.sleep())
    await settled()
    assert (sleeping.done(), pool.asleep) == (False, False)
    replicas.processes[1].built.give()
    await sleeping
    assert pool.asleep
    assert asleep(replicas) == [(True, True), (True, True)]
    await pool.load(RANKS, 1, check=True)
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.SERVING]
    assert asleep(replicas) == [(True, False), (True, False)]


async def test_one_that_waits_for_weights_sleeps_too(made):
    pool, replicas = made
    await pool.hold_weights()
    replicas.processes[1].die()
    await settled()
    replicas.processes[1].built.give()
    await settled()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.WAITING]
    await pool.sleep()
    assert asleep(replicas) == [(True, True), (True, True)]


@pytest.mark.parametrize("dying", [[1], [0, 1]])
async def test_those_that_die_when_they_are_told_to_sleep_have_successors_that_sleep(made, dying):
    pool, replicas = made
    for process in [replicas.processes[number] for number in dying]:
        process.take_sleep = lambda process=process: process.die() or Reply()
    sleeping = asyncio.ensure_future(pool.sleep())
    await settled()
    assert not sleeping.done()
    for number in dying:
        replicas.processes[number].built.give()
    await sleeping
    assert (pool.asleep, pool.sleeps) == (True, True)
    assert asleep(replicas) == [(True, True), (True, True)]
    assert [replicas.states[number] for number in dying] == [ReplicaState.WAITING] * len(dying)


async def test_one_that_slept_and_dies_while_another_is_waited_for_has_a_successor_that_sleeps(made):
    pool, replicas = made
    first, second = replicas.processes
    second.take_sleep = lambda: second.die() or Reply()
    sleeping = asyncio.ensure_future(pool.sleep())
    await settled()
    assert (first.asleep, sleeping.done()) == (True, False)
    first.die()
    await settled()
    replicas.processes[1].built.give()
    await settled()
    assert not sleeping.done()
    replicas.processes[0].built.give()
    await sleeping
    assert pool.asleep
    assert not first.alive
    assert asleep(replicas) == [(True, True), (True, True)]


async def test_one_that_is_getting_weights_sleeps_when_it_has_them(made, monkeypatch):
    pool, replicas = made
    arrived = asyncio.Event()

    async def slow_sync(*arguments, **options):
        await arrived.wait()
        await give_weights(*arguments, **options)

    monkeypatch.setattr(pool_module, "sync", slow_sync)
    replicas.processes[1].die()
    await settled()
    replicas.processes[1].built.give()
    await settled()
    replicas.told.clear()
    sleeping = asyncio.ensure_future(pool.sleep())
    await settled()
    assert (sleeping.done(), replicas.told) == (False, [])
    arrived.set()
    await sleeping
    assert (replicas.versions, asleep(replicas)) == ([0, 0], [(True, True), (True, True)])


async def test_one_that_was_built_before_the_others_slept_gets_no_weights_while_the_ranks_compute(made):
    pool, replicas = made
    replicas.processes[1].die()
    await settled()
    sleeping = asyncio.ensure_future(pool.sleep())
    await settled()
    replicas.processes[1].built.give()
    await sleeping
    await settled()
    assert (replicas.versions, replicas.states) == ([0, None], [ReplicaState.SERVING, ReplicaState.WAITING])
    assert asleep(replicas) == [(True, True), (True, True)]
    await pool.load(RANKS, 1, check=True)
    assert (replicas.versions, asleep(replicas)) == ([1, 1], [(True, False), (True, False)])


async def test_where_no_engine_sleeps_replacements_get_weights_as_before(made):
    pool, replicas = made
    for process in replicas.processes:
        process.take_sleep = lambda: Reply.of(False)
    replicas.processes[1].die()
    await settled()
    sleeping = asyncio.ensure_future(pool.sleep())
    await settled()
    replicas.processes[1].built.give()
    await sleeping
    await settled()
    assert (replicas.versions, replicas.states) == ([0, 0], [ReplicaState.SERVING, ReplicaState.SERVING])


async def test_where_no_engine_gives_its_memory_up_nobody_is_waited_for_then_or_later(made):
    pool, replicas = made
    for process in replicas.processes:
        process.take_sleep = lambda: Reply.of(False)
    await pool.sleep()
    assert (pool.asleep, pool.sleeps) == (False, False)
    replicas.processes[1].die()
    await settled()
    await pool.sleep()
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.STARTING]


async def test_all_engines_are_told_to_sleep_before_the_first_has_fallen_asleep(made):
    pool, replicas = made
    slow = [Reply(), Reply()]
    for process, reply in zip(replicas.processes, slow, strict=True):
        process.take_sleep = lambda reply=reply: reply
    sleeping = asyncio.ensure_future(pool.sleep())
    await settled()
    assert replicas.told == [(0, "sleep"), (1, "sleep")]
    assert not sleeping.done()
    for reply in slow:
        reply.give(True)
    await sleeping
    assert pool.asleep
