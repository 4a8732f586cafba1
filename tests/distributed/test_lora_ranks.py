"""Adapters of two sharded ranks, on the engine's own copy of the base weights."""

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rltrain.base.errors import SyncError
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from tests.distributed.test_checkpoint_ranks import save
from workers.placement import start as start_workers
from workers.rollout.messages import Request
from workers.sync import weight_sync

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
REQUEST = Request((0, 0), char_tokenizer()("2299907=")["input_ids"], 1.0, 8, 0)


@pytest.fixture(scope="module")
def workers(ray_here, start, request):
    config, _ = compose([
        "placement.actor_ranks=2", "placement.share_ranks=true", "model.lora={rank:4,targets:[q_proj,o_proj,up_proj]}",
        f"rollout.vllm.process={request.param}",
    ])  # fmt: skip
    made = start_workers(config, start, [EOS_ID], needs_critic=False)
    on(made.actor.hosts, small_buckets)
    yield made
    made.close()


def on(hosts, function):
    return ray.get([actor.__ray_call__.remote(function) for actor in hosts.actors])


def small_buckets(host):
    from workers.sync import buckets

    buckets.BUCKET_BYTES = 6000


def shaken(host):
    """Other adapters, the same however they are sharded."""
    import torch

    from workers.models.lora import adapter_tensors

    generator = torch.Generator().manual_seed(7)
    for tensor in adapter_tensors(host.roles["actor"].model).values():
        noise = 0.05 * torch.randn(tensor.shape, generator=generator)
        local = tensor.to_local()
        local += torch.distributed.tensor.distribute_tensor(noise, tensor.device_mesh, tensor.placements).to_local()


def onto_merged_weights(host):
    """From now on the engine takes what it made in one sync for its base weights in the next."""
    from workers.models.adapter_weights import BaseWeights
    from workers.sync.adapters import Adapters

    merged, tensor, held = Adapters.merged, BaseWeights.tensor, {}

    def remembered(self, **options):
        for name, made in merged(self, **options):
            yield name, made
            held[name] = made.clone()

    Adapters.merged = remembered
    BaseWeights.tensor = lambda self, name: held[name] if name in held else tensor(self, name)


def answer(workers):
    workers.rollout.hosts.call("rollout", "submit", [([REQUEST],)])
    got: list = []
    while not got:
        got = workers.rollout.hosts.call("rollout", "poll", [(5.0,)])[0]
    return got[0]


def merged_log_probs(workers, folder, tokens) -> list[float]:
    """What the model that the ranks save says of these tokens."""
    save(workers.actor, folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        log_softmax = model(torch.tensor([REQUEST.prompt_ids + tokens])).logits[0].log_softmax(-1)
    predicting = log_softmax[len(REQUEST.prompt_ids) - 1 : -1]
    return predicting.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("workers", ["inprocess", "async"], indirect=True)
def test_E5_E6_adapters_of_all_ranks_are_applied_once_however_many_syncs_there_are(workers, tmp_path):
    hosts, said = workers.rollout.hosts, []
    for version, share in enumerate([True, True, False, True]):  # the first with B = 0, the last twice the same
        if version in (1, 2):
            on(workers.actor.hosts, shaken)
        weight_sync.sync(workers.actor, hosts, version, check=True, share=share)
        got = answer(workers)
        expected = merged_log_probs(workers, tmp_path / str(version), got.token_ids)
        assert got.log_probs == pytest.approx(expected, abs=1e-4)
        said.append(got.log_probs)
    assert said[0] != said[1] != said[2] == said[3]


@pytest.mark.parametrize("workers", ["inprocess"], indirect=True)
def test_E5_a_merge_onto_merged_weights_is_caught(workers):
    on(workers.rollout.hosts, onto_merged_weights)
    weight_sync.sync(workers.actor, workers.rollout.hosts, 5, check=True)
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model\.layers"):
        weight_sync.sync(workers.actor, workers.rollout.hosts, 6, check=True)
