"""Tests of vLLM engines that quantize their weights (`rollout.vllm.quantization`)."""

import shutil
from pathlib import Path

import pytest
import torch
from engines import answers, buckets, new_engine, requests, shaken
from ranks import load, on

from rltrain.base.errors import ConfigError, SyncError
from tests.distributed.test_vllm_engine import disguised
from tests.e2e.own_models import save_model
from workers.cluster.processes import Role
from workers.rollout.worker import RolloutWorker

pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("ray_here", "process_group"), pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="vLLM needs AMX, a unit of newer CPUs, for fp8 weights"
    ),
]  # fmt: skip
FP8 = ["model.dtype=bfloat16", "rollout.vllm.quantization=fp8_per_block"]
# vLLM's kernels need matrices of at least 32 rows, and the router of a mixture has one row for each expert.
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES = {"mistral": {}, "qwen3_moe": EXPERTS}
PROMPT = list(range(20, 36))


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path) -> Path:
    """Save a tiny random model."""
    sizes = {"hidden_size": 128, "intermediate_size": 256} | FAMILIES[request.param]
    return save_model(tmp_path / "model", request.param, positions=128, **sizes)


async def quantized_weights(engine: Role[RolloutWorker]) -> list[str]:
    """Return the names of the weights that the engine holds in fp8."""

    def weights(host):
        def read(worker):
            named = worker.model_runner.model.named_parameters()
            return [name for name, weight in named if weight.dtype == torch.float8_e4m3fn]

        return host.roles["rollout"].engine.engine.collective_rpc(read)[0]

    return (await on([engine.process], weights))[0]


async def test_after_a_sync_a_quantized_engine_answers_as_a_fresh_one_with_those_weights(ray_here, model, tmp_path):
    engine = await new_engine(str(model), *FP8)
    old = await answers(engine, requests(PROMPT, 8))
    new = shaken(str(model), 0.05)
    await load(engine, buckets(new, version=2, dtype="bfloat16"))
    shutil.copytree(model, tmp_path / "new")
    new.bfloat16().save_pretrained(tmp_path / "new")
    fresh = await new_engine(str(tmp_path / "new"), *FP8)
    assert await quantized_weights(engine) == await quantized_weights(fresh) != []
    synced, expected = [await answers(one, requests(PROMPT, 8)) for one in (engine, fresh)]
    for key, answer in synced.items():
        assert answer.token_ids == expected[key].token_ids
        assert answer.log_probs == pytest.approx(expected[key].log_probs, abs=1e-5)
    assert any(old[key].token_ids != answer.token_ids for key, answer in synced.items())


async def test_wrong_quantized_weights_are_caught(ray_here, model):
    engine = await new_engine(str(model), *FP8)
    names = [name for bucket in buckets(shaken(str(model), 0)) for name in bucket.probes()]
    tried = [name for name in names if name.startswith("model.layers.1.") and "norm" not in name]
    assert len(tried) >= 7
    for name in tried:
        bad = disguised(buckets(shaken(str(model), 0), version=3, dtype="bfloat16"), name, 0.5)
        message = r"does not compute with the actor's 'model.layers.1\..*relative error (0\.[3-9]|1\.)"
        with pytest.raises(SyncError, match=message):
            await load(engine, bad)


@pytest.mark.parametrize("process", ["inprocess", "async"])
async def test_a_model_whose_quantized_layers_have_biases_is_refused_on_cpus(ray_here, start, process):
    message = r"cannot add the bias of the quantized layer .*qkv_proj\); use rollout.vllm.quantization=null"
    with pytest.raises(ConfigError, match=message):
        await new_engine(start, *FP8, f"rollout.vllm.process={process}")


async def test_a_format_that_quantizes_no_layer_of_the_model_is_refused(ray_here, start):
    with pytest.raises(ConfigError, match=r"vLLM quantizes no layer of this model\); use rollout.vllm"):
        await new_engine(start, FP8[0], "rollout.vllm.quantization=int8_per_channel_weight_only")
