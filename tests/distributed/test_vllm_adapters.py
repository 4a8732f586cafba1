"""Tests of vLLM engines in runs with LoRA adapters and `rollout.vllm.adapters=separate`."""

from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from engines import TOLERANCE, adapted, adapter_buckets, answers, check_each_token, log_prob_gap, new_engine, requests
from ranks import load, on

from rltrain.base.errors import SyncError
from rltrain.settings.schema import LoRAConfig
from rltrain.tasks.tokenizer import char_tokenizer
from workers.cluster.processes import Role
from workers.rollout.worker import RolloutWorker
from workers.sync.buckets import Bucket

pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("ray_here", "process_group"), pytest.mark.asyncio(loop_scope="module")
]  # fmt: skip
LORA = LoRAConfig(rank=4, alpha=8.0, targets=["all-linear"])
# vLLM caches keys and values in blocks of 32 tokens. A longer prompt shows whether a sync removes the cached blocks.
PROMPT = char_tokenizer()("2299907=" * 6)["input_ids"]


def tuned(path: str, seed: int, *, lora: LoRAConfig = LORA, scale: float = 0.2) -> torch.nn.Module:
    """Return the model with random adapters."""
    return adapted(path, lora, scale=scale, seed=seed)


def sent_by(model: torch.nn.Module, version: int = 1, *, dtype: str = "float32") -> list[Bucket]:
    return adapter_buckets(model, version, merged=False, dtype=dtype)


async def adapter_engine(path: str, *overrides: str, lora: LoRAConfig = LORA) -> Role[RolloutWorker]:
    lora_key = f"model.lora={{rank:{lora.rank},alpha:{lora.alpha},targets:[{','.join(lora.targets)}]}}"
    lengths = "rollout.max_prompt_length=64"
    return await new_engine(path, "rollout.vllm.adapters=separate", lengths, lora_key, *overrides)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["one process", "two shards"])
async def engine(request, ray_here, start):
    shards = ["rollout.vllm.tensor_parallel_size=2"] if request.param == "two shards" else []
    return await adapter_engine(start, *shards)


async def test_the_engine_samples_from_the_adapted_model_and_each_sync_replaces_the_adapters(engine, start):
    for seed in (1, 2):
        model = tuned(start, seed)
        await load(engine, sent_by(model, seed))
        assert await log_prob_gap(engine, model, PROMPT, seed=seed) < TOLERANCE
    assert await log_prob_gap(engine, tuned(start, 1), PROMPT, seed=3) > 1e-2


async def test_a_sync_leaves_the_base_weights_where_they_are(ray_here, start):
    def weights(host):
        def read(worker):
            named = worker.model_runner.model.named_parameters()
            return {name: (weight.data_ptr(), float(weight.double().sum())) for name, weight in named}

        return host.roles["rollout"].engine.engine.collective_rpc(read)

    engine = await adapter_engine(start)
    (((before,),),) = [await on([engine.process], weights)]
    assert any("qkv_proj.base_layer.weight" in name for name in before)
    await load(engine, sent_by(tuned(start, 4)))
    assert await on([engine.process], weights) == [[before]]


async def test_E5_adapters_that_the_engine_scales_wrongly_are_refused(ray_here, start):
    """The adapters are small, so the error is far below the precision of the base weights in bfloat16."""
    engine = await adapter_engine(start, "model.dtype=bfloat16")
    model = tuned(start, 7, scale=1e-3)
    await load(engine, sent_by(model, dtype="bfloat16"))

    def wrong_scale(host):
        def spoil(worker):
            from workers.rollout.engines.vllm import adapters

            made = adapters.load_adapters

            def spoiled(model, received, *, version):
                received.scale *= 1.1
                made(model, received, version=version)
                received.scale /= 1.1

            adapters.load_adapters = spoiled

        host.roles["rollout"].engine.engine.collective_rpc(spoil)

    await on([engine.process], wrong_scale)
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model\.layers"):
        await load(engine, sent_by(model, dtype="bfloat16"))


async def test_E5_adapters_of_rank_1_in_bfloat16_pass_the_checks(ray_here, start):
    """The rounding of A and B to bfloat16 changes some products B (A v) by far more than the checks allow."""
    lora = LoRAConfig(rank=1, alpha=3.0, targets=["all-linear"])
    engine = await adapter_engine(start, "model.dtype=bfloat16", lora=lora)
    for seed in range(8):
        await load(engine, sent_by(tuned(start, seed, lora=lora), seed, dtype="bfloat16"))


async def test_an_answer_that_a_sync_interrupts_goes_on_with_the_new_adapters(engine, start):
    old, new = tuned(start, 8), tuned(start, 9)
    await load(engine, sent_by(old, 8))
    asked = requests(PROMPT, 8, uid=8)
    await engine.call(RolloutWorker.submit, asked)
    await load(engine, sent_by(new, 9))
    found = await answers(engine, [], count=len(asked))
    for request in asked:
        check_each_token({8: old, 9: new}, request, found[request.key])
    seen = {version for answer in found.values() for version in answer.versions}
    assert 9 in seen


async def test_E5_base_weights_that_are_not_those_of_the_actor_are_refused(engine, start):
    sent = sent_by(tuned(start, 5))
    for bucket in sent:
        bucket.pieces = [
            replace(p, probe=p.probe + 1e-3 * abs(p.probe).max()) if p.name.endswith("1.mlp.up_proj.weight") else p
            for p in bucket.pieces
        ]
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model\.layers\.1\.mlp\.up_proj"):
        await load(engine, sent)
    await load(engine, sent_by(tuned(start, 5)))  # Each shard of an engine forgets the error of the refused sync.
