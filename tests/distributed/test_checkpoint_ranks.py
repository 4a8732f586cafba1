"""Tests that training can resume from a checkpoint on a different number of ranks."""

import asyncio

import pytest
import pytest_asyncio
import torch
from ranks import LORA, config_of, group, replayed, updated, with_log_probs
from safetensors.torch import load_file

from rltrain.batch.row_assignment import minibatches
from tests.policy_weights import weights_of
from workers.training.actor import ActorWorker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
SAVED_AFTER, STEPS = 2, 4


async def learn(actor, steps, config):
    for step in steps:
        batch = replayed(step)
        noise = batch.values("advantages")
        batch = batch.with_values("responses", ref_log_probs=-noise.abs())
        batch = await with_log_probs({"actor": actor}, batch)
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        await updated(actor, batch, plan, config=config)
    return await weights_of(actor)


async def save(actor, folder):
    await actor.call(ActorWorker.save_state, str(folder))
    found = await saved(actor)
    assert [one.error for one in found] == [""] * len(found)
    return [one.files for one in found]


async def saved(actor):
    """Wait until all ranks have written their parts of a checkpoint, and return the reports of the ranks."""
    while None in (found := await actor.call(ActorWorker.saved_state)):
        await asyncio.sleep(0.02)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[[], [LORA]], ids=["all weights", "adapters"])
async def undisturbed(request, ray_here, start):
    config = config_of(*request.param)
    actor = (await group(config, start, 0, roles=("actor",)))["actor"]
    return request.param, await learn(actor, range(STEPS), config)


@pytest.mark.parametrize(
    ("before", "after", "overrides"), [(2, 0, []), (0, 2, []), (2, 4, ["placement.shard_ranks=2"]), (2, 2, [])]
)
async def test_F4_another_number_of_ranks_goes_on_as_if_nothing_had_happened(
    undisturbed, start, tmp_path, before, after, overrides
):
    own, expected = undisturbed
    config = config_of(*own)
    first = (await group(config, start, before, roles=("actor",)))["actor"]
    weights = await learn(first, range(SAVED_AFTER), config)
    files = await save(first, tmp_path)
    assert len(files) == max(before, 1)
    assert "model/model.safetensors" in files[0]
    exported = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    ranks = [f"placement.actor_ranks={after}"] if after else []
    other = (await group(config_of(*own, *ranks, *overrides), start, after, roles=("actor",)))["actor"]
    await other.call(ActorWorker.load_state, str(tmp_path))
    found = await learn(other, range(SAVED_AFTER, STEPS), config)
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-5, name


async def test_a_save_goes_on_while_the_ranks_train(start, tmp_path):
    config = config_of()
    actor = (await group(config, start, 2, roles=("actor",)))["actor"]
    before = await learn(actor, range(1), config)
    await actor.call(ActorWorker.save_state, str(tmp_path))
    await learn(actor, range(1, 3), config)  # the ranks train while the save still runs collectives
    assert [one.error for one in await saved(actor)] == ["", ""]
    exported = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in before.items())
