"""Tests of weight syncs to vLLM engines with mixture-of-experts models: names, kernels and checks of the experts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from engines import TOLERANCE, adapted, adapter_buckets, buckets, log_prob_gap, new_engine, shaken
from ranks import load, on
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.base.errors import SyncError
from rltrain.settings.schema import LoRAConfig
from rltrain.tasks.tokenizer import char_tokenizer
from tests.attention_families import FAMILIES
from workers.cluster.processes import Role
from workers.rollout.worker import RolloutWorker
from workers.sync.buckets import Bucket

pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("ray_here", "process_group"), pytest.mark.asyncio(loop_scope="module")
]  # fmt: skip
# On a CPU, vLLM needs a hidden size that is a multiple of 32 for experts, and a head size that is one for attention.
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
MIXTURES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.broad) for name in ("mixtral", "olmoe"))]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def saved(folder: Path, family: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | FAMILIES[family]))
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


async def small_engine(path: str) -> Role[RolloutWorker]:
    lengths = "rollout.max_prompt_length=64", "rollout.max_response_length=32"
    return await new_engine(path, *lengths, stop_ids=[2])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MIXTURES)
async def mixture(request, ray_here, tmp_path_factory):
    """Return an engine with a tiny model of a family, and the model's directory."""
    path = saved(tmp_path_factory.mktemp(request.param), request.param)
    return await small_engine(path), path


async def test_E1_E5_after_each_verified_sync_the_engine_computes_with_the_experts_of_the_trainer(mixture):
    engine, path = mixture
    for seed in (1, 2):
        model = shaken(path, 0.05, seed)
        await load(engine, buckets(model))
        assert await log_prob_gap(engine, model, PROMPT) < TOLERANCE
    # The log-probs of other weights are different.
    assert await log_prob_gap(engine, shaken(path, 0.05, 1), PROMPT) > 1e-2


def changed(sent: list[Bucket], name: str, rows: slice) -> list[Bucket]:
    """Change some products of a parameter, so that the sender claims other rows for equal weights."""

    def claimed(probe: np.ndarray) -> np.ndarray:
        other = probe.copy()
        other[rows] += 1e-2 * abs(probe).max()
        return other

    for bucket in sent:
        bucket.pieces = [replace(p, probe=claimed(p.probe)) if p.name == name else p for p in bucket.pieces]
    return sent


@pytest.mark.parametrize("matrices", ["gate_up_proj", "down_proj"])
async def test_E5_wrong_weights_of_a_single_expert_are_caught_by_the_name_of_the_expert(mixture, matrices):
    engine, path = mixture
    model = AutoModelForCausalLM.from_pretrained(path)
    name = f"model.layers.1.mlp.experts.{matrices}"
    rows = model.get_parameter(name).shape[1]
    for expert in (0, 3):
        bad = changed(buckets(model), name, slice(expert * rows + rows // 2, (expert + 1) * rows))
        with pytest.raises(SyncError, match=rf"the actor's 'model.layers.1.\w+.experts.{expert}[.']"):
            await load(engine, bad)
    await load(engine, buckets(model))


async def test_the_router_and_every_other_tensor_are_checked_too(mixture):
    engine, path = mixture
    model = AutoModelForCausalLM.from_pretrained(path)
    for name in (name for name, _ in model.named_parameters() if ".experts." not in name and "layers.1" not in name):
        with pytest.raises(SyncError, match="does not compute with the actor's"):
            await load(engine, changed(buckets(model), name, slice(None)))
    await load(engine, buckets(model))


async def test_E5_adapters_of_attention_layers_are_merged_beside_experts(mixture):
    engine, path = mixture
    lora = LoRAConfig(rank=2, alpha=4.0, targets=["q_proj", "v_proj"])
    model = adapted(path, lora, scale=0.3, seed=3)
    await load(engine, adapter_buckets(model, merged=True))
    assert await log_prob_gap(engine, model, PROMPT) < TOLERANCE


async def test_E5_experts_whose_kernels_are_not_set_up_again_are_caught(ray_here, tmp_path):
    """On a CPU, vLLM's own reload of experts leaves weights in a layout with which its kernel cannot compute.

    The sizes need no padding, so the layouts have the same shape, and vLLM raises no error.
    """
    path = saved(tmp_path, "olmoe")
    victim = await small_engine(path)

    def keep_kernels(host):
        from workers.rollout.engines.vllm import experts

        experts.ExpertChecks.forget_kernels = lambda self: None

    await on([victim.process], keep_kernels)
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'model.layers.\d.mlp.experts.\d'"):
        await load(victim, buckets(AutoModelForCausalLM.from_pretrained(path)))
