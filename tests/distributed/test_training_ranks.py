"""Tests that sharded training over gloo ranks gives the same result for any number of ranks and any token budget."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from ranks import LOG_PROBS, LORA, STEPS, config_of, group, prepared, replayed, updated, with_log_probs

from rltrain.batch.row_assignment import minibatches
from rltrain.settings.schema import Config
from tests.policy_weights import weights_of
from workers.training.actor import ActorWorker
from workers.training.critic import CriticWorker
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.shared_columns import CRITIC_UPDATE, FORWARD

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]


async def train(config: Config, start: str, ranks: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train `STEPS` steps, and return the metrics of every step and the final weights."""
    workers, history = await group(config, start, ranks), []
    budget = config.actor.max_tokens_per_microbatch
    for step in range(STEPS):
        batch = await with_log_probs(workers, replayed(step), max_tokens=budget)
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        history.append(await updated(workers["actor"], batch, plan, max_tokens=budget))
    return history, await weights_of(workers["actor"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_rank(ray_here, start):
    return await train(config_of(), start, 0)


@pytest.mark.parametrize(("ranks", "budget"), [(2, 8192), (4, 8192), (2, 40), (0, 40)])
async def test_A2_F2_any_number_of_ranks_and_any_budget_gives_the_same_metrics_and_weights(
    one_rank, start, ranks, budget
):
    """Ten training steps on given rollouts have the same metrics and weights as the same steps on one rank.

    The metrics include losses, KL, entropy, clip fractions and the norm of the full gradient.
    """
    same(await train(config_of(f"actor.max_tokens_per_microbatch={budget}"), start, ranks), one_rank)


@pytest.mark.parametrize(
    ("ranks", "shared_by", "budget"),
    [
        (2, {"sequence": 2}, 8192),
        (4, {"sequence": 2}, 20),
        pytest.param(4, {"sequence": 4}, 8192, marks=pytest.mark.broad),
        (2, {"context": 2}, 8192),
        pytest.param(4, {"context": 2}, 20, marks=pytest.mark.broad),
        pytest.param(4, {"context": 4}, 20, marks=pytest.mark.broad),
        (4, {"context": 2, "sequence": 2}, 8192),
        (2, {"tensor": 2}, 8192),
        pytest.param(4, {"tensor": 2}, 40, marks=pytest.mark.broad),
        pytest.param(4, {"tensor": 2, "sequence": 2}, 20, marks=pytest.mark.broad),
        (4, {"tensor": 2, "context": 2}, 20),
        (4, {"tensor": 2, "shard": 2}, 40),
    ],
    ids=str,
)
async def test_A3_ranks_that_share_a_pack_or_the_matrices_of_layers_give_the_same(
    one_rank, start, ranks, shared_by, budget
):
    """The model has 4 query heads over 2 key-value heads, so 4 sequence-parallel ranks copy key-value heads."""
    shares = [f"placement.{name}_ranks={count}" for name, count in shared_by.items()]
    config = config_of(f"placement.actor_ranks={ranks}", *shares, f"actor.max_tokens_per_microbatch={budget}")
    same(await train(config, start, ranks), one_rank)


@pytest.mark.parametrize(
    ("ranks", "override"),
    [(4, "placement.shard_ranks=2"), (2, "placement.shard_ranks=1"), (0, "model.activation_checkpointing=true"),
     (2, "model.activation_checkpointing=true"), (2, "actor.offload_optimizer=true")],
)  # fmt: skip
async def test_copies_of_the_model_activations_computed_again_and_moments_in_cpu_memory_change_nothing(
    one_rank, start, ranks, override
):
    same(await train(config_of(f"placement.actor_ranks={ranks or 1}", override), start, ranks), one_rank)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_rank_with_adapters(ray_here, start):
    return await train(config_of(LORA), start, 0)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(2, []), (2, ["placement.sequence_ranks=2"]), (4, ["placement.shard_ranks=2"]),
     (2, ["model.activation_checkpointing=true", "actor.max_tokens_per_microbatch=40"])],
)  # fmt: skip
async def test_A2_A3_F2_adapters_learn_the_same_on_any_number_of_ranks(one_rank_with_adapters, start, ranks, overrides):
    config = config_of(LORA, f"placement.actor_ranks={ranks}", *overrides)
    same(await train(config, start, ranks), one_rank_with_adapters)
    assert any(step["grad_norm"] > 0 for step in one_rank_with_adapters[0])


def same(found, expected) -> None:
    """Check that the metrics of each step and the final weights are equal, except for `OVERHEAD_METRICS`."""
    for got, wanted in zip(found[0], expected[0], strict=True):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert name in OVERHEAD_METRICS or got[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, tensor in expected[1].items():
        assert (found[1][name] - tensor).abs().max() < 1e-4, name


def test_the_metrics_of_an_update_are_alive(one_rank):
    for name in ("policy_loss", "kl_loss", "ref_kl", "entropy", "grad_norm", "clip_fraction", "ppo_kl", "lr"):
        assert any(step[name] != 0 for step in one_rank[0]), name
    assert one_rank[0][0]["ref_kl"] == pytest.approx(0, abs=1e-6) or one_rank[0][0]["ref_kl"] > 0


def test_F3_the_schedule_ends_at_exactly_the_last_optimizer_step(one_rank):
    config = config_of()
    rates = [step["lr"] for step in one_rank[0]]
    total = config.optimizer_steps
    assert total == STEPS * 2
    # Linear decay to 0: optimizer step n has rate lr * (1 - n / total). A training step of two optimizer steps reports
    # the mean of their rates.
    expected = [config.actor.lr * (1 - (2 * step + 0.5) / total) for step in range(STEPS)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_F1_small_steps_accumulate_in_float32_as_a_float64_reference_says(start, process_group, sharded):
    """A hundred AdamW steps at learning rate 1e-6 in float32 change the weights as much as steps in float64 do."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from workers.models.fsdp import Optimizer, full, shard
    from workers.models.loading import load_model

    config = dataclasses.replace(config_of().actor, lr=1e-6, lr_schedule="constant", max_grad_norm=1e9)
    model = shard(load_model(AutoModelForCausalLM, start), config_of())
    model = fully_shard(model) if sharded else model
    parameters = list(model.parameters())
    optimizer = Optimizer(parameters, config, total_steps=100, max_skipped=0)
    weights = [full(p.detach()).double().clone() for p in parameters]
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    origin = [w.clone() for w in weights]
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 101):
        for number, parameter in enumerate(parameters):
            gradient = torch.randn(weights[number].shape, generator=generator) * 0.1 + 0.05
            parameter.grad = gradient
            if sharded:
                parameter.grad = torch.distributed.tensor.distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements
                )
            first[number].mul_(0.9).add_(gradient.double(), alpha=0.1)
            second[number].mul_(0.999).addcmul_(gradient.double(), gradient.double(), value=0.001)
            mean, square = first[number] / (1 - 0.9**step), second[number] / (1 - 0.999**step)
            weights[number] -= 1e-6 * mean / (square.sqrt() + 1e-8)
        optimizer.step()
    for parameter, expected, before in zip(parameters, weights, origin, strict=True):
        moved = full(parameter.detach()).double() - before
        # A float32 weight near 1 is rounded by up to 6e-8 in each step; steps of 1e-6 would not change a bfloat16
        # weight at all.
        assert (moved - (expected - before)).abs().max() < 0.02 * (expected - before).abs().max()


async def test_D7_the_reference_never_changes_and_step_0_has_kl_zero(one_rank, start):
    config = config_of()
    workers = await group(config, start, 0)
    batch = replayed(0)
    before = await workers["reference"].rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=8192)
    old = await workers["actor"].rows(LOG_PROBS["actor"], batch, FORWARD, max_tokens=8192)
    assert torch.equal(before.values("ref_log_probs"), old.values("old_log_probs"))
    whole = batch.union(old).union(before)
    plan = minibatches(whole.batch["uid"].tolist(), 2, 1, seed=0, step=0)
    await updated(workers["actor"], whole, plan)
    after = await workers["reference"].rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=8192)
    assert torch.equal(before.values("ref_log_probs"), after.values("ref_log_probs"))
    moved = await workers["actor"].rows(LOG_PROBS["actor"], batch, FORWARD, max_tokens=8192)
    assert not torch.equal(moved.values("old_log_probs"), old.values("old_log_probs"))


async def test_D1_old_log_probs_of_other_weights_are_caught_before_the_first_step(start):
    from rltrain.base.errors import LogProbError

    workers = await group(config_of(), start, 0)
    batch = await prepared(workers)
    wrong = batch.with_values("responses", old_log_probs=batch.values("old_log_probs") + 0.01)
    with pytest.raises(LogProbError, match=r"differ from the old log-probs by 0\.01 nats"):
        await updated(workers["actor"], wrong, [list(range(24))])


async def test_the_critic_regresses_to_returns_alike_on_one_and_two_ranks(start):
    histories = []
    for ranks, *divided in ((0,), (2,), (2, "tensor"), (2, "context")):
        sizes = [f"placement.{name}_ranks={ranks}" for name in ("actor", *divided) if ranks]
        config = config_of("algorithm=ppo", *sizes)
        critic = (await group(config, start, ranks, roles=("critic",)))["critic"]
        history = []
        for step in range(4):
            batch = replayed(step)
            values = await critic.rows(CriticWorker.compute_values, batch, FORWARD, max_tokens=8192)
            if step == 0:
                assert float(values.values("values").abs().max()) == 0.0
            batch = batch.union(values)
            batch = batch.with_values("responses", returns=torch.ones(len(values.values("values"))))
            history.append(await critic.update(CriticWorker.update, batch, CRITIC_UPDATE, [list(range(24))] * 2, 60))
        histories.append(history)
    losses = [step["value_loss"] for step in histories[0]]
    assert losses == sorted(losses, reverse=True)
    for other in histories[1:]:
        for here, there in zip(histories[0], other, strict=True):
            for name, value in here.items():
                assert name in OVERHEAD_METRICS or there[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


async def test_A6_a_mini_batch_in_which_nothing_is_trained_leaves_the_weights_alone_and_the_schedule_goes_on(start):
    workers = await group(config_of(), start, 0)
    rows = [list(range(24))]
    first = await updated(workers["actor"], await prepared(workers), rows)
    before = await weights_of(workers["actor"])
    batch = await prepared(workers, 1)
    empty = batch.with_values("responses", response_mask=torch.zeros_like(batch.values("response_mask")))
    second = await updated(workers["actor"], empty, rows)
    assert second["grad_norm"] == 0
    assert second["lr"] < first["lr"]
    for name, tensor in (await weights_of(workers["actor"])).items():
        assert torch.equal(tensor, before[name]), name


async def test_D1_dropout_in_a_models_config_is_off_and_odd_generation_defaults_are_kept_as_they_are(start, tmp_path):
    for file in Path(start).iterdir():
        shutil.copy(file, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.5}))
    odd = json.dumps({"temperature": 0.6, "top_p": 0.9, "do_sample": False, "eos_token_id": 3})
    (tmp_path / "generation_config.json").write_text(odd)
    workers = await group(config_of(), str(tmp_path), 0)
    metrics = await updated(workers["actor"], await prepared(workers), [list(range(24))])
    assert metrics["same_policy_gap"] < 1e-6
    await workers["actor"].call(ActorWorker.save_state, str(tmp_path / "saved"))
    while await workers["actor"].call(ActorWorker.saved_state) == [None]:
        await asyncio.sleep(0.01)
    assert (tmp_path / "saved" / "model" / "generation_config.json").read_text() == odd
    assert (tmp_path / "saved" / "model" / "model.safetensors").is_file()
