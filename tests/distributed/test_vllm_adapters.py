"""Tests of vLLM engines in runs with LoRA adapters and `rollout.vllm.adapters=separate`."""

from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from ranks import built, load, on
from transformers import AutoModelForCausalLM

from rltrain.base.errors import SyncError
from rltrain.base.random_streams import stream_seed
from rltrain.settings.compose import compose
from rltrain.settings.schema import LoRAConfig
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from workers.cluster.processes import Role
from workers.models.lora import adapt
from workers.placement import ENGINE, spawner
from workers.rollout.messages import Completion, Request
from workers.rollout.worker import RolloutWorker
from workers.sync.buckets import Bucket, join
from workers.sync.sender import AdapterSender

pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("ray_here", "process_group"), pytest.mark.asyncio(loop_scope="module")
]  # fmt: skip
LORA = LoRAConfig(rank=4, alpha=8.0, targets=["all-linear"])
# vLLM caches keys and values in blocks of 32 tokens. A longer prompt shows whether a sync removes the cached blocks.
PROMPT = char_tokenizer()("2299907=" * 6)["input_ids"]


def adapted(path: str, seed: int, *, lora: LoRAConfig = LORA, size: float = 0.2) -> torch.nn.Module:
    """Return the model with random adapters. `size` is the standard deviation of the values of A and B."""
    model = AutoModelForCausalLM.from_pretrained(path)
    adapt(model, lora)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            layer, _, last = name.rpartition(".")
            values = size * torch.randn(parameter.shape, generator=generator)
            setattr(model.get_submodule(layer), last, torch.nn.Parameter(values))
    return model.eval()


def buckets(model: torch.nn.Module, *, version: int = 1, dtype: str = "float32") -> list[Bucket]:
    sender = AdapterSender(model, version=version, dtype=dtype, check=True, merged=False)
    return [join([sender.write(number, None)]) for number in range(len(sender.layout))]


async def new_engine(path: str, *overrides: str, lora: LoRAConfig = LORA) -> Role[RolloutWorker]:
    targets = ",".join(lora.targets)
    config, _ = compose([
        "rollout.vllm.adapters=separate", "rollout.max_prompt_length=64",
        f"model.lora={{rank:{lora.rank},alpha:{lora.alpha},targets:[{targets}]}}",
        *overrides,
    ])  # fmt: skip
    process = spawner(config, "rollout replica", 1)(0)
    return (await built([process], "rollout", ENGINE, config, path, [EOS_ID], threaded=True))[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["one process", "two shards"])
async def engine(request, ray_here, start):
    shards = ["rollout.vllm.tensor_parallel_size=2"] if request.param == "two shards" else []
    return await new_engine(start, *shards)


async def log_prob_gap(engine: Role[RolloutWorker], model: torch.nn.Module, uid: int) -> float:
    """Return the largest difference between the log-probs of the engine's answers and those of the model."""
    requests = [Request((uid, n), PROMPT, 1.0, 16, stream_seed(0, uid, n)) for n in range(8)]
    await engine.call(RolloutWorker.submit, requests)
    found: dict[tuple[int, ...], Completion] = {}
    while len(found) < len(requests):
        found |= {answer.key: answer for answer in await engine.call(RolloutWorker.poll, 5.0)}
    gaps = []
    for answer in found.values():
        ids = torch.tensor([[*PROMPT, *answer.token_ids]])
        with torch.no_grad():
            predicted = model(ids).logits[0].double().log_softmax(-1)[len(PROMPT) - 1 : -1]
        log_probs = predicted.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        gaps.append(float((log_probs - torch.tensor(answer.log_probs)).abs().max()))
    return max(gaps)


async def test_the_engine_samples_from_the_adapted_model_and_each_sync_replaces_the_adapters(engine, start):
    for seed in (1, 2):
        model = adapted(start, seed)
        await load(engine, buckets(model, version=seed))
        assert await log_prob_gap(engine, model, seed) < 1e-4
    assert await log_prob_gap(engine, adapted(start, 1), 3) > 1e-2


async def test_a_sync_leaves_the_base_weights_where_they_are(ray_here, start):
    def weights(host):
        def read(worker):
            named = worker.model_runner.model.named_parameters()
            return {name: (weight.data_ptr(), float(weight.double().sum())) for name, weight in named}

        return host.roles["rollout"].engine.engine.collective_rpc(read)

    engine = await new_engine(start)
    (((before,),),) = [await on([engine.process], weights)]
    assert any("qkv_proj.base_layer.weight" in name for name in before)
    await load(engine, buckets(adapted(start, 4)))
    assert await on([engine.process], weights) == [[before]]


async def test_E5_adapters_that_the_engine_scales_wrongly_are_refused(ray_here, start):
    """The adapters are small, so the error is far below the precision of the base weights in bfloat16."""
    engine = await new_engine(start, "model.dtype=bfloat16")
    model = adapted(start, 7, size=1e-3)
    await load(engine, buckets(model, dtype="bfloat16"))

    def wrong_scale(host):
        def spoil(worker):
            from workers.rollout import vllm_adapters

            made = vllm_adapters.load_adapters

            def spoiled(model, received, *, version):
                received.scale *= 1.1
                made(model, received, version=version)
                received.scale /= 1.1

            vllm_adapters.load_adapters = spoiled

        host.roles["rollout"].engine.engine.collective_rpc(spoil)

    await on([engine.process], wrong_scale)
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model\.layers"):
        await load(engine, buckets(model, dtype="bfloat16"))


async def test_E5_adapters_of_rank_1_in_bfloat16_pass_the_checks(ray_here, start):
    """The rounding of A and B to bfloat16 changes some products B (A v) by far more than the checks allow."""
    lora = LoRAConfig(rank=1, alpha=3.0, targets=["all-linear"])
    engine = await new_engine(start, "model.dtype=bfloat16", lora=lora)
    for seed in range(8):
        await load(engine, buckets(adapted(start, seed, lora=lora), version=seed, dtype="bfloat16"))


async def test_an_answer_that_a_sync_interrupts_goes_on_with_the_new_adapters(engine, start):
    old, new = adapted(start, 8), adapted(start, 9)
    await load(engine, buckets(old, version=8))
    requests = [Request((8, n), PROMPT, 1.0, 16, stream_seed(0, 8, n)) for n in range(8)]
    await engine.call(RolloutWorker.submit, requests)
    await load(engine, buckets(new, version=9))
    found: list[Completion] = []
    while len(found) < len(requests):
        found += await engine.call(RolloutWorker.poll, 5.0)
    seen = set()
    for answer in found:
        ids = torch.tensor([[*PROMPT, *answer.token_ids]])
        for version, model in ((8, old), (9, new)):
            with torch.no_grad():
                predicted = model(ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
            expected = predicted.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            of_version = torch.tensor(answer.versions) == version
            seen |= {version} if of_version.any() else set()
            gaps = (expected - torch.tensor(answer.log_probs))[of_version]
            assert of_version.sum() == 0 or float(gaps.abs().max()) < 1e-4
    assert 9 in seen


async def test_E5_base_weights_that_are_not_those_of_the_actor_are_refused(engine, start):
    sent = buckets(adapted(start, 5))
    for bucket in sent:
        bucket.pieces = [
            replace(p, probe=p.probe + 1e-3 * abs(p.probe).max()) if p.name.endswith("1.mlp.up_proj.weight") else p
            for p in bucket.pieces
        ]
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model\.layers\.1\.mlp\.up_proj"):
        await load(engine, sent)
    await load(engine, buckets(adapted(start, 5)))  # Each shard of an engine forgets the error of the refused sync.
