"""Tests that an engine gets the LoRA adapters of two sharded ranks and merges the adapters into the base weights."""

import pytest
import pytest_asyncio
import torch
from ranks import on
from transformers import AutoModelForCausalLM

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import SyncError
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from tests.distributed.test_checkpoint_ranks import save
from workers.placement import start as start_workers
from workers.rollout.messages import Request
from workers.rollout.worker import RolloutWorker
from workers.sync.weight_sync import sync

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here"), pytest.mark.asyncio(loop_scope="module")]
REQUEST = Request((0, 0), char_tokenizer()("2299907=")["input_ids"], 1.0, 8, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(ray_here, start, request):
    config, _ = compose([
        "placement.actor_ranks=2", "placement.share_ranks=true", "model.lora={rank:4,targets:[q_proj,o_proj,up_proj]}",
        f"rollout.vllm.process={request.param}",
    ])  # fmt: skip
    async with (
        BackgroundTasks() as tasks,
        await start_workers(config, start, [EOS_ID], tasks, needs_critic=False) as made,
    ):
        await on(processes(made.actor.ranks), small_buckets)
        yield made


def processes(roles):
    return [role.process for role in roles]


def engines(workers):
    return [replica.role for replica in workers.rollout.replicas]


def small_buckets(host):
    from workers.sync import buckets

    buckets.BUCKET_BYTES = 6000


def shaken(host):
    """Add noise to the adapters. The noise does not depend on how the adapters are sharded."""
    import torch

    from workers.models.lora import adapter_tensors

    generator = torch.Generator().manual_seed(7)
    for tensor in adapter_tensors(host.roles["actor"].model).values():
        noise = 0.05 * torch.randn(tensor.shape, generator=generator)
        local = tensor.to_local()
        local += torch.distributed.tensor.distribute_tensor(noise, tensor.device_mesh, tensor.placements).to_local()


def onto_merged_weights(host):
    """Make the engine faulty, so that each sync uses the merged weights of the previous sync as the base weights."""
    from workers.models.adapter_weights import BaseWeights
    from workers.sync.adapters import Adapters

    merged, tensor, held = Adapters.merged, BaseWeights.tensor, {}

    def remembered(self, **options):
        for name, made in merged(self, **options):
            yield name, made
            held[name] = made.clone()

    Adapters.merged = remembered
    BaseWeights.tensor = lambda self, name: held[name] if name in held else tensor(self, name)


async def answer(workers):
    (engine,) = engines(workers)
    await engine.call(RolloutWorker.submit, [REQUEST])
    got: list = []
    while not got:
        got = await engine.call(RolloutWorker.poll, 5.0)
    return got[0]


async def merged_log_probs(workers, folder, tokens) -> list[float]:
    """Save the model with all ranks' adapters merged, and return the log-probs that it gives to `tokens`."""
    await save(workers.actor, folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        log_softmax = model(torch.tensor([[*REQUEST.prompt_ids, *tokens]])).logits[0].log_softmax(-1)
    predicting = log_softmax[len(REQUEST.prompt_ids) - 1 : -1]
    return predicting.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("workers", ["inprocess", pytest.param("async", marks=pytest.mark.broad)], indirect=True)
async def test_E5_E6_adapters_of_all_ranks_are_applied_once_however_many_syncs_there_are(workers, tmp_path):
    said = []
    # B is 0 in sync 0. Syncs 2, 3 and 4 send the same adapters.
    for version, transport in enumerate(("auto", "auto", "object_store", "auto", "process_group")):
        if version in (1, 2):
            await on(processes(workers.actor.ranks), shaken)
        await sync(workers.actor.ranks, engines(workers), version, check=True, transport=transport)
        got = await answer(workers)
        expected = await merged_log_probs(workers, tmp_path / str(version), got.token_ids)
        assert got.log_probs == pytest.approx(expected, abs=1e-4)
        said.append(got.log_probs)
    assert said[0] != said[1] != said[2] == said[3] == said[4]


@pytest.mark.parametrize("workers", ["inprocess"], indirect=True)
async def test_E5_a_merge_onto_merged_weights_is_caught(workers):
    await on(processes(engines(workers)), onto_merged_weights)
    await sync(workers.actor.ranks, engines(workers), 5, check=True)
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model\.layers"):
        await sync(workers.actor.ranks, engines(workers), 6, check=True)
