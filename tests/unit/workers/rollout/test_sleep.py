"""Replicas that die where engines and ranks take turns on their devices: none is built beside ranks that compute."""

import pytest

from tests.fake_replicas import ACTOR, Call, pool_of, request
from workers.rollout.pool import State


@pytest.fixture
def made(monkeypatch):
    """Engines that are built as soon as somebody waits for them."""
    pool, hosts = pool_of(2, monkeypatch)
    pool.sleeps, first = True, hosts.first

    def built_when_waited_for(pending, timeout_s):
        for replica in hosts.replicas:
            replica.build.done |= timeout_s > 0
        return first(pending, timeout_s)

    hosts.first = built_when_waited_for
    return pool, hosts


def test_one_that_dies_while_the_ranks_compute_is_replaced_by_the_next_load(made):
    pool, hosts = made
    pool.sleep()
    hosts.replicas[1].alive = False
    built = hosts.replicas[1]
    for _ in range(10):
        pool.look()
    assert (pool.state, pool.deaths) == ([State.SERVING, State.DEAD], 1)
    assert hosts.replicas[1] is built
    pool.load(ACTOR, 1, check=True)
    assert hosts.replicas[1] is not built
    assert (pool.state, hosts.replicas[0].version) == ([State.SERVING, State.STARTING], 1)
    hosts.replicas[1].build.done = True
    pool.poll(0.0)
    pool.mend()
    pool.submit([[request(0)], [request(1)]])
    assert [replica.keys for replica in hosts.replicas] == [[(0, 0)], [(1, 0)]]


def test_one_that_is_being_built_is_waited_for_and_sleeps_too(made):
    pool, hosts = made
    hosts.replicas[1].alive = False
    pool.look()
    assert not hosts.replicas[1].build.done
    pool.sleep()
    assert pool.asleep
    assert [replica.asleep for replica in hosts.replicas] == [True, True]
    pool.load(ACTOR, 1, check=True)
    assert pool.state == [State.SERVING, State.SERVING]


def test_one_that_waits_for_weights_sleeps_too(made):
    pool, hosts = made
    hosts.replicas[1].alive = False
    pool.look()
    hosts.replicas[1].build.done = True
    pool.look()
    assert pool.state == [State.SERVING, State.WAITING]
    pool.sleep()
    assert [replica.asleep for replica in hosts.replicas] == [True, True]


@pytest.mark.parametrize("dying", [[1], [0, 1]])
def test_those_that_die_when_they_are_told_to_sleep_have_successors_that_sleep(made, dying):
    pool, hosts = made
    sleep, first = hosts.sleep, list(hosts.replicas)

    def some_die(replica):
        replica.alive = replica not in [first[number] for number in dying]
        return sleep(replica)

    hosts.sleep = some_die
    pool.sleep()
    assert (pool.asleep, pool.sleeps) == (True, True)
    assert [(replica.alive, replica.asleep) for replica in hosts.replicas] == [(True, True), (True, True)]
    assert [pool.state[number] for number in dying] == [State.WAITING] * len(dying)


def test_one_that_slept_and_dies_while_another_is_waited_for_has_a_successor_that_sleeps(made):
    pool, hosts = made
    hosts.replicas[1].alive = False
    pool.look()
    first, asleep = hosts.first, hosts.replicas[0]

    def dies_meanwhile(pending, timeout_s):
        asleep.alive = asleep.alive and not asleep.asleep
        return first(pending, timeout_s)

    hosts.first = dies_meanwhile
    pool.sleep()
    assert pool.asleep
    assert not asleep.alive
    assert [(replica.alive, replica.asleep) for replica in hosts.replicas] == [(True, True), (True, True)]


def test_where_no_engine_gives_its_memory_up_nobody_is_waited_for_then_or_later(made):
    pool, hosts = made
    hosts.replicas[1].alive = False
    pool.look()
    hosts.sleep = lambda replica: Call(replica, value=False)
    pool.sleep()
    assert (pool.asleep, pool.sleeps) == (False, False)
    assert pool.state == [State.SERVING, State.STARTING]
