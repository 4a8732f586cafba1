"""Tests of rollout pools in which a replica dies.

The fake processes die, start and become ready at points that the tests choose.
"""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import SyncError, WorkerError, WorkerLost
from tests.fake_replicas import (
    LOST_RANKS,
    RANKS,
    answers_of,
    fail_syncs,
    give_weights,
    keys_of,
    of_worker,
    pool_of,
    request,
    settled,
)
from workers.cluster.progress import Process
from workers.rollout import pool as pool_module
from workers.rollout.pool import REPLACEMENTS
from workers.rollout.replica import ReplicaState


@pytest.fixture
def made(monkeypatch, tasks):
    return lambda size: pool_of(size, monkeypatch, tasks)


async def test_a_dead_replica_is_replaced_only_when_ray_knows_which_nodes_have_ended(monkeypatch, tasks):
    noticed = asyncio.Event()
    pool, replicas = await pool_of(2, monkeypatch, tasks, settled_nodes=noticed.wait)
    started = replicas.started
    replicas.processes[0].die()
    await settled()
    assert (replicas.started, replicas.states) == (started, [ReplicaState.DEAD, ReplicaState.SERVING])
    pool.submit([[request(1)]])
    assert await keys_of(pool) == []
    replicas.processes[1].answer((1, 0))
    assert await keys_of(pool) == [(1, 0)]  # the other replica serves meanwhile
    noticed.set()
    await settled()
    assert (replicas.started, replicas.states[0]) == (started + 1, ReplicaState.STARTING)


async def test_a_replica_that_dies_is_replaced_and_works_again_with_the_weights_of_now_only(made, monkeypatch):
    pool, replicas = await made(2)
    pool.submit([[request(0), request(0, 1)], [request(1)]])
    assert await keys_of(pool) == []
    await pool.load(RANKS, 1, check=True)
    replicas.processes[0].die()
    assert await keys_of(pool) == []
    assert replicas.states == [ReplicaState.STARTING, ReplicaState.SERVING]
    assert (pool.take_lost(), pool.take_lost()) == ({0}, set())
    pool.submit([[request(0), request(0, 1)]])  # the requests of the lost group are sent to the other replica
    assert replicas.processes[1].keys == [(1, 0), (0, 0), (0, 1)]
    weights = asyncio.Event()

    async def slow_sync(*arguments, **options):
        await weights.wait()
        await give_weights(*arguments, **options)

    monkeypatch.setattr(pool_module, "sync", slow_sync)
    replicas.processes[0].built.give()
    await settled()
    assert replicas.states[0] is ReplicaState.WAITING
    pool.submit([[request(2)]])
    assert replicas.processes[0].keys == []
    weights.set()
    await settled()
    pool.submit([[request(3)]])
    assert (replicas.processes[0].keys, replicas.processes[0].version) == ([(3, 0)], 1)


async def test_with_no_replica_left_work_waits_for_the_next_one(made):
    pool, replicas = await made(1)
    replicas.processes[0].die()
    await settled()
    pool.submit([[request(0)]])
    assert pool.pending == 1
    assert await keys_of(pool) == []
    await pool.hold_weights()
    replicas.processes[0].built.give()
    await settled()
    assert (replicas.states, replicas.processes[0].keys) == ([ReplicaState.WAITING], [])
    await pool.load(RANKS, 1, check=True)
    assert (replicas.processes[0].keys, pool.pending) == ([(0, 0)], 1)


async def test_work_that_waited_for_a_replica_goes_to_the_one_that_gets_the_last_weights_again(made):
    pool, replicas = await made(1)
    replicas.processes[0].die()
    await settled()
    pool.submit([[request(0)]])
    replicas.processes[0].built.give()
    await settled()
    assert (replicas.processes[0].keys, pool.pending) == ([(0, 0)], 1)


async def test_while_the_actors_weights_change_no_replacement_gets_any(made):
    pool, replicas = await made(2)
    replicas.processes[0].die()
    await settled()
    await pool.hold_weights()
    replicas.processes[0].built.give()
    await settled()
    assert (replicas.states, replicas.versions) == ([ReplicaState.WAITING, ReplicaState.SERVING], [None, 0])
    await pool.load(RANKS, 1, check=True)
    assert (replicas.states, replicas.versions) == ([ReplicaState.SERVING, ReplicaState.SERVING], [1, 1])


async def test_a_death_in_a_sync_leaves_the_others_with_the_weights(made):
    pool, replicas = await made(3)
    replicas.processes[1].alive = False  # the pool notices the death only during the sync
    await settled()
    assert replicas.states == [ReplicaState.SERVING] * 3
    await pool.load(RANKS, 1, check=True)
    await settled()
    assert replicas.versions == [1, None, 1]
    assert replicas.states == [ReplicaState.SERVING, ReplicaState.STARTING, ReplicaState.SERVING]


@pytest.mark.parametrize("ready", [False, True])
async def test_a_replica_that_is_replaced_while_a_sync_waits_for_the_actor_has_no_weights_yet(made, monkeypatch, ready):
    pool, replicas = await made(2)

    async def sync(*arguments, **options):
        await give_weights(*arguments, **options)
        replicas.processes[0].die()
        await settled()
        if ready:
            replicas.processes[0].built.give()
        await settled()

    monkeypatch.setattr(pool_module, "sync", sync)
    await pool.load(RANKS, 1, check=True)
    assert replicas.states == [ReplicaState.WAITING if ready else ReplicaState.STARTING, ReplicaState.SERVING]
    pool.submit([[request(0)], [request(1)]])
    assert replicas.processes[1].keys == [(0, 0), (1, 0)]
    monkeypatch.setattr(pool_module, "sync", give_weights)
    if not ready:
        replicas.processes[0].built.give()
    await settled()
    assert (replicas.versions[0], replicas.states[0]) == (1, ReplicaState.SERVING)


async def test_a_training_rank_that_dies_in_a_sync_is_no_replicas_death(made, monkeypatch, tasks):
    pool, replicas = await made(2)
    fail_syncs(monkeypatch, WorkerLost("training rank 0 is gone"))
    replicas.processes[0].alive = False
    with pytest.raises(WorkerLost, match="training rank 0"):
        await pool.load(LOST_RANKS, 1, check=True)
    await settled()
    tasks.check()
    assert (replicas.started, replicas.states) == (2, [ReplicaState.WAITING] * 2)


async def test_a_training_rank_that_dies_while_it_serves_a_replacement_leaves_it_to_the_next_load(
    made, monkeypatch, tasks
):
    pool, replicas = await made(2)
    await pool.load(LOST_RANKS, 1, check=True)
    fail_syncs(monkeypatch, WorkerLost("training rank 0 is gone"))
    replicas.processes[0].die()
    await settled()
    replicas.processes[0].built.give()
    await settled()
    tasks.check()
    assert replicas.states == [ReplicaState.WAITING, ReplicaState.SERVING]
    monkeypatch.setattr(pool_module, "sync", give_weights)
    await settled()
    assert replicas.versions == [None, 1]
    await pool.load(RANKS, 2, check=True)
    assert (replicas.started, replicas.versions) == (3, [2, 2])


async def test_a_sync_that_fails_though_all_are_alive_is_raised(made, monkeypatch):
    pool, _ = await made(2)
    fail_syncs(monkeypatch, SyncError("weights differ"))
    with pytest.raises(SyncError, match="weights differ"):
        await pool.load(RANKS, 1, check=True)


async def test_deaths_without_an_answer_in_between_are_bounded_and_an_answer_begins_anew(made, tasks):
    pool, replicas = await made(1)
    for _ in range(2):
        for _ in range(REPLACEMENTS):
            replicas.processes[0].die()
            await settled()
        replicas.processes[0].built.give()
        await settled()
        pool.submit([[request(0)]])
        await settled()
        replicas.processes[0].answer((0, 0))
        assert await keys_of(pool) == [(0, 0)]
    for _ in range(REPLACEMENTS):
        replicas.processes[0].die()
        await settled()
    tasks.check()
    replicas.processes[0].die()
    with pytest.raises(
        WorkerError,
        match=r"replica 0 .* is gone; 4 replicas have died since the last answer, and the limit is 3",
    ):
        await tasks.until(pool.poll())


async def test_an_engine_that_is_not_ready_in_time_counts_as_dead(made, tasks, caplog):
    _, replicas = await made(1)
    limits, start = [-1.0, float("inf")], replicas.all[0]._start

    def start_with_next_limit():
        replicas.all[0].start_timeout_s = limits.pop(0)
        return start()

    replicas.all[0]._start = start_with_next_limit
    replicas.processes[0].identity = Process(7, 0, "node", "machine", 0, 0)
    replicas.processes[0].die()
    await settled()
    tasks.check()
    assert [record.getMessage() for record in caplog.records] == [
        "rollout replica 0 (pid 7 on machine) is gone: another process replaces it",
        "rollout replica 0 was not ready within placement.start_timeout_s=-1 s: are enough resources free?: "
        "another process replaces it",
    ]
    assert (replicas.started, replicas.states) == (3, [ReplicaState.STARTING])


async def test_an_engine_that_cannot_be_built_counts_as_dead_once_the_run_has_started(made, tasks):
    _, replicas = await made(1)
    replicas.processes[0].die()
    await settled()
    replicas.processes[0].built.fail(of_worker(WorkerError("no room")))
    await settled()
    tasks.check()
    assert (replicas.started, replicas.states) == (3, [ReplicaState.STARTING])


async def test_without_a_way_to_replace_it_a_death_ends_the_run(made, tasks):
    pool, replicas = await made(1)
    pool.replaces = False
    replicas.processes[0].die()
    with pytest.raises(WorkerError, match=r"rollout replica 0 \(starting\) is gone"):
        await tasks.until(pool.poll())


async def test_after_an_abort_nothing_of_before_is_returned_though_it_is_asked_for_again(made):
    pool, replicas = await made(1)
    pool.submit([[request(0)]])
    await settled()
    replicas.processes[0].answer((0, 0))  # when the abort starts, the pool has not yet received this answer
    await pool.abort()
    pool.submit([[request(0)]])
    assert await keys_of(pool) == []
    replicas.processes[0].answer((0, 0))
    assert await keys_of(pool) == [(0, 0)]


class Deaths(RuleBasedStateMachine):
    """State machine in which prompt groups, answers, deaths of replicas, restarts and weights come in any order."""

    @initialize(size=st.integers(1, 3))
    def begin(self, size):
        self.loop, self.patch = asyncio.new_event_loop(), pytest.MonkeyPatch()
        self.uid, self.version, self.missing, self.got = 0, 0, {}, []
        self.run(self.make(size))

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    async def make(self, size):
        self.tasks = BackgroundTasks()
        self.pool, self.replicas = await pool_of(size, self.patch, self.tasks)

    def process(self, data):
        return self.replicas.processes[data.draw(st.integers(0, len(self.replicas.all) - 1))]

    @rule(size=st.integers(1, 3))
    def submit(self, size):
        group = [request(self.uid, number) for number in range(size)]
        self.missing[self.uid] = {one.key for one in group}
        self.uid += 1
        self.pool.submit([group])

    @rule(data=st.data(), noticed=st.booleans())
    def die(self, data, noticed):
        process, dead = self.process(data), sum(not one.alive for one in self.replicas.processes)
        if not process.alive or self.pool._deaths + dead >= REPLACEMENTS * len(self.replicas.all):
            return  # the pool would raise an error after one more death
        if noticed:
            process.die()
        elif process.version is not None:
            process.alive = False  # the process stays dead until the pool notices the death

    @rule()
    def deaths_are_noticed(self):
        for process in list(self.replicas.processes):
            if not process.alive and not process.how_lost:
                process.die()

    @rule(data=st.data())
    def ready(self, data):
        process = self.process(data)
        if process.alive and process.built.open:
            process.built.give()

    @rule(data=st.data())
    def answer(self, data):
        able = [(process, key) for process in self.replicas.processes if self.asked(process) for key in process.keys]
        if able:
            process, key = able[data.draw(st.integers(0, len(able) - 1))]
            process.answer(key)

    @staticmethod
    def asked(process):
        return process.alive and process.open is not None and process.open.open

    @rule()
    def others_have_turns(self):
        self.run(settled())

    @rule()
    def look(self):
        for one in self.run(answers_of(self.pool)):
            self.missing[one.key[0]].remove(one.key)  # `remove` fails if an answer arrives twice
            self.got.append(one)
            assert one.versions[0] <= self.version
        for uid in self.pool.take_lost():
            if self.missing[uid]:
                self.pool.submit([[request(*key) for key in sorted(self.missing[uid])]])
        self.tasks.check()

    @rule()
    def hold_weights(self):
        self.run(self.pool.hold_weights())

    @rule()
    def load(self):
        self.version += 1
        self.run(self.pool.load(RANKS, self.version, check=True))
        for process, state in zip(self.replicas.processes, self.replicas.states, strict=True):
            assert state is not ReplicaState.SERVING or process.version == self.version or process.how_lost

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def nothing_is_forgotten(self):
        assert self.pool.pending >= (1 if any(self.missing.values()) else 0)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.deaths_are_noticed()
        self.load()
        for _ in range(200):
            for process in list(self.replicas.processes):
                if process.alive and process.built.open:
                    process.built.give()
                elif self.asked(process):
                    process.answer(*process.keys[:1])
            self.look()
            if not any(self.missing.values()):
                break
        self.run(self.tasks.cancel())
        self.loop.close()
        self.patch.undo()
        assert not any(self.missing.values())


Deaths.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_every_answer_comes_exactly_once_whoever_dies = Deaths.TestCase
