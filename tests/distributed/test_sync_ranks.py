"""Weights from two sharded ranks to engines in other processes: through shared memory and through the calls."""

import fcntl
import os

import pytest
import ray

from rltrain.base.errors import SyncError, WorkerLost
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from workers.placement import start as start_workers
from workers.rollout.messages import Request
from workers.sync import weight_sync
from workers.sync.memory import FOLDER, PREFIX

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
REQUEST = Request((0, 0), char_tokenizer()("2299907=")["input_ids"], 0.0, 8, 0)
BUCKET_BYTES = 40_000  # of a model of some 1 MB: fused layers lie in two buckets, and room is used many times


def small_buckets(host):
    from workers.sync import buckets

    buckets.BUCKET_BYTES = BUCKET_BYTES


def shaken(host):
    import torch

    model = host.roles["actor"].model
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        local = parameter.detach().to_local()
        local += 0.02 * torch.randn(local.shape, generator=generator)


def failing(action: str):
    """Makes a rank fail once, at its third bucket."""

    def patch(host):
        import os

        from workers.sync import sender

        write = sender.Sender.write

        def broken(self, number, path):
            if number != 2:
                return write(self, number, path)
            if action == "die":
                os._exit(1)
            sender.Sender.write = write
            raise RuntimeError("a bug")

        sender.Sender.write = broken

    return patch


def on(hosts, function, ranks=None):
    actors = hosts.actors if ranks is None else [hosts.actors[rank] for rank in ranks]
    ray.get([actor.__ray_call__.remote(function) for actor in actors])


@pytest.fixture(scope="module")
def workers(ray_here, start):
    config, _ = compose(["placement.actor_ranks=2", "placement.rollout_replicas=2", "placement.share_ranks=true"])
    made = start_workers(config, start, [EOS_ID], needs_critic=False)
    on(made.actor.hosts, small_buckets)
    yield made
    made.close()


def answers(workers) -> list[tuple[list[int], list[float]]]:
    """What each replica says."""
    hosts, found = workers.rollout.hosts, []
    for replica in range(hosts.size):
        hosts.call("rollout", "submit", [([REQUEST],)], ranks=[replica])
        got: list = []
        while not got:
            got = hosts.call("rollout", "poll", [(5.0,)], ranks=[replica])[0]
        found.append((got[0].token_ids, got[0].log_probs))
    return found


@pytest.fixture
def nothing_left():
    """Other runs on this machine may have files of their own, which they hold a lock on."""
    before = set(FOLDER.glob(f"{PREFIX}*"))
    yield
    assert [path for path in set(FOLDER.glob(f"{PREFIX}*")) - before if is_abandoned(path)] == []


def is_abandoned(path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_size > 0
    except OSError:  # it is in use, or gone by now
        return False


def test_E5_E6_both_ways_leave_every_engine_with_the_weights_of_all_ranks(workers, nothing_left):
    before = answers(workers)
    on(workers.actor.hosts, shaken)
    weight_sync.sync(workers.actor, workers.rollout.hosts, 1, check=True, share=True)
    shared = answers(workers)
    weight_sync.sync(workers.actor, workers.rollout.hosts, 2, check=True, share=False)
    called = answers(workers)
    assert shared[0] == shared[1] == called[0] == called[1]
    assert shared[0][1] != before[0][1]


def test_after_a_sync_that_broke_off_engines_answer_nothing_until_the_next_sync_mends_them(workers, nothing_left):
    expected = answers(workers)
    on(workers.actor.hosts, failing("raise"), ranks=[1])
    on(workers.actor.hosts, shaken)
    with pytest.raises(SyncError, match="weight sync 3 broke off: a worker failed: RuntimeError: a bug"):
        weight_sync.sync(workers.actor, workers.rollout.hosts, 3, check=True)
    hosts = workers.rollout.hosts
    hosts.call("rollout", "submit", [([REQUEST],)], ranks=[0])  # may be on its way when a sync fails
    with pytest.raises(SyncError, match="weight sync 3 failed"):
        hosts.call("rollout", "poll", [(0.1,)], ranks=[0])
    weight_sync.sync(workers.actor, hosts, 4, check=True)
    (late,) = hosts.call("rollout", "poll", [(60.0,)], ranks=[0])[0]
    now = answers(workers)
    assert (late.token_ids, late.log_probs) == now[0] == now[1]
    assert now[0][1] != expected[0][1]


def test_the_death_of_a_rank_is_named_and_leaves_no_file(workers, nothing_left):
    on(workers.actor.hosts, failing("die"), ranks=[0])
    with pytest.raises(WorkerLost, match=r"training rank 0 \(pid .* is gone"):
        weight_sync.sync(workers.actor, workers.rollout.hosts, 5, check=True)
    with pytest.raises(SyncError, match="weight sync 5 failed"):
        workers.rollout.hosts.call("rollout", "poll", [(0.1,)], ranks=[1])
