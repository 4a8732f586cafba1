"""Replicas of an engine whose processes die, start and are ready when told to, and a pool over them."""

from types import SimpleNamespace

from rltrain.base.errors import SyncError, WorkerLost
from workers.cluster.host_groups import Hosts
from workers.rollout import pool as pool_module
from workers.rollout.messages import Completion, Request
from workers.rollout.pool import RolloutPool

ACTOR = SimpleNamespace(hosts=SimpleNamespace(dead=dict))


def request(uid: int, number: int = 0) -> Request:
    return Request((uid, number), [1], 1.0, 4, 0)


class Call:
    """A call to one process: without an end until it is answered, and an error from its process's death on."""

    def __init__(self, process, value=None, *, done=True):
        self.process, self.value, self.done, self.error = process, value, done, None


class Replica:
    """One process of an engine."""

    def __init__(self, *, ready):
        self.alive, self.version, self.keys, self.asleep = True, None, [], False
        self.build, self.poll = Call(self, done=ready), None


class Replicas(Hosts):
    """Replicas in this process."""

    def __init__(self, size):
        self.size, self.concurrent, self.meanwhile = size, True, None
        self.replicas = [Replica(ready=True) for _ in range(size)]
        self.reported: dict[int, str] = {}
        self.told: list[tuple[int, str]] = []

    def start(self, role, method, arguments, *, ranks=None):
        ranks = range(self.size) if ranks is None else ranks
        self.told += [(rank, method) for rank in ranks]
        return [getattr(self, method)(self.replicas[rank], *own) for rank, own in zip(ranks, arguments, strict=True)]

    def submit(self, replica, requests):
        if replica.alive:
            assert replica.version is not None, "work before weights"
            replica.keys += [one.key for one in requests]
        return Call(replica)

    def poll(self, replica, patience_s):
        replica.poll = Call(replica, [], done=False)
        return replica.poll

    def abort(self, replica):
        replica.keys = []
        if replica.poll:
            replica.poll.done = True
        return Call(replica)

    def sleep(self, replica):
        replica.asleep = replica.alive
        return Call(replica, replica.alive)

    def say(self, rank, key):
        """A replica answers this, in the poll that is open."""
        replica = self.replicas[rank]
        replica.keys.remove(key)
        replica.poll.value = [Completion(key, [rank], [-1.0], "stop", [replica.version])]
        replica.poll.done = True

    def fail_poll(self, rank):
        self.replicas[rank].poll.done, self.replicas[rank].poll.error = True, SyncError("weights of two versions")

    def first(self, pending, timeout_s):
        return [number for number, call in enumerate(pending) if call.done or not call.process.alive]

    def wait(self, pending, **_):
        for call in pending:
            if not call.process.alive:
                raise WorkerLost("a process died")
            assert call.done, "waits for what does not come"
            if call.error:
                raise call.error
        return [call.value for call in pending]

    def dead(self, busy=()):
        self.busy = list(busy)
        return {n: "is gone" for n, replica in enumerate(self.replicas) if not replica.alive}

    def replace(self, rank):
        self.replicas[rank].alive = False
        self.replicas[rank] = Replica(ready=False)
        return self.replicas[rank].build


def fail_syncs(monkeypatch, error):
    """From now on every sync raises this."""

    def sync(*_, **__):
        raise error

    monkeypatch.setattr(pool_module, "sync", sync)


def pool_of(size, monkeypatch, *, busy=False):
    """A pool whose replicas have weights 0, maybe each work, and its hosts; `sync` gives weights to who is alive."""
    hosts = Replicas(size)

    def sync(actor, hosts, version, *, check, replicas):
        for replica in replicas:
            if not hosts.replicas[replica].alive:
                raise WorkerLost("a process died in the sync")
            hosts.replicas[replica].version = version

    monkeypatch.setattr(pool_module, "sync", sync)
    pool = RolloutPool(hosts, replace=hosts.replace)
    pool.load(ACTOR, 0, check=True)
    if busy:
        pool.submit([[request(uid)] for uid in range(size)])
        pool.poll(0.0)
    return pool, hosts
