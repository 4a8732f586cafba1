"""Tests that the weights of two sharded ranks reach engines in other processes, through each transport."""

import contextlib
import fcntl
import os

import pytest
import pytest_asyncio
from ranks import on

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import SyncError, WorkerLost
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from workers.placement import start as start_workers
from workers.rollout.messages import Request
from workers.rollout.worker import RolloutWorker
from workers.sync.memory import FOLDER, PREFIX
from workers.sync.weight_sync import sync

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here"), pytest.mark.asyncio(loop_scope="module")]
REQUEST = Request((0, 0), char_tokenizer()("2299907=")["input_ids"], 0.0, 8, 0)
BUCKET_BYTES = 40_000  # small, so that the model (1 MB) needs many buckets, and some layers span two


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
    """Return a function that makes a rank fail once, at the rank's third bucket of weights."""

    def patch(host):
        import os

        from workers.sync.sender import Sender

        write = Sender._write

        def broken(self, place, *arguments):
            if place not in self.layout[2]:
                return write(self, place, *arguments)
            if action == "die":
                os._exit(1)
            Sender._write = write
            raise RuntimeError("a bug")

        Sender._write = broken

    return patch


def dying_engine(host):
    """Make an engine's process end at its third bucket of weights."""
    import os

    from workers.sync import receiver

    load, calls = receiver.Receiver.bucket, []

    def bucket(self, *args):
        calls.append(0)
        if len(calls) == 3:
            os._exit(1)
        load(self, *args)

    receiver.Receiver.bucket = bucket


def processes(group):
    return [rank.process for rank in group.ranks]


def engines(workers):
    return [replica.role for replica in workers.rollout.replicas]


@contextlib.asynccontextmanager
async def started(start, *overrides):
    """Start two ranks and two engines, whose weight syncs have many buckets."""
    config, _ = compose(
        ["placement.actor_ranks=2", "placement.rollout_replicas=2", "placement.share_ranks=true", *overrides]
    )
    async with (
        BackgroundTasks() as tasks,
        await start_workers(config, start, [EOS_ID], tasks, needs_critic=False) as made,
    ):
        await on(processes(made.actor), small_buckets)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(ray_here, start):
    async with started(start) as made:
        yield made


async def answers(workers) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probs with which each engine replica answers `REQUEST`."""
    found = []
    for engine in engines(workers):
        await engine.call(RolloutWorker.submit, [REQUEST])
        got: list = []
        while not got:
            got = await engine.call(RolloutWorker.poll, 5.0)
        found.append((got[0].token_ids, got[0].log_probs))
    return found


@pytest.fixture
def nothing_left():
    """Check that the test leaves no weight file in shared memory, except for files that another run has locked."""
    before = set(FOLDER.glob(f"{PREFIX}*"))
    yield
    assert [path for path in set(FOLDER.glob(f"{PREFIX}*")) - before if is_abandoned(path)] == []


def is_abandoned(path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_size > 0
    except OSError:  # another process has locked or deleted the file
        return False


TRANSPORTS = ("shared_memory", "object_store", "process_group", "device_handles")
MEMBERS = [
    ("rollout replica 0", "process_group"), ("training rank 1", "device_handles"),
    pytest.param("training rank 1", "process_group", marks=pytest.mark.broad),
    pytest.param("rollout replica 1", "process_group", marks=pytest.mark.broad),
    pytest.param("rollout replica 0", "device_handles", marks=pytest.mark.broad),
    pytest.param("rollout replica 1", "device_handles", marks=pytest.mark.broad),
]  # fmt: skip


async def test_E5_E6_each_transport_leaves_every_engine_with_the_weights_of_all_ranks(workers, nothing_left):
    before = await answers(workers)
    await on(processes(workers.actor), shaken)
    found = []
    for version, transport in enumerate(TRANSPORTS, 1):
        await sync(workers.actor.ranks, engines(workers), version, check=True, transport=transport)
        found += await answers(workers)
    assert len(found) == 2 * len(TRANSPORTS)
    assert all(one == found[0] for one in found)
    assert found[0][1] != before[0][1]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_after_a_sync_that_failed_engines_answer_nothing_until_the_next_sync(workers, nothing_left, transport):
    expected = await answers(workers)
    await on(processes(workers.actor)[1:], failing("raise"))
    await on(processes(workers.actor), shaken)
    with pytest.raises(
        SyncError, match=r"weight sync 3 failed: .*rank 1 \(pid \d+ on [\d.]+\) failed: RuntimeError: a bug"
    ):
        await sync(workers.actor.ranks, engines(workers), 3, check=True, transport=transport)
    engine = engines(workers)[0]
    await engine.call(RolloutWorker.submit, [REQUEST])  # the request may still be running when the sync fails
    with pytest.raises(SyncError, match="weight sync 3 failed"):
        await engine.call(RolloutWorker.poll, 0.1)
    await sync(workers.actor.ranks, engines(workers), 4, check=True, transport=transport)
    (late,) = await engine.call(RolloutWorker.poll, 60.0)
    now = await answers(workers)
    assert (late.token_ids, late.log_probs) == now[0] == now[1]
    assert now[0][1] != expected[0][1]


async def test_the_death_of_a_rank_is_named_and_leaves_no_file(workers, nothing_left):
    await on(processes(workers.actor)[:1], failing("die"))
    with pytest.raises(WorkerLost, match=r"training rank 0 \(pid .* is gone"):
        await sync(workers.actor.ranks, engines(workers), 5, check=True)
    with pytest.raises(SyncError, match="weight sync 5 failed"):
        await engines(workers)[1].call(RolloutWorker.poll, 0.1)


@pytest.mark.parametrize(("dying", "transport"), MEMBERS)
async def test_the_death_of_a_member_of_the_process_group_is_named(start, nothing_left, dying, transport):
    async with started(start, "rollout=hf") as workers:
        await workers.rollout.start()
        number = int(dying[-1])
        if dying.startswith("training"):
            await on(processes(workers.actor)[number:][:1], failing("die"))
        else:
            await on([engines(workers)[number].process], dying_engine)
        survivor = engines(workers)[0 if number else 1]
        with pytest.raises(WorkerLost, match=rf"{dying} \(pid .* is gone"):
            await sync(workers.actor.ranks, engines(workers), 1, check=True, transport=transport)
        with pytest.raises(SyncError, match="weight sync 1 failed"):
            await survivor.call(RolloutWorker.poll, 0.1)
