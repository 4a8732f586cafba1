"""Tests of pools of several rollout replicas, some of which are so slow that polls wait long for answers."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rltrain.base.background_tasks import BackgroundTasks, cancelled
from rltrain.base.errors import WorkerError
from tests.fake_replicas import RANKS, Reply, keys_of, of_worker, pool_of, request, settled
from workers.cluster.processes import LocalProcess, Role
from workers.rollout import pool as pool_module
from workers.rollout.messages import Completion
from workers.rollout.pool import RolloutPool
from workers.rollout.replica import LOCAL_POLL_S, LONG_POLL_S, Building, Replica


@pytest.fixture
def made(monkeypatch, tasks):
    return lambda size: pool_of(size, monkeypatch, tasks)


async def test_a_slow_replica_holds_no_other_up_and_is_asked_once(made):
    pool, replicas = await made(2)
    slow, quick = replicas.processes
    pool.submit([[request(0)], [request(1)], [request(2)]])
    assert replicas.keys == [[(0, 0), (2, 0)], [(1, 0)]]
    assert await keys_of(pool) == []
    asked = slow.open
    quick.answer((1, 0))
    assert await keys_of(pool) == [(1, 0)]
    for _ in range(3):
        assert await keys_of(pool) == []
    assert (slow.open, slow.open.open) == (asked, True)
    assert not quick.open.open  # a replica without requests is not polled
    assert (slow.patience, quick.patience) == ([LONG_POLL_S], [LONG_POLL_S])
    slow.answer((0, 0), (2, 0))
    assert await keys_of(pool) == [(0, 0), (2, 0)]
    assert (pool.pending, slow.open.open, quick.open.open) == (0, False, False)


async def test_submissions_are_not_waited_for_and_one_that_failed_ends_the_run(made, tasks):
    pool, replicas = await made(2)
    arrival, submit = Reply(), replicas.processes[0].take_submit
    replicas.processes[0].take_submit = lambda requests: submit(requests) and arrival
    pool.submit([[request(0)]])
    assert replicas.keys == [[(0, 0)], []]  # a replica without requests gets no call
    assert await keys_of(pool) == []
    assert arrival.open
    tasks.check()
    arrival.fail(of_worker(WorkerError("the engine broke")))
    with pytest.raises(WorkerError, match="the engine broke"):
        await tasks.until(pool.poll())


async def test_a_replica_that_said_nothing_is_asked_again(made):
    pool, replicas = await made(1)
    pool.submit([[request(0)]])
    for times in (1, 2, 3):
        assert await keys_of(pool) == []
        assert len(replicas.processes[0].patience) == times
        replicas.processes[0].say()
    assert await keys_of(pool) == []
    assert pool.pending == 1


class LocalEngine:
    """A fake engine in the driver's process, which returns an answer only at the third poll."""

    def __init__(self):
        self.patience, self.key = [], None

    def call(self, role, method, *arguments):
        return getattr(self, method)(*arguments)

    def submit(self, requests):
        self.key = requests[0].key

    def poll(self, patience_s):
        self.patience.append(patience_s)
        return [Completion(self.key, [2], [-1.0], "stop", [0])] if len(self.patience) == 3 else []


async def test_a_replica_in_this_very_process_is_asked_for_moments_between_which_others_have_their_turns(
    monkeypatch, tasks
):
    async def sync(*_, **__):
        pass

    monkeypatch.setattr(pool_module, "sync", sync)
    engine = LocalEngine()
    pool = RolloutPool([Replica(0, lambda: Building(Role(LocalProcess(engine), "rollout")))], tasks)
    await pool.start()
    await pool.load(RANKS, 0, check=True)
    pool.submit([[request(0)]])
    turns = []

    async def other():
        while True:
            turns.append(len(engine.patience))
            await asyncio.sleep(0)

    tasks.start(other(), "another task")
    assert [one.key for one in await pool.poll()] == [(0, 0)]
    assert engine.patience == [LOCAL_POLL_S] * 3
    assert {1, 2} <= set(turns)


async def test_a_wait_for_answers_that_is_broken_off_loses_none_and_holds_none_up(made):
    pool, replicas = await made(1)
    pool.submit([[request(0)]])
    first, second = asyncio.ensure_future(pool.poll()), asyncio.ensure_future(pool.poll())
    await settled()
    await cancelled(first)
    replicas.processes[0].answer((0, 0))
    assert [found.key for found in await second] == [(0, 0)]
    assert await keys_of(pool) == []


async def test_an_answer_to_what_was_aborted_is_not_passed_on(made):
    pool, replicas = await made(1)
    pool.submit([[request(0), request(0, 1)]])
    await settled()
    replicas.processes[0].answer((0, 0))  # when the abort starts, the pool has not yet received this answer
    await pool.abort()
    assert (pool.pending, await keys_of(pool)) == (0, [])
    pool.submit([[request(1)]])
    replicas.processes[0].finish((1, 0))
    assert await keys_of(pool) == []
    replicas.processes[0].say()
    assert await keys_of(pool) == [(1, 0)]


async def test_what_comes_while_an_abort_waits_for_slow_replicas_is_not_passed_on_either(made):
    pool, replicas = await made(3)
    first, second, third = replicas.processes
    pool.submit([[request(0)], [request(1)], [request(2)]])
    receiving = asyncio.ensure_future(pool.poll())
    await settled()
    replicas.told.clear()
    slow = Reply()
    first.take_abort = second.take_abort = lambda: slow
    aborting = asyncio.ensure_future(pool.abort())
    await settled()
    assert replicas.told == [(number, "abort") for number in range(3)]  # all replicas abort at the same time
    second.answer((1, 0))
    third.die()
    await settled()
    assert not aborting.done()
    slow.give()
    first.say()
    await aborting
    await settled()
    assert (receiving.done(), pool.pending, pool.take_lost()) == (False, 0, set())
    await cancelled(receiving)


async def test_an_abort_ends_when_no_poll_of_before_is_open_that_could_take_answers_of_after(made):
    pool, replicas = await made(1)
    pool.submit([[request(0)]])
    await settled()
    replicas.processes[0].take_abort = lambda: Reply.of(None)
    aborting = asyncio.ensure_future(pool.abort())
    await settled()
    assert not aborting.done()
    replicas.processes[0].keys = []
    replicas.processes[0].say()
    await aborting
    pool.submit([[request(0)]])
    await settled()
    replicas.processes[0].answer((0, 0))
    assert await keys_of(pool) == [(0, 0)]


class Traffic(RuleBasedStateMachine):
    """State machine in which new prompt groups, answers, polls and aborts come in any order."""

    @initialize(size=st.integers(1, 3))
    def begin(self, size):
        self.loop, self.patch = asyncio.new_event_loop(), pytest.MonkeyPatch()
        self.uid, self.wanted, self.got = 0, set(), []
        self.run(self.make(size))

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    async def make(self, size):
        self.tasks = BackgroundTasks()
        self.pool, replicas = await pool_of(size, self.patch, self.tasks)
        self.processes = replicas.processes

    @rule(sizes=st.lists(st.integers(1, 3), max_size=3))
    def submit(self, sizes):
        groups = []
        for size in sizes:
            groups.append([request(self.uid, number) for number in range(size)])
            self.uid += 1
        self.pool.submit(groups)
        self.wanted |= {one.key for group in groups for one in group}
        for group in groups:
            assert sum(group[0].key in process.keys for process in self.processes) == 1
            assert any({one.key for one in group} <= set(process.keys) for process in self.processes)

    @precondition(lambda self: any(process.keys for process in self.processes))
    @rule(data=st.data())
    def finish(self, data):
        running = [(process, key) for process in self.processes for key in process.keys]
        process, key = running[data.draw(st.integers(0, len(running) - 1))]
        process.finish(key)

    def asked(self):
        return [process for process in self.processes if process.open is not None and process.open.open]

    @precondition(lambda self: self.asked())
    @rule(data=st.data())
    def say(self, data):
        asked = self.asked()
        asked[data.draw(st.integers(0, len(asked) - 1))].say()

    @rule()
    def others_have_turns(self):
        self.run(settled())

    @rule()
    def look(self):
        found = self.run(keys_of(self.pool))
        assert set(found) <= self.wanted - set(self.got), "an answer was not requested, or arrived twice"
        assert len(found) == len(set(found))
        self.got += found

    @rule()
    def abort(self):
        self.run(self.pool.abort())
        self.wanted = set(self.got)

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def what_is_pending_is_what_was_asked_for_and_not_passed_on(self):
        assert self.pool.pending == len(self.wanted) - len(self.got)

    def teardown(self):
        """Let the replicas finish all requests, and check that every answer has arrived exactly once."""
        if not hasattr(self, "pool"):
            return
        for process in self.processes:
            process.finish(*process.keys)
        for _ in range(3):
            self.got += self.run(keys_of(self.pool))
            for process in self.asked():
                process.say()
        self.tasks.check()
        self.run(self.tasks.cancel())
        self.loop.close()
        self.patch.undo()
        assert sorted(self.got) == sorted(self.wanted)


Traffic.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_no_answer_is_lost_or_doubled_over_any_interleaving = Traffic.TestCase
