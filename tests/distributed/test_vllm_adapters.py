"""Tests of vLLM engines that apply adapters beside the base weights (`rollout.vllm.adapters=separate`)."""

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
PROMPT = char_tokenizer()("2299907=")["input_ids"]


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
    sender = AdapterSender(model, version=version, dtype=dtype, check=True)
    return [join([sender.write(number, None)]) for number in range(len(sender.layout))]


async def new_engine(path: str, *overrides: str, lora: LoRAConfig = LORA) -> Role[RolloutWorker]:
    targets = ",".join(lora.targets)
    config, _ = compose([
        "rollout.vllm.adapters=separate", f"model.lora={{rank:{lora.rank},alpha:{lora.alpha},targets:[{targets}]}}",
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


async def test_a_sync_leaves_the_base_weights_where_they_are(engine, start):
    def weights(host):
        def read(worker):
            named = worker.model_runner.model.named_parameters()
            return {name: (weight.data_ptr(), float(weight.double().sum())) for name, weight in named}

        made = host.roles["rollout"].engine
        if hasattr(made, "loop"):  # The shards have processes of their own, to which functions cannot be sent.
            return None
        return made.engine.collective_rpc(read)

    before = await on([engine.process], weights)
    await load(engine, buckets(adapted(start, 4)))
    assert await on([engine.process], weights) == before


def changed(sent: list[Bucket], factor: float) -> list[Bucket]:
    """Multiply the scale of all adapters, as if the sender had sent other matrices than those of its products."""
    for bucket in sent:
        bucket.scale *= factor
    return sent


async def test_E5_adapters_that_do_not_give_the_products_of_the_actor_are_refused(engine, start):
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model\.layers"):
        await load(engine, changed(buckets(adapted(start, 5)), 1.1))


async def test_E5_adapters_smaller_than_the_rounding_of_the_base_weights_are_checked_too(ray_here, start):
    """The products of whole layers would not show the error, which is far below the precision of bfloat16."""
    engine = await new_engine(start, "model.dtype=bfloat16")
    model = adapted(start, 7, size=1e-3)
    await load(engine, buckets(model, dtype="bfloat16"))
    assert await log_prob_gap(engine, model, 7) < 0.1

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
