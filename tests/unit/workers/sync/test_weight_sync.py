"""Tests of the order of calls in a weight sync, and of the cleanup after a failed sync.

The fake processes run every call before the call returns.
"""

import contextlib

import pytest

from rltrain.base.errors import ClusterLost, RLTrainError, SyncError, SyncStopped, WorkerError, described
from workers.cluster.processes import Pending, Role
from workers.sync import weight_sync
from workers.sync.buckets import Bucket, Piece, Place
from workers.sync.receiver import Receiver
from workers.sync.sender import Offer


class Engine:
    """A fake engine that records its calls, and raises an error in the call named `fail`."""

    def __init__(self, log, fail=""):
        self.log, self.fail = log, fail

    def start_load(self):
        self._do("start")

    def load_bucket(self, bucket):
        self._do(f"load {bucket.version}")

    def finish_load(self, version):
        self._do(f"finish {version}")

    def _do(self, what):
        self.log.append(what)
        if what == self.fail:
            raise SyncError(f"cannot {what}")


class Process:
    """A fake process that runs each call immediately, by calling its own method of the same name."""

    concurrent, how_lost, later, gpu_id = True, "", None, None

    def start(self, role, method, *args):
        return Pending(self, getattr(self, method)(*args))

    def share(self, value):
        return value


class Rank(Process):
    """A fake training rank. Only the first rank records its calls, and raises `error` in the call named `fail`."""

    def __init__(self, number, log, buckets, where, fail, error):
        self.number, self.log, self.buckets, self.where, self.fail, self.error = (
            number,
            log,
            buckets,
            where,
            fail,
            error,
        )

    def start_export(self, path, version, check):
        return Offer([True] * self.buckets, self.where, bool(path), self.gpu_id)

    def export(self, number, path, *loaded):
        if self.number == 0:
            self.log.append(f"write {number} to {'file' if path else 'calls'} after {len(loaded)}")
        if self.fail == f"write {number}":
            raise self.error("a worker process died")
        pieces = [Piece("w", 4 * self.number, 4)]
        return Bucket(number, "float32", [Place("w", (2,), 0, 8)], {}, pieces, path=path, data=None)

    def serve_store(self):
        return "10.0.0.1", 29500

    def send_all(self, plan, member):
        self.log.append(f"send as {member} of {plan.size}")
        return self.later

    def end_export(self):
        if self.number == 0:
            self.log.append("end")


def ranks(log, buckets=3, wheres=("here", "here"), fail="", error=WorkerError):
    """Return one fake training rank for each host in `wheres`."""
    return [Role(Rank(n, log, buckets, where, fail, error), "actor") for n, where in enumerate(wheres)]


class Replica(Process):
    """A fake rollout worker that consists of a real receiver and a fake engine."""

    def __init__(self, engine, where):
        self.engine, self.where, self.receiver = engine, where, Receiver()

    def start_load(self, sync, version):
        assert self.receiver.start(self.engine, sync, version)
        return self.where

    def load_bucket(self, sync, before, *parts):
        assert before is None
        self.receiver.bucket(self.engine, sync, parts)

    def gpu(self):
        return self.gpu_id

    def receive_all(self, sync, plan, place):
        self.joined = plan, place
        return self.later

    def finish_load(self, sync, before):
        self.receiver.finish(self.engine, sync)

    def give_up_load(self, sync, reason):
        self.receiver.give_up(sync, reason)


class Replicas:
    """Fake rollout workers and their receivers."""

    def __init__(self, engines, wheres=None):
        self.roles = [
            Role(Replica(engine, where), "rollout")
            for engine, where in zip(engines, wheres or ["here"] * len(engines), strict=True)
        ]
        self.receivers = [role.process.receiver for role in self.roles]


async def test_a_bucket_is_written_when_all_engines_have_loaded_the_one_whose_room_it_takes(monkeypatch):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])
    log: list[str] = []
    await weight_sync.sync(ranks(log), Replicas([Engine(log), Engine(log)]).roles, 7, check=True)
    assert log == [
        "start", "start", "write 0 to file after 0", "load 0", "load 0", "write 1 to file after 0", "load 1", "load 1",
        "write 2 to file after 2", "load 2", "load 2", "finish 7", "finish 7", "end",
    ]  # fmt: skip


async def test_a_rank_without_rows_in_a_bucket_is_not_called_and_sends_no_part(monkeypatch):
    parts: list[int] = []
    monkeypatch.setattr("workers.sync.receiver.join", lambda given: parts.append(len(given)) or given[0])
    log: list[str] = []
    both = ranks(log)
    monkeypatch.setattr(both[0].process, "start_export", lambda *_: Offer([True, False, True], "here", True))
    monkeypatch.setattr(both[1].process, "start_export", lambda *_: Offer([False, True, True], "here", True))
    await weight_sync.sync(both, Replicas([Engine(log)]).roles, 7, check=True)
    assert [line for line in log if line.startswith("write")] == [
        "write 0 to file after 0", "write 2 to file after 1",
    ]  # fmt: skip
    assert parts == [1, 1, 2]


@pytest.mark.parametrize(
    ("actors", "engines", "kind"),
    [
        (("here", "here"), ["here"], "file"), (("here", "there"), ["here"], "group"),
        (("here", "here"), ["there"], "group"), ((None, "here"), ["here"], "group"), ((None, None), [None], "group"),
    ],
)  # fmt: skip
async def test_auto_takes_the_file_on_one_host_and_the_process_group_on_several(monkeypatch, actors, engines, kind):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])
    log: list[str] = []
    await weight_sync.sync(ranks(log, buckets=1, wheres=actors), Replicas([Engine(log)], engines).roles, 7, check=True)
    assert ("write 0 to file after 0" in log) == (kind == "file")
    assert (any(line.startswith("send") for line in log)) == (kind == "group")


async def test_the_object_store_is_used_on_one_host_if_it_is_set(monkeypatch):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])
    log: list[str] = []
    engines = Replicas([Engine(log)]).roles
    await weight_sync.sync(ranks(log, buckets=1), engines, 7, check=True, transport="object_store")
    assert "write 0 to calls after 0" in log


async def test_shared_memory_that_is_set_is_refused_on_several_hosts():
    log: list[str] = []
    replicas = Replicas([Engine(log)], ["there"])
    with pytest.raises(
        SyncError, match=r"shared_memory needs all ranks and engines on one host.*weight_transport=auto"
    ):
        await weight_sync.sync(ranks(log), replicas.roles, 7, check=True, transport="shared_memory")
    assert not replicas.receivers[0].whole


def with_gpus(senders, replicas, rank_gpus, engine_gpus):
    """Give each fake rank and each fake rollout worker a GPU."""
    for role, gpu in zip(senders, rank_gpus, strict=True):
        role.process.gpu_id = gpu
    for role, gpu in zip(replicas.roles, engine_gpus, strict=True):
        role.process.gpu_id = gpu


async def test_with_device_handles_each_engine_gets_the_weights_from_the_rank_on_its_gpu():
    log: list[str] = []
    senders, replicas = ranks(log, wheres=("a", "a", "b")), Replicas([Engine(log) for _ in range(3)], ["b", "a", "a"])
    with_gpus(senders, replicas, ["g0", "g1", "g0"], ["g0", "g1", "g0"])
    await weight_sync.sync(senders, replicas.roles, 7, check=True, transport="device_handles")
    plans = [role.process.joined for role in replicas.roles]
    assert [place for _, place in plans] == [0, 1, 2]
    plan = plans[0][0]
    assert (plan.transport, plan.partners, plan.writers(0)) == ("device_handles", (2, 1, 0), [0, 1, 2])
    assert [plan.targets(rank) for rank in range(3)] == [[5], [4], [3]]
    assert [plan.sources(0, place) for place in range(3)] == [[2], [1], [0]]


@pytest.mark.parametrize("places", [["there", "here"], [None, None]])
async def test_device_handles_need_a_rank_on_the_gpu_or_host_of_each_engine(places):
    log: list[str] = []
    senders = ranks(log, wheres=("here", places[1]))
    with pytest.raises(SyncError, match="needs a training rank on the GPU of each engine"):
        await weight_sync.sync(senders, Replicas([Engine(log)], places[:1]).roles, 7, check=True,
                               transport="device_handles")  # fmt: skip


@pytest.mark.parametrize(
    ("rank_gpus", "engine_gpus", "works"),
    [(["a", "b"], ["c"], True), (["a", "b"], ["a"], False), (["a", None], ["c"], False)],
)
async def test_nccl_needs_a_separate_gpu_for_each_process(rank_gpus, engine_gpus, works):
    log: list[str] = []
    senders, replicas = ranks(log), Replicas([Engine(log)])
    with_gpus(senders, replicas, rank_gpus, engine_gpus)
    refused = pytest.raises(SyncError, match="nccl needs a separate GPU for each")
    with contextlib.nullcontext() if works else refused:
        await weight_sync.sync(senders, replicas.roles, 7, check=True, transport="nccl")
        assert replicas.roles[0].process.joined[0].transport == "nccl"


async def test_the_engines_of_a_host_follow_one_another_and_each_process_is_called_once(monkeypatch):
    log: list[str] = []
    replicas = Replicas([Engine(log) for _ in range(5)], ["b", "a", "b", "c", "a"])
    senders = ranks(log, buckets=40, wheres=("a", "b", "b"))
    monkeypatch.setattr(senders[1].process, "start_export", lambda *_: Offer([False] * 40, "b"))
    await weight_sync.sync(senders, replicas.roles, 7, check=True)
    plans = [role.process.joined for role in replicas.roles]
    assert [place for _, place in plans] == [2, 0, 3, 4, 1]
    plan = plans[0][0]
    assert (plan.ranks, plan.engines, plan.buckets, plan.writers(39)) == (2, 5, 40, [0, 1])
    assert [line for line in log if line.startswith("send")] == ["send as 0 of 7", "send as 1 of 7"]
    assert log.count("finish 7") == 5


@pytest.mark.parametrize("first", ["rank", "engine"])
async def test_a_failure_of_one_process_is_named_even_if_another_process_notices_it_first(monkeypatch, first):
    given_up = []

    async def results(calls, **_):
        for error in (call.outcome for call in calls if isinstance(call.outcome, Exception)):
            raise error
        return [call.outcome for call in calls]

    monkeypatch.setattr(weight_sync, "give_up", lambda *args: given_up.append(args))
    monkeypatch.setattr(weight_sync, "results", results)
    log: list[str] = []
    senders, replicas = ranks(log, wheres=("a", "b")), Replicas([Engine(log), Engine(log)], ["a", "b"])
    stopped, failed = SyncStopped("another process closed its connection"), WorkerError("rank 1 failed: a bug")
    errors = {"rank": (failed, stopped), "engine": (stopped, failed)}[first]
    senders[1].process.later, replicas.roles[0].process.later = errors
    with pytest.raises(SyncError, match="weight sync 7 failed: rank 1 failed: a bug"):
        await weight_sync.sync(senders, replicas.roles, 7, check=True)
    assert [reason for _, reason in given_up] == [described({"rank": failed, "engine": stopped}[first])]
    assert not replicas.receivers[1].whole


@pytest.mark.parametrize("fail", ["start", "load 1", "finish 7"])
async def test_an_engine_whose_sync_failed_generates_nothing_until_one_succeeds(monkeypatch, fail):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])
    log: list[str] = []
    good, bad = Engine(log), Engine(log, fail)
    replicas = Replicas([good, bad])
    with pytest.raises(SyncError, match=f"cannot {fail}"):
        await weight_sync.sync(ranks(log), replicas.roles, 7, check=True)
    assert log[-1] == "end"
    assert not replicas.receivers[1].whole
    with pytest.raises(SyncError, match=rf"weight sync 7 failed \(SyncError: cannot {fail}\)"):
        replicas.receivers[1].require()
    bad.fail = ""
    await weight_sync.sync(ranks(log), replicas.roles, 8, check=True)
    assert [receiver.whole for receiver in replicas.receivers] == [True, True]


async def test_the_death_of_a_rank_in_the_middle_is_a_sync_error_and_stops_all_engines(monkeypatch):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])
    log: list[str] = []
    replicas = Replicas([Engine(log), Engine(log)])
    with pytest.raises(SyncError, match="weight sync 7 failed: a worker process died"):
        await weight_sync.sync(ranks(log, fail="write 1"), replicas.roles, 7, check=True)
    assert [receiver.whole for receiver in replicas.receivers] == [False, False]
    with pytest.raises(RLTrainError, match="has weights of two versions"):
        replicas.receivers[0].require()


async def test_the_death_of_a_daemon_of_ray_stays_what_it_is(monkeypatch):
    """A Ray daemon's death must not become a SyncError, after which a new sync would start with dying processes."""
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])
    log: list[str] = []
    with pytest.raises(ClusterLost):
        await weight_sync.sync(
            ranks(log, fail="write 1", error=ClusterLost), Replicas([Engine(log)]).roles, 7, check=True
        )


def test_a_bucket_of_a_sync_that_was_given_up_is_not_loaded(monkeypatch):
    monkeypatch.setattr("workers.sync.receiver.join", lambda parts: parts[0])
    log: list[str] = []
    receiver, engine = Receiver(), Engine(log)
    receiver.start(engine, "old", 1)
    receiver.give_up("old", "the actor died")
    with pytest.raises(SyncError, match="the actor died"):
        receiver.bucket(engine, "old", ())
    receiver.start(engine, "new", 2)
    with pytest.raises(SyncError, match="is receiving another sync"):
        receiver.bucket(engine, "old", ())
    receiver.finish(engine, "new")
    assert receiver.whole
    assert log == ["start", "start", "finish 2"]
