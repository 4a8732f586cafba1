"""Tests that each rank loads exactly its own shards of a model's weights."""

from functools import partial

import pytest
import torch
from ranks import config_of, on, processes_of
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here"), pytest.mark.asyncio(loop_scope="session")]
SIZES = {
    "vocab_size": 129, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    # The weight files hold each expert as a separate tensor, and the model stacks the tensors of all experts.
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma3_text": {"sliding_window": 64},
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """Return the directory of a small random model, in bfloat16 as most published models are."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **{**SIZES, **MODELS[request.param]}))
    folder = tmp_path_factory.mktemp(request.param)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def shards_of(host, path, config, dtype):
    """Load the model, and return this rank's shard of each parameter with the first row of the shard.

    Returns:
        A dict from parameter names to (first row, shard), the model's buffers, and whether the model is in training
        mode.
    """
    from functools import partial

    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from transformers import AutoModelForCausalLM

    from workers.models.fsdp import frozen
    from workers.models.loading import load_model

    model = load_model(AutoModelForCausalLM, path, arrange=partial(frozen, config=config, dtype=dtype))
    found = {}
    for name, parameter in model.named_parameters():
        _, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        found[name] = (start[0], parameter.to_local().clone())
    return found, dict(model.named_buffers()), model.training


@pytest.mark.parametrize("shard_ranks", [None, 1], ids=["sharded", "replicated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_the_shards_of_all_ranks_together_are_the_weights_of_the_files(saved, shard_ranks, dtype):
    config = config_of(f"placement.shard_ranks={'null' if shard_ranks is None else shard_ranks}")
    whole = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    expected = {name: parameter.to(dtype) for name, parameter in whole.named_parameters()}
    load = partial(shards_of, path=str(saved), config=config, dtype=dtype)
    ranks = await on(await processes_of(2), load)
    for parts, buffers, training in ranks:
        assert parts.keys() == expected.keys()
        assert not training
        for name, buffer in whole.named_buffers():
            assert torch.equal(buffers[name], buffer), name
    for name, parameter in expected.items():
        covered = torch.zeros(len(parameter), dtype=torch.int64)
        for parts, _, _ in ranks:
            start, shard = parts[name]
            assert torch.equal(shard, parameter[start : start + len(shard)]), name
            covered[start : start + len(shard)] += 1
        assert (covered == (1 if shard_ranks is None else 2)).all(), name
