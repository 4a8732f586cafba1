"""Whole runs in one process whose reference model is updated during training."""

import json

import pytest
import torch

from tests.policy_weights import weights_of
from tests.unit.test_resume_in_process import assert_same, end_runs, fitted, new_run, reseed, resumed_run
from workers.models.fsdp import full

ONE_UPDATE = ["trainer.prompts_per_minibatch=4", "actor.lr=3e-3", "trainer.deterministic=true"]
LOSS = "algorithm.kl_loss.kl_loss_coef=0.1"
REWARD = "algorithm.kl_in_reward.kl_coef=0.05"
# A teacher that sees the policy's own prompt, so that its KL is 0 if it has the policy's weights. The rewards move the
# policy in the first step.
TEACHER = [
    "algorithm=distill", "algorithm.distillation.outcome_coef=1",
    "algorithm.distillation.teachers=[{path: reference, prompt_template: '{prompt}'}]",
]  # fmt: skip
KINDS = {
    "in the loss": [LOSS],
    "exact in the loss": [LOSS, "algorithm.kl_loss.kl_estimator=full"],
    "in the reward": [REWARD],
    "exact in the reward": [REWARD, "algorithm.kl_in_reward.kl_estimator=full"],
    "exact to a teacher": TEACHER,
    "sampled, to a teacher": [*TEACHER, "algorithm.distillation.kl=sampled"],
    "exact to a teacher and in the loss": [*TEACHER, LOSS, "algorithm.kl_loss.kl_estimator=full"],
}


@pytest.fixture(autouse=True)
async def _end_runs():
    yield
    await end_runs()


def every(steps, coef=1.0):
    return [f"algorithm.reference.refresh_every={steps}", f"algorithm.reference.refresh_coef={coef}"]


def metric(run, name):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines]


def kl_of(run, kind):
    if "teacher" in kind:
        return metric(run, "actor/teacher_kl")
    return metric(run, "actor/ref_kl" if "loss" in kind else "reward/kl")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_kl_is_exactly_zero_in_the_step_after_a_copy_and_in_no_other_but_the_first(start, tmp_path, kind):
    run = await fitted(start, tmp_path, *ONE_UPDATE, *KINDS[kind], *every(2), steps=5)
    assert metric(run, "reference/refreshed") == [0, 1, 0, 1, 0]
    kl = kl_of(run, kind)
    assert [abs(value) < 1e-12 for value in kl] == [True, False, True, False, True]
    assert min(abs(kl[1]), abs(kl[3])) > 1e-5


@pytest.mark.parametrize("kind", KINDS)
async def test_a_moving_average_follows_the_actor_from_behind(start, tmp_path, kind):
    """The average is that of the actor's weights after each step, computed in float64."""
    run = await new_run(start, tmp_path, *ONE_UPDATE, *KINDS[kind], *every(1, 0.3))
    trainer = run.trainer
    expected = {name: tensor.double() for name, tensor in (await weights_of(trainer.actor)).items()}
    for _ in range(4):
        await run.steps(1)
        actor = await weights_of(trainer.actor)
        expected = {name: 0.3 * actor[name].double() + 0.7 * tensor for name, tensor in expected.items()}
    reference = trainer.reference.ranks[0].process.host.roles["reference"].model
    for name, parameter in reference.named_parameters():
        found = full(parameter.detach()).double()
        assert (found - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max(), name
    assert any((full(p.detach()) - actor[name]).abs().max() > 1e-4 for name, p in reference.named_parameters())
    assert metric(run, "reference/refreshed") == [1, 1, 1, 1]


async def test_a_frozen_reference_is_neither_saved_nor_measured_and_a_late_update_changes_nothing(start, tmp_path):
    frozen = await fitted(start, tmp_path / "frozen", *ONE_UPDATE, LOSS, steps=3)
    late = await fitted(start, tmp_path / "late", *ONE_UPDATE, LOSS, *every(9), steps=3)
    assert list(frozen.trainer.trained()) == ["actor"]
    assert list(late.trainer.trained()) == ["actor", "reference"]
    assert sorted(file.name for file in (tmp_path / "frozen/checkpoints/step_3/state").iterdir()) == ["actor"]
    lines = [json.loads(line) for line in (tmp_path / "frozen/metrics.jsonl").read_text().splitlines()]
    assert not [name for line in lines for name in line if "refresh" in name]
    for name in ("actor/ref_kl", "actor/grad_norm", "reward/mean"):
        assert metric(late, name) == metric(frozen, name)
    one, other = await weights_of(frozen.trainer.actor), await weights_of(late.trainer.actor)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


async def test_updates_of_the_reference_change_what_is_learnt(start, tmp_path):
    found = []
    for folder, settings in (("frozen", []), ("copy", every(1)), ("average", every(1, 0.3))):
        run = await fitted(start, tmp_path / folder, *ONE_UPDATE, LOSS, *settings, steps=3)
        found.append({name: tensor.clone() for name, tensor in (await weights_of(run.trainer.actor)).items()})
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert any((tensor - found[other][name]).abs().max() > 1e-5 for name, tensor in found[one].items())


@pytest.mark.parametrize("kind", ["exact in the loss", "exact to a teacher"])
@pytest.mark.parametrize("settings", [every(2), every(1, 0.3)], ids=["copy", "average"])
async def test_F4_a_run_that_goes_back_to_a_checkpoint_or_its_start_goes_back_to_the_reference_of_then(
    start, tmp_path, settings, kind
):
    exact = [*ONE_UPDATE, *KINDS[kind], *settings]
    whole = await fitted(start, tmp_path / "whole", *exact)
    again = await (await new_run(start, tmp_path / "again", *exact, "trainer.save_every=0")).steps(3)
    await again.trainer.restore(again.trainer.last_good())
    assert again.trainer.step == 0
    assert_same(await again.fit(), whole)
    await (await new_run(start, tmp_path / "parts", *exact)).steps(3)
    reseed()
    resumed = await resumed_run(start, tmp_path / "parts", *exact)
    assert_same(await resumed.fit(), whole)
