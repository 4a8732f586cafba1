"""Tests of `actor.router_replay=engine` with vLLM on a GPU, which returns the experts that it chose for each token."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rltrain.base.random_streams import stream_seed
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from rltrain.trajectories.batch_building import batch_of
from rltrain.trajectories.prompt_groups import trajectory_of
from workers.cluster.processes import Role, results
from workers.models.fsdp import device
from workers.models.loading import load_model
from workers.models.packed_forward import pack, policy_output, to_device
from workers.models.router_replay import replay_routers
from workers.placement import ENGINE, spawner
from workers.rollout.messages import Completion, Request
from workers.rollout.worker import RolloutWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("ray_here", "process_group"),
    pytest.mark.timeout(900),
]
PROMPT = char_tokenizer()("2299907=")["input_ids"]


async def test_E1_the_trainer_computes_with_the_experts_that_vllm_returned(tmp_path, ray_here):
    torch.manual_seed(0)
    tokenizer = char_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, moe_intermediate_size=128, intermediate_size=256,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16,
        num_experts_per_tok=4, mlp_only_layers=[0], max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = compose(
        ["model.dtype=bfloat16", "rollout.vllm.gpu_memory_utilization=0.3", "actor.router_replay=engine"]
    )[0]
    process = spawner(settings, "rollout replica", 1)(0)
    await results([process.build("rollout", ENGINE, settings, str(tmp_path), [EOS_ID], threaded=True)])
    engine: Role[RolloutWorker] = Role(process, "rollout")
    requests = [Request((0, n), PROMPT, 1.0, 32, stream_seed(0, 0, n)) for n in range(16)]
    await engine.call(RolloutWorker.submit, requests)
    found: list[Completion] = []
    while len(found) < len(requests):
        found += await engine.call(RolloutWorker.poll, 5.0)
    await engine.call(RolloutWorker.close)
    batch = batch_of([trajectory_of(PROMPT, completion) for completion in found], experts=True)
    assert batch.values("response_experts").shape[1] == 4 * 4
    model = load_model(AutoModelForCausalLM, str(tmp_path)).eval().to(device(), torch.bfloat16)
    replay_routers(model, "model")
    engines = batch.values("rollout_log_probs")
    with torch.no_grad():
        replayed, free = (
            policy_output(model, to_device(pack(one), device()), temperature=1.0).log_probs.cpu()
            for one in (batch, batch.select(["prompts", "responses"]))
        )
    assert (replayed - engines).abs().mean() < 2e-2
    assert (replayed - engines).abs().mean() <= (free - engines).abs().mean() + 1e-3
