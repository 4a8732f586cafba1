"""Tests of the supervised loss in the actor's update, in one process, against a full forward pass in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.row_assignment import minibatches
from rltrain.data.prompts import Prompt
from rltrain.trajectories.batch_building import supervised_batch
from tests.unit.workers.training.test_actor import ALL, Run, apart
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.policy_update import update_policy

pytestmark = pytest.mark.usefixtures("process_group")
COEF = "algorithm.sft_coef=0.7"
PROMPTS = {0: [50, 51, 61], 1: [52, 61], 2: [53, 54, 55, 56, 61]}
ANSWERS = {0: [35, 49, 3], 1: [48, 49, 50, 51, 52, 35, 49, 3], 2: [3]}


def answers_of(*uids: int) -> DataProto:
    """Return the batch of the supervised answers to the prompts of the given groups."""
    prompts = {uid: Prompt(uid, "", PROMPTS[uid], {}, None, ANSWERS.get(uid)) for uid in uids}
    return supervised_batch(prompts)


def recorded(run: Run) -> list[dict[str, torch.Tensor]]:
    """Record the gradient before each optimizer step of an actor."""
    gradients, step = [], run.worker.optimizer.step

    def recording(**flags):
        gradients.append({name: p.grad.detach().clone() for name, p in run.worker.model.named_parameters()})
        return step(**flags)

    run.worker.optimizer.step = recording
    return gradients


async def updated(run: Run, batch: DataProto, supervised: DataProto, *, plan=ALL, budget=8192, entropy_coef=0.0):
    return await update_policy(
        run.actor, batch, plan, run.config, max_tokens=budget, entropy_coef=entropy_coef, supervised=supervised
    )


def grouped(batch: DataProto) -> DataProto:
    """Return a batch of 12 rows with three prompt groups of four rows each."""
    return batch.pop(["uid"])[1].union(of_groups()) if "uid" in batch else batch.union(of_groups())


def of_groups() -> DataProto:
    return DataProto.from_dict({"uid": torch.arange(12) // 4})


def reference(model, rows, temperature):
    """Return the mean cross-entropy of answers, from the full logits of one row at a time, and its number of tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, answer in rows:
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].double() / temperature
        for place, token in enumerate(answer, start=len(prompt)):
            scores = logits[place - 1]
            total = total + scores.exp().sum().log() - scores[token]
            count += 1
    return total / count, count


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_gradient_is_that_of_the_mean_cross_entropy_of_the_full_model_in_float64(
    start, sampled_batch, temperature
):
    """With advantages of 0, only the supervised loss remains. Its targets are the answer tokens, not prompt tokens."""
    run = Run(start, COEF, f"rollout.temperature={temperature}")
    run.worker.model.double()
    plain = AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager").double()
    rows = [(PROMPTS[uid], ANSWERS[uid]) for uid in (0, 1, 2)]
    wanted, count = reference(plain, rows, temperature)
    (0.7 * wanted).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    nothing = sampled_batch.with_values("responses", advantages=0 * sampled_batch.values("advantages"))
    gradients = recorded(run)
    metrics = await updated(run, grouped(nothing), answers_of(0, 1, 2))
    assert count == metrics["sft_tokens"] == 12
    assert metrics["sft_loss"] == pytest.approx(wanted.item(), rel=1e-6)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 1e-3
    # norms compute in float32 even in a float64 model
    assert apart(gradients[0], expected) <= 3e-6 * largest


async def test_the_gradient_is_added_to_that_of_the_policy_loss(start, sampled_batch):
    found = {}
    zero = sampled_batch.with_values("responses", advantages=0 * sampled_batch.values("advantages"))
    for name, batch, answers in (
        ("policy", sampled_batch, answers_of()),
        ("supervised", zero, answers_of(0, 1)),
        ("both", sampled_batch, answers_of(0, 1)),
    ):
        run = Run(start, COEF)
        gradients = recorded(run)
        metrics = await updated(run, grouped(batch), answers)
        found[name] = gradients[0], metrics
    total = {name: found["policy"][0][name] + found["supervised"][0][name] for name in found["policy"][0]}
    largest = max(float(tensor.abs().max()) for tensor in total.values())
    assert apart(found["both"][0], total) <= 1e-5 * largest
    assert found["both"][1]["policy_loss"] == pytest.approx(found["policy"][1]["policy_loss"], rel=1e-5)
    for name in ("ratio_mean", "clip_fraction", "engine_gap"):  # the supervised tokens are in no metric of the policy
        assert found["both"][1][name] == found["policy"][1][name]
    assert "sft_loss" not in found["policy"][1]
    assert found["policy"][1]["sft_tokens"] == 0


async def test_D5_the_coefficient_multiplies_the_gradient(start, sampled_batch):
    zero = grouped(sampled_batch.with_values("responses", advantages=0 * sampled_batch.values("advantages")))
    norms = []
    for coef in (0.1, 0.3):
        run = Run(start, f"algorithm.sft_coef={coef}")
        norms.append((await updated(run, zero, answers_of(0, 1, 2)))["grad_norm"])
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-4)


@pytest.mark.parametrize("budget", [18, 24])
async def test_A1_any_split_into_micro_batches_gives_the_gradient_of_the_whole_mini_batch(start, sampled_batch, budget):
    found = []
    for tokens in (8192, budget):
        run = Run(start, COEF)
        gradients = recorded(run)
        metrics = await updated(run, grouped(sampled_batch), answers_of(0, 1, 2), budget=tokens)
        found.append((gradients[0], metrics))
    largest = max(float(tensor.abs().max()) for tensor in found[0][0].values())
    assert apart(found[1][0], found[0][0]) <= 1e-5 * largest
    for name, value in found[0][1].items():
        assert name in OVERHEAD_METRICS or found[1][1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


async def test_each_mini_batch_trains_on_the_answers_of_its_own_groups_and_each_epoch_again(start, sampled_batch):
    """Mini-batches of groups 0, 1 and 2 have 3, 0 and 1 supervised tokens, because group 1 has no answer."""
    batch, zero = grouped(sampled_batch), 0 * sampled_batch.values("advantages")
    batch = batch.with_values("responses", advantages=zero)
    plan = minibatches(batch.batch["uid"].tolist(), 3, 2, seed=0, step=0)
    run = Run(start, COEF, "actor.lr=1e-12", "trainer.prompts_per_minibatch=1", "trainer.epochs_per_step=2")
    gradients = recorded(run)
    metrics = await updated(run, batch, answers_of(0, 2), plan=plan)
    assert metrics["sft_tokens"] == 2 * (3 + 1)
    alone = {}
    for uid in (0, 2):
        single = Run(start, COEF)
        recording = recorded(single)
        await updated(single, batch, answers_of(uid))
        alone[uid] = recording[0]
    order = [batch.batch["uid"].tolist()[rows[0]] for rows in plan]
    assert sorted(order) == [0, 0, 1, 1, 2, 2]
    for uid, gradient in zip(order, gradients, strict=True):
        if uid == 1:
            assert all((tensor == 0).all() for tensor in gradient.values())
        else:
            assert apart(gradient, alone[uid]) <= 1e-4 * max(float(t.abs().max()) for t in alone[uid].values())


async def test_A6_answers_train_where_no_sampled_token_does_and_nothing_moves_without_both(start, sampled_batch):
    none = grouped(sampled_batch)
    none = none.with_values("responses", response_mask=torch.zeros_like(none.values("response_mask")))
    for answers, moves in ((answers_of(1), True), (answers_of(), False)):
        run = Run(start, COEF)
        before = await run.weights()
        metrics = await updated(run, none, answers)
        assert (apart(before, await run.weights()) > 0) is moves
        assert (metrics["grad_norm"] > 0) is moves
        assert metrics["policy_loss"] == 0


async def test_the_loss_of_an_answer_falls_with_each_update(start, sampled_batch):
    zero = grouped(sampled_batch.with_values("responses", advantages=0 * sampled_batch.values("advantages")))
    run = Run(start, COEF, "actor.lr=1e-3")
    losses = [(await updated(run, zero, answers_of(0, 1)))["sft_loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


async def test_an_update_whose_supervised_loss_is_not_finite_is_skipped_and_in_no_metric(start, sampled_batch):
    run = Run(start, COEF, "trainer.max_skipped_updates=3")
    before = await run.weights()
    real = run.worker._supervised_gradient

    def broken(supervised, minibatch, result):
        real(supervised, minibatch, result)
        result.supervised_loss = float("nan")

    run.worker._supervised_gradient = broken
    metrics = await updated(run, grouped(sampled_batch), answers_of(0))
    assert metrics["skipped_updates"] == 1
    assert metrics["sft_tokens"] == 0
    assert "sft_loss" not in metrics
    assert apart(before, await run.weights()) == 0


async def test_with_adapters_only_the_adapters_learn_from_the_answers(start, sampled_batch):
    zero = grouped(sampled_batch.with_values("responses", advantages=0 * sampled_batch.values("advantages")))
    run = Run(start, COEF, "model.lora={rank:4}", "actor.lr=1e-2")
    frozen = {n: p.detach().clone() for n, p in run.worker.model.named_parameters() if not p.requires_grad}
    losses = [(await updated(run, zero, answers_of(0, 1)))["sft_loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    after = dict(run.worker.model.named_parameters())
    assert all(torch.equal(tensor, after[name]) for name, tensor in frozen.items())


def test_a_batch_of_answers_has_one_row_for_each_prompt_with_an_answer():
    batch = supervised_batch(
        {7: Prompt(0, "", [5, 6], {}, None, [8, 3]), 2: Prompt(1, "", [5], {}), 4: Prompt(2, "", [9], {}, None, [3])}
    )
    assert batch.batch["uid"].tolist() == [7, 4]
    assert [row.tolist() for row in batch.batch["prompts"].unbind()] == [[5, 6], [9]]
    assert [row.tolist() for row in batch.batch["responses"].unbind()] == [[8, 3], [3]]
    assert batch.values("response_mask").tolist() == [True] * 3
    assert torch.equal(supervised_batch({}).batch["prompts"].values(), jagged([], torch.int64).values())
