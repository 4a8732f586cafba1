"""Tests that the reference model is updated in the same way on any number of ranks, and in processes of its own."""

import asyncio

import pytest
import pytest_asyncio
import torch
from ranks import LOG_PROBS, NUMBERS, built, config_of, processes_of, replayed

from rltrain.batch.row_assignment import minibatches
from workers.cluster.processes import RayProcess
from workers.placement import ROLES, meet, spawner
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.policy_update import update_policy
from workers.training.reference import ReferenceWorker
from workers.training.reference_refresh import refresh_reference, send_reference_head
from workers.training.shared_columns import FORWARD, log_probs_columns
from workers.training.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
AVERAGE = ["algorithm.reference.refresh_every=1", "algorithm.reference.refresh_coef=0.3"]
COPY = ["algorithm.reference.refresh_every=1"]
EXACT = ["algorithm.kl_loss.kl_estimator=full", "algorithm.kl_in_reward.kl_coef=0.1"]
OWN: list[RayProcess] = []


async def own_processes() -> list[RayProcess]:
    """Return two connected processes that hold no actor."""
    if not OWN:
        spawn = spawner(config_of(), "reference rank", 2)
        OWN.extend([spawn(number) for number in range(2)])
        await meet(OWN, config_of())
    return OWN


async def roles(config, start, ranks, *, apart=False):
    """Build the actor and the reference on `ranks` ranks, with the reference in processes of its own if `apart`."""
    places = {"actor": await processes_of(ranks)}
    places["reference"] = await own_processes() if apart else places["actor"]
    made = {}
    for role, processes in places.items():
        made[role] = WorkerGroup(await built(processes, f"{role} {next(NUMBERS)}", ROLES[role], config, start))
    return made


async def with_columns(workers, config, step):
    batch = replayed(step)
    batch = batch.union(await workers["reference"].rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=8192))
    columns = log_probs_columns(config.algorithm)
    return batch.union(await workers["actor"].rows(LOG_PROBS["actor"], batch, columns, max_tokens=8192))


async def train(config, workers, steps):
    """Train for the given steps, update the reference after each step, and return the batches and metrics."""
    batches, history = [], []
    for step in steps:
        batch = await with_columns(workers, config, step)
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        history.append(await update_policy(workers["actor"], batch, plan, config, max_tokens=8192, entropy_coef=0.001))
        await refresh_reference(workers["actor"], workers["reference"])
        if config.algorithm.needs_full_kl:
            await send_reference_head(workers["actor"], workers["reference"])
        batches.append(batch)
    return batches, history


def same(found, expected):
    for (batch, metrics), (other, wanted) in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
        for name in ("old_log_probs", "ref_log_probs", "ref_hidden"):
            if name in other:
                assert (batch.values(name) - other.values(name)).abs().max() < 1e-4, name
        for name, value in wanted.items():
            assert name in OVERHEAD_METRICS or metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_rank(ray_here, start):
    config = config_of(*AVERAGE, *EXACT, "actor.lr=1e-3")
    return await train(config, await roles(config, start, 0), range(3))


@pytest.mark.parametrize(
    ("ranks", "apart", "overrides"),
    [
        (2, False, []),
        (2, True, []),
        (4, False, ["placement.shard_ranks=2"]),
        (2, False, ["placement.sequence_ranks=2"]),
        (2, False, ["placement.tensor_ranks=2"]),
    ],
)
async def test_A2_an_average_is_the_same_on_any_number_of_ranks_and_in_processes_of_its_own(
    one_rank, start, ranks, apart, overrides
):
    config = config_of(*AVERAGE, *EXACT, "actor.lr=1e-3", f"placement.actor_ranks={ranks}", *overrides)
    workers = await roles(config, start, ranks, apart=apart)
    for group in workers.values():
        group.ranks_per_pack, group.token_ranks = config.placement.ranks_per_pack, config.placement.token_ranks
    same(await train(config, workers, range(3)), one_rank)


def test_the_reference_of_one_rank_moves(one_rank):
    batches, history = one_rank
    assert [step["ref_kl"] > 1e-4 for step in history] == [True] * 3
    assert all("ref_hidden" in batch and "ref_log_probs" in batch for batch in batches)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("apart", [False, True])
async def test_after_a_copy_the_reference_agrees_with_the_actor_to_the_last_bit(start, apart, dtype):
    config = config_of(*COPY, "actor.lr=1e-2", f"model.dtype={dtype}", "placement.actor_ranks=2")
    workers = await roles(config, start, 2, apart=apart)
    await train(config, workers, range(2))
    batch = await with_columns(workers, config, 2)
    assert torch.equal(batch.values("ref_log_probs"), batch.values("old_log_probs"))


async def test_F4_the_reference_of_a_checkpoint_is_loaded_by_any_number_of_ranks(start, tmp_path):
    config = config_of(*AVERAGE, "actor.lr=1e-2", "placement.actor_ranks=2")
    workers = await roles(config, start, 2)
    await train(config, workers, range(2))
    reference = workers["reference"]
    await reference.call(ReferenceWorker.save_state, str(tmp_path))
    while None in (saved := await reference.call(ReferenceWorker.saved_state)):
        await asyncio.sleep(0.02)
    assert [one.error for one in saved] == ["", ""]
    batch = replayed(3)
    expected = await reference.rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=8192)
    for ranks, overrides in ((0, []), (4, ["placement.actor_ranks=4", "placement.shard_ranks=2"])):
        other = (await roles(config_of(*AVERAGE, *overrides), start, ranks))["reference"]
        before = await other.rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=8192)
        await other.call(ReferenceWorker.load_state, str(tmp_path))
        found = await other.rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=8192)
        assert (found.values("ref_log_probs") - expected.values("ref_log_probs")).abs().max() < 1e-5
        assert (before.values("ref_log_probs") - expected.values("ref_log_probs")).abs().max() > 1e-3
