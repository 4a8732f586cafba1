"""What a pool of replicas does when one of them dies: fakes whose processes die, start and are ready when told to."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rltrain.base.errors import SyncError, WorkerError, WorkerLost
from tests.fake_replicas import ACTOR, fail_syncs, pool_of, request
from workers.rollout import pool as pool_module
from workers.rollout.pool import REPLACEMENTS, State


@pytest.fixture
def made(monkeypatch):
    return lambda size: pool_of(size, monkeypatch)


def test_a_replica_that_dies_is_replaced_and_works_again_with_the_weights_of_now_only(made):
    pool, hosts = made(2)
    pool.submit([[request(0), request(0, 1)], [request(1)]])
    pool.poll(0.0)
    pool.load(ACTOR, 1, check=True)
    hosts.replicas[0].alive = False
    assert pool.poll(0.0) == []
    assert pool.state == [State.STARTING, State.SERVING]
    assert (pool.take_lost(), pool.take_lost()) == ({0}, set())
    pool.submit([[request(0), request(0, 1)]])  # asked again: of the other one
    assert hosts.replicas[1].keys == [(1, 0), (0, 0), (0, 1)]
    hosts.replicas[0].build.done = True
    pool.poll(0.0)
    assert pool.state[0] is State.WAITING
    pool.submit([[request(2)]])
    assert hosts.replicas[0].keys == []
    pool.mend()
    pool.submit([[request(3)]])
    assert (hosts.replicas[0].keys, hosts.replicas[0].version) == ([(3, 0)], 1)


def test_with_no_replica_left_work_waits_for_the_next_one(made):
    pool, hosts = made(1)
    hosts.replicas[0].alive = False
    pool.look()
    pool.submit([[request(0)]])
    assert pool.pending == 1
    assert pool.poll(0.0) == []
    hosts.replicas[0].build.done = True
    pool.poll(0.0)
    assert hosts.replicas[0].keys == []
    pool.mend()
    assert (hosts.replicas[0].keys, pool.pending) == ([(0, 0)], 1)


def test_a_death_in_a_sync_leaves_the_others_with_the_weights(made):
    pool, hosts = made(3)
    hosts.replicas[1].alive = False
    pool._lose, lose = lambda *_: None, pool._lose  # the death shows in the sync, not before
    pool.look()
    pool._lose = lose
    pool.load(ACTOR, 1, check=True)
    assert [replica.version for replica in hosts.replicas] == [1, None, 1]
    assert pool.state == [State.SERVING, State.STARTING, State.SERVING]


@pytest.mark.parametrize("ready", [False, True])
def test_a_replica_that_is_replaced_while_a_sync_waits_for_the_actor_has_no_weights_yet(made, monkeypatch, ready):
    pool, hosts = made(2)
    plain = pool_module.sync

    def sync(*arguments, **options):
        plain(*arguments, **options)
        hosts.replicas[0].alive = False
        pool.poll(0.0)  # as whoever trains gets turns while the actor is waited for
        hosts.replicas[0].build.done = ready
        pool.poll(0.0)

    monkeypatch.setattr(pool_module, "sync", sync)
    pool.load(ACTOR, 1, check=True)
    assert pool.state == [State.WAITING if ready else State.STARTING, State.SERVING]
    pool.submit([[request(0)], [request(1)]])
    assert hosts.replicas[1].keys == [(0, 0), (1, 0)]
    monkeypatch.setattr(pool_module, "sync", plain)
    hosts.replicas[0].build.done = True
    pool.poll(0.0)
    pool.mend()
    assert (hosts.replicas[0].version, pool.state[0]) == (1, State.SERVING)


def test_a_training_rank_that_dies_in_a_sync_is_no_replicas_death(made, monkeypatch):
    pool, hosts = made(2)
    fail_syncs(monkeypatch, WorkerLost("training rank 0 is gone"))
    actor = SimpleNamespace(hosts=SimpleNamespace(dead=lambda: {0: "is gone"}))
    hosts.replicas[0].alive = False
    with pytest.raises(WorkerLost, match="training rank 0"):
        pool._sync([0, 1], actor, 1, check=True)


def test_a_sync_that_fails_though_all_are_alive_is_raised(made, monkeypatch):
    pool, _ = made(2)
    fail_syncs(monkeypatch, SyncError("weights differ"))
    with pytest.raises(SyncError, match="weights differ"):
        pool.load(ACTOR, 1, check=True)


def test_deaths_without_an_answer_in_between_are_bounded_and_an_answer_begins_anew(made):
    pool, hosts = made(1)
    for _ in range(2):
        for _ in range(REPLACEMENTS):
            hosts.replicas[0].alive = False
            pool.look()
        hosts.replicas[0].build.done = True
        pool.poll(0.0)
        pool.mend()
        pool.submit([[request(0)]])
        pool.poll(0.0)
        hosts.say(0, (0, 0))
        assert [one.key for one in pool.poll(0.0)] == [(0, 0)]
    for _ in range(REPLACEMENTS):
        hosts.replicas[0].alive = False
        pool.look()
    hosts.replicas[0].alive = False
    with pytest.raises(WorkerError, match="rollout replica 0 is gone; 4 died without an answer in between, and 3 may"):
        pool.look()


def test_an_engine_that_is_not_ready_in_time_counts_as_dead(made):
    pool, hosts = made(1)
    pool.start_timeout_s = -1.0
    hosts.replicas[0].alive = False
    pool.look()
    assert pool.deaths == 2
    assert pool.state == [State.STARTING]


def test_without_a_way_to_replace_it_a_death_ends_the_run(made):
    pool, hosts = made(1)
    pool.replace = None
    hosts.replicas[0].alive = False
    with pytest.raises(WorkerError, match="rollout replica 0 is gone"):
        pool.poll(0.0)


def test_after_an_abort_nothing_of_before_is_returned_though_it_is_asked_for_again(made):
    pool, hosts = made(1)
    pool.submit([[request(0)]])
    pool.poll(0.0)
    hosts.say(0, (0, 0))  # on its way
    pool.abort()
    pool.submit([[request(0)]])
    assert pool.poll(0.0) == []
    hosts.say(0, (0, 0))
    assert [one.key for one in pool.poll(0.0)] == [(0, 0)]


class Deaths(RuleBasedStateMachine):
    """Groups come, answers come, replicas die in any state and are ready again, weights change, in any order."""

    @initialize(size=st.integers(1, 3))
    def begin(self, size):
        self.patch = pytest.MonkeyPatch()
        self.pool, self.hosts = pool_of(size, self.patch)
        self.uid, self.version, self.missing, self.got = 0, 0, {}, []

    @rule(size=st.integers(1, 3))
    def submit(self, size):
        group = [request(self.uid, number) for number in range(size)]
        self.missing[self.uid] = {one.key for one in group}
        self.uid += 1
        self.pool.submit([group])

    @rule(data=st.data())
    def die(self, data):
        if self.pool.deaths < REPLACEMENTS * self.hosts.size:
            self.hosts.replicas[data.draw(st.integers(0, self.hosts.size - 1))].alive = False
            self.look()  # one at a time, or the pool gives up

    @rule(data=st.data())
    def ready(self, data):
        self.hosts.replicas[data.draw(st.integers(0, self.hosts.size - 1))].build.done = True

    @rule(data=st.data())
    def answer(self, data):
        able = [(n, k) for n, r in enumerate(self.hosts.replicas) if r.poll and not r.poll.done for k in r.keys]
        if able:
            self.hosts.say(*data.draw(st.sampled_from(able)))

    @rule()
    def look(self):
        self.pool.mend()
        for one in self.pool.poll(0.0):
            self.missing[one.key[0]].remove(one.key)  # or it came twice
            self.got.append(one)
            assert one.versions == [self.version] or one.versions[0] <= self.version
        for uid in self.pool.take_lost():
            if self.missing[uid]:
                self.pool.submit([[request(*key) for key in sorted(self.missing[uid])]])

    @rule()
    def load(self):
        self.version += 1
        self.pool.load(ACTOR, self.version, check=True)
        for replica, state in zip(self.hosts.replicas, self.pool.state, strict=True):
            assert state is not State.SERVING or replica.version == self.version

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def nothing_is_forgotten(self):
        assert self.pool.pending >= (1 if any(self.missing.values()) else 0)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for _ in range(200):
            for rank, replica in enumerate(self.hosts.replicas):
                replica.build.done = True
                if replica.poll and not replica.poll.done and replica.keys:
                    self.hosts.say(rank, replica.keys[0])
                elif replica.poll:
                    replica.poll.done = True
            self.look()
        self.patch.undo()
        assert not any(self.missing.values())


Deaths.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_every_answer_comes_exactly_once_whoever_dies = Deaths.TestCase
