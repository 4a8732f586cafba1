"""Tests that training with recorded experts gives the same results for any split of rows and tokens over ranks."""

import pytest
import pytest_asyncio
import torch
from ranks import config_of, group, replayed, updated
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import minibatches
from rltrain.tasks.tokenizer import char_tokenizer
from tests.attention_families import FAMILIES
from tests.policy_weights import weights_of
from workers.training.actor import ActorWorker
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.shared_columns import log_probs_columns

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here"), pytest.mark.asyncio(loop_scope="module")]
LAYERS, EXPERTS, CHOSEN, STEPS = 2, 4, 2, 2
COMMON = ["rollout=hf", "algorithm.kl_loss.kl_loss_coef=0"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    tokenizer = char_tokenizer()
    config = CONFIG_MAPPING["qwen3_moe"](
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, **FAMILIES["qwen3_moe"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def with_experts(batch: DataProto, step: int) -> DataProto:
    """Return the batch with random numbers as the recorded experts of each token."""
    generator = torch.Generator().manual_seed(step)

    def drawn(column: str) -> torch.Tensor:
        scores = torch.rand(len(batch.values(column)), LAYERS, EXPERTS, generator=generator)
        return scores.topk(CHOSEN).indices.flatten(1).to(torch.int16)

    batch = batch.with_values("prompts", prompt_experts=drawn("prompts"))
    return batch.with_values("responses", response_experts=drawn("responses"))


async def trained(path: str, ranks: int, *overrides: str, replay: str = "engine"):
    """Train `STEPS` steps.

    Returns:
        A list with the batch and the metrics of each step, and the final weights.
    """
    config = config_of(*COMMON, f"actor.router_replay={replay}", f"placement.actor_ranks={ranks or 1}", *overrides)
    workers, found = await group(config, path, ranks, roles=("actor",)), []
    budget, columns = config.actor.max_tokens_per_microbatch, log_probs_columns(config.algorithm)
    for step in range(STEPS):
        batch = with_experts(replayed(step), step) if replay == "engine" else replayed(step)
        old = await workers["actor"].rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=budget)
        batch = batch.union(old)
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        metrics = await updated(workers["actor"], batch, plan, max_tokens=budget, config=config)
        found.append((batch, metrics))
    return found, await weights_of(workers["actor"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["engine", "actor"])
async def one_rank(request, ray_here, mixture):
    return request.param, await trained(mixture, 0, replay=request.param)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, []),
        (2, ["placement.sequence_ranks=2", "actor.max_tokens_per_microbatch=20"]),
        (2, ["placement.context_ranks=2", "actor.max_tokens_per_microbatch=20"]),
        (2, ["placement.expert_ranks=2"]),
        (2, ["model.activation_checkpointing=true", "actor.max_tokens_per_microbatch=40"]),
    ],
)
async def test_A2_A3_experts_are_replayed_the_same_on_any_split(one_rank, mixture, ranks, overrides):
    replay, (steps, last) = one_rank
    found, weights = await trained(mixture, ranks, *overrides, replay=replay)
    for (batch, metrics), (expected, wanted) in zip(found, steps, strict=True):
        assert torch.allclose(batch.values("old_log_probs"), expected.values("old_log_probs"), atol=1e-4)
        for column in ("prompt_experts", "response_experts"):
            assert batch.values(column).sort().values.equal(expected.values(column).sort().values)
        for name, value in wanted.items():
            assert name in OVERHEAD_METRICS or metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for name, tensor in last.items():
        assert (weights[name] - tensor).abs().max() < 2e-4, name


async def test_other_experts_give_other_weights(one_rank, mixture):
    """Training with recorded experts gives other weights than training in which the routers choose the experts."""
    replay, (steps, last) = one_rank
    found, weights = await trained(mixture, 0, replay="null")
    changed = (found[0][0].values("old_log_probs") - steps[0][0].values("old_log_probs")).abs().max()
    assert changed > 0.05 if replay == "engine" else changed < 1e-5
    assert max(float((weights[name] - tensor).abs().max()) for name, tensor in last.items()) > 2e-4
