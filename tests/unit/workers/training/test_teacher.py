"""Tests that teachers and the distillation term of the actor agree with all logits of transformers, in one process."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.batch.data_proto import DataProto
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import VOCAB_SIZE
from tests.made_teachers import logits_of, make_teacher, reverse_kl
from tests.policy_weights import weights_of
from workers.cluster.processes import LocalProcess, Role
from workers.cluster.worker_process import Host
from workers.placement import Training, group_of
from workers.training.actor import ActorWorker
from workers.training.policy_update import update_policy
from workers.training.shared_columns import FORWARD, SharedColumns, log_probs_columns
from workers.training.teacher import TeacherWorker

pytestmark = pytest.mark.usefixtures("process_group")
ALL = [list(range(12))]
SIZES = ["actor.lr_schedule=constant", "trainer.prompts_per_step=3", "trainer.prompts_per_minibatch=3"]
ALONE = "algorithm.distillation.outcome_coef=0"
NUMBERS = [0, 1, -1, 0, 0, 1, 1, 0, -1, 1, 0, 1]  # teacher of each row of the batch
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Return the directories of two teachers of different widths, one with a larger vocabulary than the policy."""
    folder = tmp_path_factory.mktemp("teachers")
    return [
        make_teacher(folder / "wide", width=96, seed=1),
        make_teacher(folder / "narrow", width=32, seed=2, words=VOCAB_SIZE + 8),
    ]


class Run:
    """A newly started actor with two teachers, as the placement starts them in one process."""

    def __init__(self, path, teachers, *overrides):
        names = f"algorithm.distillation.teachers=[{','.join(teachers)}]"
        column = "algorithm.distillation.teacher_column=domain"
        words = ["placement=inprocess", "rollout=hf", f"rollout.temperature={TEMPERATURE}", names, column]
        self.config = compose([*SIZES, "algorithm=distill", *words, *overrides])[0]
        process = LocalProcess(Host({}, verbose=True))
        roles = self.config.roles(needs_critic=False)
        paths = dict(zip(roles, [path, *teachers], strict=True))
        self.training = Training(self.config, paths, dict.fromkeys(roles, lambda _: process))
        self.actor = self.training.groups["actor"]
        self.worker_of = process.host.roles

    async def prepared(self, batch: DataProto, numbers=NUMBERS) -> DataProto:
        """Build the roles, and add the columns of the teachers and the actor to the batch."""
        from rltrain.trajectories.teachers import merged

        await self.training.build()
        found = []
        for number, teacher in enumerate(self.config.algorithm.distillation.teachers):
            rows = [row for row, own in enumerate(numbers) if own == number]
            group = self.training.groups[teacher.role]
            if rows:
                found.append(
                    (rows, await group.rows(TeacherWorker.score_responses, batch, FORWARD, max_tokens=64, only=rows))
                )
        batch = batch.with_values("responses", **merged(batch, found))
        batch = batch.union(DataProto.from_dict({"teacher": torch.tensor(numbers)}))
        columns = log_probs_columns(self.config.algorithm)
        return batch.union(await self.actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=8192))

    async def update(self, batch: DataProto, plan=ALL, budget=8192):
        return await update_policy(self.actor, batch, plan, self.config, max_tokens=budget, entropy_coef=0.0)


def models_of(*paths):
    """Return the models of transformers in float64."""
    return [AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double().eval() for path in paths]


def terms(start, teachers, batch, numbers=NUMBERS):
    """Compute, in float64 and from all logits, the KL and the log-probs of each row of the batch.

    Returns:
        The policy, and for each row the exact KL, the policy's log-probs and the teacher's log-probs, or None without a
        teacher.
    """
    policy, *models = models_of(start, *teachers)
    rows = []
    for row, number in enumerate(numbers):
        tokens = batch[row].values("responses")[:, None]
        if number < 0 or not len(tokens):
            rows.append(None)
            continue
        own, theirs = (logits_of(one, batch, row, TEMPERATURE) for one in (policy, models[number]))
        # Log-probs of sampled tokens are taken over the teacher's vocabulary, and the exact KL over the policy's.
        whole = logits_of(models[number], batch, row, TEMPERATURE, words=None).detach()
        chosen = [one.log_softmax(-1).gather(1, tokens)[:, 0] for one in (own, whole)]
        rows.append((reverse_kl(own, theirs), *chosen))
    return policy, rows


def norm_of(policy, loss):
    loss.backward()
    return float(torch.stack([p.grad.square().sum() for p in policy.parameters() if p.grad is not None]).sum().sqrt())


async def test_a_teachers_log_probs_are_those_of_all_logits(start, teachers, sampled_batch):
    run = Run(start, teachers)
    batch = await run.prepared(sampled_batch)
    _, rows = terms(start, teachers, sampled_batch)
    found = batch.padded("teacher_log_probs")
    for row, expected in enumerate(rows):
        if expected is not None:
            values = found[row, : len(expected[2])]
            assert values.tolist() == pytest.approx(expected[2].tolist(), abs=1e-4)
    assert batch.values("teacher_hidden").shape == (len(batch.values("responses")), 96)
    assert not batch.values("teacher_hidden").requires_grad


@pytest.mark.parametrize("budget", [8192, 24])
async def test_A1_the_exact_kl_to_two_teachers_is_that_of_all_logits_in_value_and_gradient(
    start, teachers, sampled_batch, budget
):
    run = Run(start, teachers)
    metrics = await run.update(await run.prepared(sampled_batch), budget=budget)
    policy, rows = terms(start, teachers, sampled_batch)
    kls = [row[0] for row in rows if row is not None]
    sequences = int((sampled_batch.lengths("responses") > 0).sum())
    loss = sum(kl.mean() for kl in kls) / sequences
    assert metrics["distillation_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["teacher_kl"] == pytest.approx(float(torch.cat(kls).detach().mean()), rel=1e-4)
    # The batch's advantages are not 0, so the policy term is a part of the gradient.
    mask, tokens = sampled_batch.padded("response_mask"), sampled_batch.padded("responses")
    for row in range(12):
        length = int(mask[row].sum())
        if length:
            own = logits_of(policy, sampled_batch, row, TEMPERATURE).log_softmax(-1)
            log_probs = own.gather(1, tokens[row, :length, None])[:, 0]
            loss = loss - (sampled_batch.padded("advantages")[row, :length] * log_probs).mean() / sequences
    assert metrics["grad_norm"] == pytest.approx(norm_of(policy, loss), rel=1e-4)


async def test_A1_each_row_gets_the_head_of_its_teacher_where_the_reference_teaches_beside_a_model(
    start, teachers, sampled_batch
):
    entries = f"[{teachers[1]},{{path: reference, prompt_template: '{{prompt}}'}}]"
    run = Run(start, [start, teachers[1]], f"algorithm.distillation.teachers={entries}")
    assert list(run.training.groups) == ["actor", "reference", "teacher narrow"]
    batch = await run.prepared(sampled_batch)
    batch = batch.pop(["old_log_probs"])[1]
    for _ in range(2):
        await run.update(batch)  # moves the policy away from the reference
    weights = await weights_of(run.actor)
    policy, narrow, reference = models_of(start, teachers[1], start)
    policy.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    kls = []
    for row, number in enumerate(NUMBERS):
        if number >= 0 and int(sampled_batch.lengths("responses")[row]):
            logits = [logits_of(one, sampled_batch, row, TEMPERATURE) for one in (policy, (narrow, reference)[number])]
            kls.append((number, reverse_kl(*logits).detach()))
    found = (await run.update(batch))["teacher_kl"]
    assert found == pytest.approx(float(torch.cat([kl for _, kl in kls]).mean()), rel=1e-3)
    assert min(float(kl.mean()) for number, kl in kls if number == 1) > 1e-6  # the KL to the reference


async def test_the_sampled_loss_has_the_gradient_of_the_formula(start, teachers, sampled_batch):
    run = Run(start, teachers, "algorithm.distillation.kl=sampled", "algorithm.distillation.coef=0.5", ALONE)
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    batch = await run.prepared(sampled_batch.with_values("responses", advantages=nothing))
    assert "teacher_hidden" not in batch
    metrics = await run.update(batch)
    policy, rows = terms(start, teachers, sampled_batch)
    sequences = int((sampled_batch.lengths("responses") > 0).sum())
    gaps = [row[1].detach() - row[2] for row in rows if row is not None]
    chosen = [row[1] for row in rows if row is not None]
    assert metrics["teacher_kl"] == pytest.approx(float(torch.cat(gaps).detach().mean()), rel=1e-4)
    loss = 0.5 * sum((gap * own).mean() for gap, own in zip(gaps, chosen, strict=True)) / sequences
    assert metrics["grad_norm"] == pytest.approx(norm_of(policy, loss), rel=1e-4)


@pytest.mark.parametrize("kl", ["full", "sampled"])
async def test_A4_rows_without_a_teacher_have_no_term_and_still_count(start, teachers, sampled_batch, kl):
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    batch = sampled_batch.with_values("responses", advantages=nothing)
    found = []
    for numbers in ([0] * 12, [0] * 6 + [-1] * 6, [-1] * 12):
        run = Run(start, teachers, f"algorithm.distillation.kl={kl}", ALONE)
        prepared = batch.with_values("responses", teacher_log_probs=torch.full_like(nothing, torch.nan))
        if numbers != [-1] * 12:
            prepared = await run.prepared(batch, numbers)
        else:
            await run.training.build()
            hidden = torch.full((len(nothing), 96), torch.nan)
            prepared = prepared.with_values("responses", teacher_hidden=hidden, old_log_probs=nothing - 1)
            prepared = prepared.union(DataProto.from_dict({"teacher": torch.tensor(numbers)}))
            prepared = prepared.pop(["old_log_probs"])[1]
        found.append(await run.update(prepared))
    every, half, none = found
    lengths = sampled_batch.lengths("responses")
    assert 0 < half["distillation_loss"] < every["distillation_loss"] or kl == "sampled"
    assert (none["distillation_loss"], none["grad_norm"]) == (0, 0)
    assert "teacher_kl" not in none
    assert half["teacher_kl"] != pytest.approx(every["teacher_kl"], rel=1e-3)
    _, rows = terms(start, teachers, sampled_batch, [0] * 6 + [-1] * 6)
    means = [(row[0] if kl == "full" else row[1] - row[2]).mean() for row in rows if row is not None]
    assert half["distillation_loss"] == pytest.approx(float(sum(means).detach()) / int((lengths > 0).sum()), rel=1e-4)


async def test_D4_D5_the_exact_loss_alone_lowers_the_kl_to_the_teachers(start, teachers, sampled_batch):
    run = Run(start, teachers, "actor.lr=1e-3", ALONE)
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    batch = await run.prepared(sampled_batch.with_values("responses", advantages=nothing))
    batch = batch.pop(["old_log_probs"])[1]
    kls = [(await run.update(batch))["teacher_kl"] for _ in range(5)]
    assert kls == sorted(kls, reverse=True)
    assert kls[-1] < 0.95 * kls[0]


async def test_D7_a_policy_that_is_its_own_teacher_has_no_loss_and_no_gradient(start, sampled_batch):
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    for kl in ("full", "sampled"):
        run = Run(start, [start], f"algorithm.distillation.kl={kl}", ALONE)
        metrics = await run.update(
            await run.prepared(sampled_batch.with_values("responses", advantages=nothing), [0] * 12)
        )
        assert metrics["teacher_kl"] == pytest.approx(0, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(0, abs=1e-4)


async def test_teachers_never_change_and_keep_no_more_than_their_dtype(start, teachers, sampled_batch):
    run = Run(start, teachers, "model.dtype=bfloat16")
    batch = await run.prepared(sampled_batch)
    model = run.worker_of["teacher wide"].model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    await run.update(batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    heads = run.worker_of["actor"].teacher_heads
    assert {name: (tuple(head.shape), head.dtype) for name, head in heads.items()} == {
        "wide": ((VOCAB_SIZE, 96), torch.bfloat16),
        "narrow": ((VOCAB_SIZE, 32), torch.bfloat16),
    }


async def test_restarted_ranks_have_the_heads_again(start, teachers, sampled_batch):
    run = Run(start, teachers)
    await run.training.build()
    first = {name: head.clone() for name, head in run.worker_of["actor"].teacher_heads.items()}
    await run.training.build()
    again = run.worker_of["actor"].teacher_heads
    assert list(again) == ["wide", "narrow"]
    assert all(torch.equal(head, again[name]) for name, head in first.items())
    assert await weights_of(run.actor)


async def test_only_the_asked_rows_are_computed_and_come_back_in_order(start, teachers, sampled_batch):
    run = Run(start, teachers)
    await run.training.build()
    group = run.training.groups["teacher wide"]
    whole = await group.rows(TeacherWorker.score_responses, sampled_batch, FORWARD, max_tokens=30)
    rows = [1, 4, 5, 11]
    some = await group.rows(TeacherWorker.score_responses, sampled_batch, FORWARD, max_tokens=30, only=rows)
    assert torch.equal(some.lengths("teacher_log_probs"), sampled_batch.lengths("responses")[rows])
    expected = whole[rows].values("teacher_log_probs")
    assert some.values("teacher_log_probs").tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_teachers_share_the_columns_of_a_step(start):
    config, shared = compose(["algorithm=distill", f"algorithm.distillation.teachers=[{start}]"])[0], SharedColumns()
    group = group_of("teacher start", start, config, shared)
    assert group.shared is shared
    assert group.work.output > 0
    assert Role(LocalProcess(Host({}, verbose=True)), "teacher start").name in config.roles(needs_critic=False)
