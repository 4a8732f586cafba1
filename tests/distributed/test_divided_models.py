"""Tests that ranks which divide the matrices or the experts of a model train as one rank does."""

from pathlib import Path

import pytest
import torch
from ranks import config_of, group, on, replayed, updated
from test_checkpoint_ranks import learn, save
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.batch.row_assignment import minibatches
from rltrain.tasks.tokenizer import char_tokenizer
from tests.attention_families import EXPERTS, FAMILIES
from tests.policy_weights import weights_of
from workers.cluster.processes import results
from workers.sync.buckets import join, tensors_of
from workers.training.actor import ActorWorker
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.shared_columns import FORWARD

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here"), pytest.mark.asyncio(loop_scope="module")]
COMMON = ["rollout=hf", "algorithm.kl_loss.kl_loss_coef=0", "actor.max_tokens_per_microbatch=60"]
STEPS = 2
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
# A family with an expert that all tokens use, beside the experts that routers choose.
OTHERS = {"qwen2_moe": {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}}
MADE: dict[str, str] = {}
EXPECTED: dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = {}


def tiny(family: str, folder: Path) -> str:
    """Return the directory of a tiny random model of a family."""
    if family not in MADE:
        torch.manual_seed(0)
        tokenizer, path = char_tokenizer(), folder / family
        config = CONFIG_MAPPING[family](vocab_size=len(tokenizer), **SIZES, **(FAMILIES | OTHERS).get(family, {}))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        MADE[family] = str(path)
    return MADE[family]


def divided(ranks: int, by: dict[str, int], *overrides: str) -> list[str]:
    """Return the config overrides of a layout; `ranks` is 0 for one rank in the test process."""
    sizes = {"actor": max(1, ranks), **by}
    return [*(f"placement.{name}_ranks={size}" for name, size in sizes.items()), *overrides]


async def trained(path: str, ranks: int, *overrides: str):
    """Train `STEPS` steps, and return the metrics of every step and the final weights."""
    config = config_of(*COMMON, *overrides)
    actor, history = (await group(config, path, ranks, roles=("actor",)))["actor"], []
    budget = config.actor.max_tokens_per_microbatch
    for step in range(STEPS):
        batch = replayed(step)
        batch = batch.union(await actor.rows(ActorWorker.compute_log_probs, batch, FORWARD, max_tokens=budget))
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        history.append(await updated(actor, batch, plan, max_tokens=budget, config=config))
    return history, await weights_of(actor)


@pytest.mark.parametrize(
    ("family", "ranks", "by", "overrides"),
    [
        ("qwen3", 2, {"tensor": 2}, []),
        pytest.param("gemma2", 2, {"tensor": 2}, [], marks=pytest.mark.broad),
        pytest.param("olmo2", 2, {"tensor": 2}, [], marks=pytest.mark.broad),
        ("qwen3_moe", 2, {"expert": 2}, []),
        pytest.param("qwen3_moe", 4, {"expert": 2}, ["model.activation_checkpointing=true"], marks=pytest.mark.broad),
        ("qwen3_moe", 4, {"expert": 2, "shard": 2}, []),
        ("qwen3_moe", 4, {"expert": 2, "tensor": 2}, ["actor.load_balance_coef=0.5"]),
        pytest.param("qwen3_moe", 4, {"expert": 4}, ["actor.max_tokens_per_microbatch=35"], marks=pytest.mark.broad),
        ("qwen3_moe", 4, {"expert": 2, "tensor": 2}, []),
        pytest.param("qwen3_moe", 4, {"expert": 2, "context": 2}, [], marks=pytest.mark.broad),
        pytest.param("mixtral", 2, {"expert": 2}, [], marks=pytest.mark.broad),
        pytest.param("olmoe", 2, {"expert": 2}, [], marks=pytest.mark.broad),
        ("qwen2_moe", 2, {"expert": 2}, ["model.activation_checkpointing=true"]),
        pytest.param("qwen2_moe", 4, {"expert": 2, "tensor": 2}, [], marks=pytest.mark.broad),
        ("qwen3_moe", 2, {"expert": 2}, ["model.lora={rank:4,targets:[q_proj,o_proj]}"]),
        ("gpt_oss", 2, {"expert": 2}, []),
    ],
    ids=str,
)
async def test_A3_ranks_that_divide_matrices_or_experts_train_as_one_rank(
    family, ranks, by, overrides, tmp_path_factory
):
    path = tiny(family, tmp_path_factory.getbasetemp())
    same = [one for one in overrides if one.startswith(("actor.load_balance", "model.lora"))]
    case = " ".join([family, *same])
    if case not in EXPECTED:
        EXPECTED[case] = await trained(path, 0, *same)
    expected, (steps, weights) = EXPECTED[case], await trained(path, ranks, *divided(ranks, by, *overrides))
    for got, wanted in zip(steps, expected[0], strict=True):
        for name, value in wanted.items():
            assert name in OVERHEAD_METRICS or got[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for name, tensor in expected[1].items():
        assert (weights[name] - tensor).abs().max() < 1e-4, name


def elements(host) -> dict[str, tuple[int, int]]:
    """Return, for each parameter of the newest actor, the number of elements on this rank and on all ranks together."""
    actor = [role for name, role in host.roles.items() if name.startswith("actor")][-1]
    return {name: (one.to_local().numel(), one.numel()) for name, one in actor.model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "by", "name", "share"),
    [
        ("qwen3", {"tensor": 2}, "model.layers.0.self_attn.q_proj.weight", 4),
        ("qwen3", {"tensor": 2}, "model.layers.1.mlp.down_proj.weight", 4),
        ("qwen3", {"tensor": 2}, "model.layers.0.self_attn.q_norm.weight", 2),
        ("qwen3_moe", {"expert": 4}, "model.layers.0.mlp.experts.gate_up_proj", 4),
        ("qwen3_moe", {"expert": 2, "tensor": 2}, "model.layers.0.mlp.experts.down_proj", 2),
        ("qwen3_moe", {"expert": 2, "tensor": 2}, "model.layers.0.self_attn.o_proj.weight", 4),
    ],
)
async def test_each_of_four_ranks_stores_only_its_share(family, by, name, share, tmp_path_factory):
    config = config_of(*COMMON, *divided(4, by))
    actor = (await group(config, tiny(family, tmp_path_factory.getbasetemp()), 4, roles=("actor",)))["actor"]
    for found in await on([rank.process for rank in actor.ranks], elements):
        own, whole = found[name]
        assert own == whole / share


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        pytest.param("qwen3", (2, {"tensor": 2}), (0, {}), marks=pytest.mark.broad),
        ("qwen3", (2, {}), (4, {"tensor": 2})),
        ("qwen3", (4, {"tensor": 2, "shard": 2}), (2, {"context": 2})),
        pytest.param("qwen3_moe", (2, {"expert": 2}), (4, {"tensor": 2, "expert": 2}), marks=pytest.mark.broad),
        pytest.param("qwen3", (4, {"tensor": 2}), (2, {}), marks=pytest.mark.broad),
        ("qwen3_moe", (4, {"expert": 2}), (2, {"expert": 2})),
        pytest.param("qwen3_moe", (4, {"expert": 4}), (0, {}), marks=pytest.mark.broad),
        ("qwen3_moe", (0, {}), (4, {"expert": 2})),
    ],
    ids=str,
)
async def test_F4_a_checkpoint_of_one_layout_is_continued_with_another(
    family, before, after, tmp_path, tmp_path_factory
):
    path = tiny(family, tmp_path_factory.getbasetemp())

    async def made(ranks, by):
        config = config_of(*COMMON, *divided(ranks, by))
        return config, (await group(config, path, ranks, roles=("actor",)))["actor"]

    config, undisturbed = await made(0, {})
    expected = await learn(undisturbed, range(2), config)
    config, first = await made(*before)
    weights = await learn(first, range(1), config)
    await save(first, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    config, other = await made(*after)
    await other.call(ActorWorker.load_state, str(tmp_path))
    found = await learn(other, range(1, 2), config)
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-5, name


@pytest.mark.parametrize(
    ("family", "ranks", "by"),
    [
        ("qwen3", 2, {"tensor": 2}),
        ("qwen3", 4, {"tensor": 2, "shard": 2}),
        ("qwen3_moe", 4, {"expert": 2}),
        ("qwen3_moe", 4, {"expert": 2, "tensor": 2}),
        ("gpt_oss", 2, {"expert": 2}),
    ],
    ids=str,
)
async def test_E5_a_sync_sends_each_byte_of_the_model_once(family, ranks, by, tmp_path_factory):
    path = tiny(family, tmp_path_factory.getbasetemp())
    actor = (await group(config_of(*COMMON, *divided(ranks, by)), path, ranks, roles=("actor",)))["actor"]
    weights = await weights_of(actor)
    offers = await actor.call(ActorWorker.start_export, None, 1, True)
    sent, size = {}, 0
    for number in range(len(offers[0].takes_part)):
        taking = [rank for rank, offer in zip(actor.ranks, offers, strict=True) if offer.takes_part[number]]
        parts = await results([rank.start(ActorWorker.export, number, None) for rank in taking])
        size += sum(piece.size for part in parts for piece in part.pieces)
        bucket = join(parts)
        assert bucket.data is not None
        sent |= {name: tensor.clone() for name, tensor in tensors_of(bucket, bucket.data)}
    await actor.call(ActorWorker.end_export)
    assert sent.keys() == weights.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in weights.items())
    assert size == sum(tensor.nbytes for tensor in weights.values())
