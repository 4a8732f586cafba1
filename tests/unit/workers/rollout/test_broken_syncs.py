"""What a pool of replicas does when weight syncs break off, and with engines that have nothing to do."""

from types import SimpleNamespace

import pytest

from rltrain.base.errors import SyncError, WorkerLost
from tests.fake_replicas import ACTOR, Call, fail_syncs, pool_of, request
from workers.rollout import pool as pool_module
from workers.rollout.pool import State


@pytest.fixture
def made(monkeypatch):
    return lambda size, **more: pool_of(size, monkeypatch, **more)


def test_after_a_sync_that_a_training_rank_broke_off_engines_are_left_alone_until_they_have_weights(made, monkeypatch):
    pool, hosts = made(2, busy=True)
    plain = pool_module.sync

    def broken(*_, **__):
        hosts.fail_poll(0)
        raise WorkerLost("training rank 0 is gone")

    monkeypatch.setattr(pool_module, "sync", broken)
    with pytest.raises(WorkerLost, match="training rank 0"):
        pool.load(SimpleNamespace(hosts=SimpleNamespace(dead=lambda: {0: "is gone"})), 1, check=True)
    hosts.told.clear()
    assert ([pool.poll(0.0), pool.poll(0.0)], hosts.told) == ([[], []], [])  # as while new training ranks start
    assert hosts.busy == []  # nor do they hang who may not go on
    pool.abort()
    assert hosts.told == [(0, "abort"), (1, "abort")]  # they still have the old requests
    monkeypatch.setattr(pool_module, "sync", plain)
    pool.load(ACTOR, 1, check=True)
    pool.submit([[request(0)]])
    pool.poll(0.0)
    hosts.say(0, (0, 0))
    assert [answer.key for answer in pool.poll(0.0)] == [(0, 0)]


def test_a_replica_that_dies_in_a_sync_does_not_keep_the_others_from_the_next(made, monkeypatch):
    pool, hosts = made(2, busy=True)
    plain, syncs = pool_module.sync, []

    def sync(*arguments, **options):
        syncs.append(options["replicas"])
        if len(syncs) == 1:
            hosts.replicas[0].alive = False
            hosts.fail_poll(1)
        else:
            pool.poll(0.0)  # as whoever trains gets turns while the actor is waited for
        plain(*arguments, **options)

    monkeypatch.setattr(pool_module, "sync", sync)
    pool.load(ACTOR, 1, check=True)
    assert (syncs, pool.state) == ([[0, 1], [1]], [State.STARTING, State.SERVING])
    pool.poll(0.0)
    hosts.say(1, (1, 0))
    assert [answer.key for answer in pool.poll(0.0)] == [(1, 0)]


def test_an_engine_that_says_of_itself_that_a_sync_failed_is_believed(made):
    pool, hosts = made(1, busy=True)
    hosts.fail_poll(0)
    with pytest.raises(SyncError, match="of two versions"):
        pool.poll(0.0)


def test_a_replica_that_is_replaced_and_ready_before_its_sync_ends_is_still_the_one_to_blame(made, monkeypatch):
    pool, hosts = made(2)
    plain, syncs = pool_module.sync, []

    def sync(*arguments, **options):
        syncs.append(options["replicas"])
        if len(syncs) == 1:
            hosts.replicas[0].alive = False
            pool.poll(0.0)
            hosts.replicas[0].build.done = True
            pool.poll(0.0)
            raise WorkerLost("a process died in the sync")
        plain(*arguments, **options)

    monkeypatch.setattr(pool_module, "sync", sync)
    pool.load(ACTOR, 1, check=True)
    assert (syncs, [replica.version for replica in hosts.replicas]) == ([[0, 1], [0, 1]], [1, 1])


def test_answers_that_came_with_an_error_are_not_lost(made):
    pool, hosts = made(2, busy=True)
    hosts.say(0, (0, 0))
    hosts.fail_poll(1)
    with pytest.raises(SyncError, match="of two versions"):
        pool.poll(0.0)
    assert pool.pending == 2
    assert [answer.key for answer in pool.poll(0.0)] == [(0, 0)]
    assert pool.pending == 1
    hosts.say(1, (1, 0))
    assert [answer.key for answer in pool.poll(0.0)] == [(1, 0)]


def test_who_had_nothing_to_do_is_seen_before_it_gets_work(made):
    """Or the time in which nobody looked would count as that of a hang."""
    pool, hosts = made(1)
    hosts.busy = None
    pool.submit([[request(0)]])
    assert hosts.busy == []
    pool.poll(0.0)
    assert hosts.busy == [0]


def test_engines_that_wait_for_weights_are_closed_too(made, monkeypatch):
    pool, hosts = made(2)
    fail_syncs(monkeypatch, SyncError("weights differ"))
    with pytest.raises(SyncError, match="weights differ"):
        pool.load(ACTOR, 1, check=True)
    hosts.close, hosts.told = Call, []
    pool.close()
    assert hosts.told == [(0, "close"), (1, "close")]
