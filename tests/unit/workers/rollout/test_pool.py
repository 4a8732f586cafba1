"""Several replicas as one: slow ones, whose polls stay open until they have something to say."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rltrain.base.errors import WorkerError
from workers.cluster.host_groups import Hosts
from workers.rollout.messages import Completion, Request
from workers.rollout.pool import LONG_POLL_S, RolloutPool


def request(uid: int, number: int = 0) -> Request:
    return Request((uid, number), [1], 1.0, 4, 0)


def answer(key: tuple[int, int]) -> Completion:
    return Completion(key, [2], [-1.0], "stop", [0])


class Poll:
    """A poll that is under way; `answers` are there once the replica has said them."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s, self.answers = patience_s, None


class SlowHosts(Hosts):
    """Replicas that answer a poll when `say` is called, and submissions at once."""

    def __init__(self, size: int, *, concurrent: bool = True) -> None:
        self.size, self.concurrent, self.meanwhile = size, concurrent, None
        self.running: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self.finished: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self.open: list[Poll | None] = [None] * size
        self.patience: list[float] = []

    def start(self, role, method, arguments, *, ranks=None):
        assert role == "rollout"
        ranks = range(self.size) if ranks is None else ranks
        return [getattr(self, method)(rank, *own) for rank, own in zip(ranks, arguments, strict=True)]

    def submit(self, rank, requests):
        self.running[rank] += [request.key for request in requests]

    def poll(self, rank, patience_s):
        assert self.open[rank] is None, f"replica {rank} has a poll to answer already"
        self.patience.append(patience_s)
        self.open[rank] = Poll(patience_s)
        if not self.concurrent:
            self.say(rank)
        return self.open[rank] or Poll(0)

    def abort(self, rank):
        self.running[rank], self.finished[rank] = [], []
        if self.open[rank]:
            self.say(rank)

    def finish(self, rank, key):
        self.running[rank].remove(key)
        self.finished[rank].append(key)

    def say(self, rank):
        """Answer the open poll with what is finished, be it nothing, as after its patience."""
        self.open[rank].answers, self.open[rank] = [answer(key) for key in self.finished[rank]], None
        self.finished[rank] = []

    def first(self, pending, timeout_s):
        return [number for number, one in enumerate(pending) if one is None or one.answers is not None]

    def wait(self, pending, **_):
        assert all(one is None or one.answers is not None for one in pending), "waits for a slow replica"
        return [one and one.answers for one in pending]


def test_a_slow_replica_holds_no_other_up_and_is_asked_once():
    hosts = SlowHosts(2)
    pool = RolloutPool(hosts)
    pool.submit([[request(0)], [request(1)], [request(2)]])
    assert hosts.running == [[(0, 0), (2, 0)], [(1, 0)]]
    assert pool.poll(0.0) == []
    slow = hosts.open[0]
    hosts.finish(1, (1, 0))
    hosts.say(1)
    assert [found.key for found in pool.poll(0.0)] == [(1, 0)]
    for _ in range(3):
        assert pool.poll(0.0) == []
    assert hosts.open == [slow, None]  # who has nothing to answer is not asked
    assert hosts.patience == [LONG_POLL_S] * 2
    hosts.finish(0, (0, 0))
    hosts.finish(0, (2, 0))
    hosts.say(0)
    assert [found.key for found in pool.poll(0.0)] == [(0, 0), (2, 0)]
    assert (pool.pending, hosts.open) == (0, [None, None])


def test_submissions_are_not_waited_for_and_one_that_failed_is_raised_by_the_next_poll():
    class Hesitant(SlowHosts):
        def submit(self, rank, requests):
            super().submit(rank, requests)
            return Poll(0)

        def wait(self, pending, **_):
            if any(one is not None and one.answers == "broke" for one in pending):
                raise WorkerError("the engine broke")
            return super().wait(pending)

    hosts = Hesitant(2)
    pool = RolloutPool(hosts)
    pool.submit([[request(0)]])
    assert hosts.running == [[(0, 0)], []]  # nothing goes to a replica that has nothing to do
    ((_, sent),) = pool.sent
    assert pool.poll(0.0) == []
    assert pool.sent == [(0, sent)]
    sent.answers = "broke"
    with pytest.raises(WorkerError, match="the engine broke"):
        pool.poll(0.0)


def test_a_replica_that_said_nothing_is_asked_again():
    hosts = SlowHosts(1)
    pool = RolloutPool(hosts)
    pool.submit([[request(0)]])
    for times in (1, 2, 3):
        assert pool.poll(0.0) == []  # asks
        assert len(hosts.patience) == times
        hosts.say(0)
        assert pool.poll(0.0) == []  # hears that there is nothing
    assert pool.pending == 1


def test_a_replica_in_this_very_process_is_given_the_callers_own_patience():
    hosts = SlowHosts(1, concurrent=False)
    hosts.wait = lambda pending, **_: [one and (one.answers or []) for one in pending]
    hosts.first = lambda pending, timeout_s: list(range(len(pending)))
    pool = RolloutPool(hosts)
    pool.submit([[request(0)]])
    pool.poll(0.25)
    assert hosts.patience == [0.25]


def test_a_call_of_others_that_ends_breaks_off_the_wait_for_answers_and_is_no_answer():
    hosts, waited = SlowHosts(1), []

    def first(pending, timeout_s):
        if timeout_s:
            waited.append(list(pending))
        return SlowHosts.first(hosts, pending, timeout_s)

    hosts.first, other = first, Poll(0)
    pool = RolloutPool(hosts)
    pool.beside = lambda: [other]
    pool.submit([[request(0)]])
    other.answers = [answer((7, 7))]
    assert pool.poll(0.25) == []
    assert waited == [[hosts.open[0], other]]
    hosts.finish(0, (0, 0))
    hosts.say(0)
    assert [found.key for found in pool.poll(0.25)] == [(0, 0)]


def test_an_answer_to_what_was_aborted_is_not_passed_on():
    hosts = SlowHosts(1)
    pool = RolloutPool(hosts)
    pool.submit([[request(0), request(0, 1)]])
    pool.poll(0.0)
    hosts.finish(0, (0, 0))
    hosts.say(0)  # on its way when the abort comes
    pool.abort()
    assert (pool.pending, pool.poll(0.0)) == (0, [])
    pool.submit([[request(1)]])
    hosts.finish(0, (1, 0))
    assert pool.poll(0.0) == []
    hosts.say(0)
    assert [found.key for found in pool.poll(0.0)] == [(1, 0)]


class Traffic(RuleBasedStateMachine):
    """Groups come, replicas finish answers and say so, polls and aborts happen, all in any order."""

    @initialize(size=st.integers(1, 3))
    def begin(self, size):
        self.hosts = SlowHosts(size)
        self.pool = RolloutPool(self.hosts)
        self.uid, self.wanted, self.got = 0, set(), []

    @rule(sizes=st.lists(st.integers(1, 3), max_size=3))
    def submit(self, sizes):
        groups = []
        for size in sizes:
            groups.append([request(self.uid, number) for number in range(size)])
            self.uid += 1
        self.pool.submit(groups)
        self.wanted |= {one.key for group in groups for one in group}
        for group in groups:
            assert sum(group[0].key in keys for keys in self.hosts.running) == 1
            assert any({one.key for one in group} <= set(keys) for keys in self.hosts.running)

    @precondition(lambda self: any(self.hosts.running))
    @rule(data=st.data())
    def finish(self, data):
        rank, key = data.draw(st.sampled_from([(n, k) for n, keys in enumerate(self.hosts.running) for k in keys]))
        self.hosts.finish(rank, key)

    @precondition(lambda self: any(self.hosts.open))
    @rule(data=st.data())
    def say(self, data):
        self.hosts.say(data.draw(st.sampled_from([n for n, poll in enumerate(self.hosts.open) if poll])))

    @rule()
    def look(self):
        found = [one.key for one in self.pool.poll(0.0)]
        assert set(found) <= self.wanted - set(self.got), "not asked for, or passed on before"
        assert len(found) == len(set(found))
        self.got += found

    @rule()
    def abort(self):
        self.pool.abort()
        self.wanted = set(self.got)

    @invariant()
    def what_is_pending_is_what_was_asked_for_and_not_passed_on(self):
        if hasattr(self, "pool"):
            assert self.pool.pending == len(self.wanted) - len(self.got)

    def teardown(self):
        """Whatever happened: when the replicas finish all, every answer comes, once."""
        if not hasattr(self, "pool"):
            return
        for rank, keys in enumerate(self.hosts.running):
            for key in list(keys):
                self.hosts.finish(rank, key)
        for _ in range(3):
            self.look_again()
        assert sorted(self.got) == sorted(self.wanted)

    def look_again(self):
        self.got += [one.key for one in self.pool.poll(0.0)]
        for rank, poll in enumerate(self.hosts.open):
            if poll:
                self.hosts.say(rank)


Traffic.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_no_answer_is_lost_or_doubled_over_any_interleaving = Traffic.TestCase
