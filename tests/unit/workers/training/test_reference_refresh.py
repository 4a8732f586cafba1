"""Tests of the updates of the reference model on one rank, with actor and reference in one process."""

import pytest
import torch

from tests.policy_weights import weights_of
from tests.unit.workers.training.test_actor import Run
from workers.cluster.processes import LocalProcess, Role
from workers.cluster.worker_process import Host
from workers.models import weight_shards
from workers.models.fsdp import full
from workers.training.reference_refresh import refresh_reference, send_reference_head
from workers.training.worker_group import WorkerGroup

pytestmark = pytest.mark.usefixtures("process_group")
LOSS = ["algorithm.kl_loss.kl_loss_coef=0.5"]
REWARD = ["algorithm.kl_in_reward.kl_coef=0.5"]
FULL = [*LOSS, "algorithm.kl_loss.kl_estimator=full"]
FULL_REWARD = [*REWARD, "algorithm.kl_in_reward.kl_estimator=full"]
COPY, AVERAGE = ["algorithm.reference.refresh_every=1"], [
    "algorithm.reference.refresh_every=1", "algorithm.reference.refresh_coef=0.25"
]  # fmt: skip


def reference_of(run):
    return run.process.host.roles["reference"]


def weights_of_reference(run):
    return {name: full(tensor.detach()).clone() for name, tensor in reference_of(run).model.named_parameters()}


async def refreshed(run):
    await refresh_reference(run.actor, run.reference)
    if run.config.algorithm.needs_full_kl:
        await send_reference_head(run.actor, run.reference)


@pytest.mark.parametrize("numbers", [weight_shards.GROUP_NUMBERS, 1000])
async def test_an_update_moves_each_weight_by_the_coefficient_and_the_actor_stays(
    start, sampled_batch, monkeypatch, numbers
):
    monkeypatch.setattr(weight_shards, "GROUP_NUMBERS", numbers)
    run = Run(start, *LOSS, *AVERAGE)
    assert len(reference_of(run).groups) == 1 if numbers > 1e6 else len(reference_of(run).groups) > 5
    expected = {name: tensor.double() for name, tensor in weights_of_reference(run).items()}
    for _ in range(3):
        await run.update(await run.prepared(sampled_batch))
        actor = await run.weights()
        await refreshed(run)
        expected = {name: 0.25 * actor[name].double() + 0.75 * tensor for name, tensor in expected.items()}
        assert all(torch.equal(tensor, actor[name]) for name, tensor in (await run.weights()).items())
    found = weights_of_reference(run)
    assert found.keys() == expected.keys() == actor.keys()
    for name, tensor in expected.items():
        assert (found[name].double() - tensor).abs().max() <= 1e-6 * tensor.abs().max(), name
    assert any((found[name] - actor[name]).abs().max() > 1e-5 for name in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kl", [LOSS, REWARD, FULL, FULL_REWARD, [*FULL, *REWARD]], ids=lambda kl: " ".join(kl))
async def test_after_a_copy_the_kl_is_zero_as_at_the_start(start, sampled_batch, kl, dtype):
    run = Run(start, *kl, *COPY, f"model.dtype={dtype}", "actor.lr=1e-2")
    for _ in range(2):
        await run.update(await run.prepared(sampled_batch))
    before = await run.prepared(sampled_batch)
    await refreshed(run)
    after = await run.prepared(sampled_batch)
    if "ref_log_probs" in after:
        assert (before.values("ref_log_probs") - before.values("old_log_probs")).abs().max() > 0.01
        assert torch.equal(after.values("ref_log_probs"), after.values("old_log_probs"))
    if "full_kl" in after:
        assert before.values("full_kl").max() > 1e-3
        assert after.values("full_kl").abs().max() < 1e-9
    if kl[0] == LOSS[0]:
        metrics = await run.update(after.with_values("responses", advantages=0 * after.values("advantages")))
        assert metrics["ref_kl"] == pytest.approx(0, abs=1e-9)
        assert metrics["grad_norm"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_average_is_kept_in_float32_and_a_copy_in_the_dtype_of_the_model(start, sampled_batch, dtype):
    name = f"model.dtype={str(dtype).removeprefix('torch.')}"
    average, copy = Run(start, *LOSS, *AVERAGE, name), Run(start, *LOSS, *COPY, name)
    assert {p.dtype for p in reference_of(average).model.parameters()} == {torch.float32}
    assert {p.dtype for p in reference_of(copy).model.parameters()} == {dtype}
    assert not any(p.requires_grad for p in reference_of(average).model.parameters())
    batch = await average.prepared(sampled_batch)  # the average computes in the model's dtype, like the actor
    assert torch.equal(batch.values("ref_log_probs"), batch.values("old_log_probs"))


async def test_an_average_in_bfloat16_moves_by_less_than_a_bfloat16_can_hold(start, sampled_batch):
    run = Run(
        start, *LOSS, "model.dtype=bfloat16", "actor.lr=1e-4", "algorithm.reference.refresh_every=1",
        "algorithm.reference.refresh_coef=0.01",
    )  # fmt: skip
    origin = weights_of_reference(run)
    for _ in range(3):
        await run.update(await run.prepared(sampled_batch))
        await refreshed(run)
    moved = {name: (tensor - origin[name]).abs() for name, tensor in weights_of_reference(run).items()}
    assert all(float(by.max()) > 0 for by in moved.values())
    assert all(bool((by < 2**-9 * origin[name].abs()).any()) for name, by in moved.items())


@pytest.mark.parametrize("coef", [1.0, 0.25])
async def test_the_head_for_the_exact_kl_follows_the_reference(start, sampled_batch, coef):
    run = Run(
        start, *FULL, "algorithm.reference.refresh_every=1", f"algorithm.reference.refresh_coef={coef}", "actor.lr=1e-2"
    )
    start_head = run.worker.ref_head.clone()
    await run.update(await run.prepared(sampled_batch))
    actor_head = full(run.worker.model.get_output_embeddings().weight.detach()).clone()
    await refreshed(run)
    assert torch.allclose(run.worker.ref_head, coef * actor_head + (1 - coef) * start_head, atol=1e-6)
    head = run.worker.ref_head.clone()
    assert not torch.equal(head, start_head)
    await run.update(await run.prepared(sampled_batch))
    assert torch.equal(run.worker.ref_head, head)  # the head does not share memory with weights that change


async def test_the_start_is_restored_only_if_the_reference_has_changed(start, sampled_batch):
    run = Run(start, *FULL, *COPY, "actor.lr=1e-2")
    worker, origin, model = reference_of(run), weights_of_reference(run), reference_of(run).model
    worker.load_state(None)
    assert worker.model is model
    await run.update(await run.prepared(sampled_batch))
    await refreshed(run)
    assert any(not torch.equal(tensor, origin[name]) for name, tensor in weights_of_reference(run).items())
    worker.load_state(None)
    assert all(torch.equal(tensor, origin[name]) for name, tensor in weights_of_reference(run).items())


# Tests of a reference in a process of its own


class Recording(LocalProcess):
    """A worker process that records the calls of roles that the driver starts."""

    def __init__(self, host):
        super().__init__(host)
        self.calls = []

    def start(self, role, method, *args, **kwargs):
        self.calls.append((method, args))
        return super().start(role, method, *args, **kwargs)


async def test_a_reference_in_its_own_process_takes_a_group_before_the_actor_sends_the_next_but_one(
    start, sampled_batch, monkeypatch
):
    monkeypatch.setattr(weight_shards, "GROUP_NUMBERS", 20_000)
    together, apart = Run(start, *FULL, *AVERAGE), Run(start, *FULL, *AVERAGE)
    ours, theirs = Recording(apart.process.host), Recording(Host({}, verbose=True))
    theirs.host.roles["reference"] = apart.process.host.roles["reference"]
    apart.actor = WorkerGroup([Role(ours, "actor")])
    apart.reference = WorkerGroup([Role(theirs, "reference")])
    for run in (together, apart):
        await run.update(await run.prepared(sampled_batch))
        await refreshed(run)
    expected, found = weights_of_reference(together), weights_of_reference(apart)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(together.worker.ref_head, apart.worker.ref_head)
    groups = len(reference_of(apart).groups)
    assert groups > 3
    assert [args[0] for method, args in theirs.calls if method == "refresh"] == list(range(groups))
    # From group 2 on, the actor's call for group n waits for the reference's call that took group n - 2.
    sent = [args for method, args in ours.calls if method == "shards"]
    assert sent == [(number, True, *[None] * (number >= 2)) for number in range(groups)]


async def test_in_one_process_the_reference_reads_the_memory_of_the_actor(start, sampled_batch):
    run = Run(start, *LOSS, *COPY)
    shards = run.worker.shards(0, False)
    weights = [parameter.detach() for parameter in run.worker.model.parameters()][: len(shards)]
    assert [shard.data_ptr() for shard in shards] == [weight.data_ptr() for weight in weights]
    run.process = process = Recording(run.process.host)
    run.actor, run.reference = (WorkerGroup([Role(process, role)]) for role in ("actor", "reference"))
    await refreshed(run)
    assert [method for method, _ in process.calls] == ["shard_groups", *["refresh"] * run.worker.shard_groups()]


async def test_weights_of_the_actor_are_exported_and_never_the_references(start, sampled_batch, tmp_path):
    import time

    from safetensors.torch import load_file

    run = Run(start, *LOSS, "algorithm.reference.refresh_every=9", "actor.lr=1e-2")
    await run.update(await run.prepared(sampled_batch))
    for role in ("actor", "reference"):
        worker = run.process.host.roles[role]
        worker.save_state(str(tmp_path))
        while worker.saved_state() is None:
            time.sleep(0.01)
        assert worker.saved_state().error == ""
    weights = await weights_of(run.actor)
    exported = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["actor", "reference"]
    saved = sum(path.stat().st_size for path in (tmp_path / "state/reference").iterdir())
    parameters = sum(tensor.numel() for tensor in weights.values())
    assert 4 * parameters < saved < 5 * parameters  # float32 weights, without the optimizer's moments
