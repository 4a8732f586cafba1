"""Tests that the hidden states for an exact KL stay on the training ranks, and that training stays bitwise the same."""

import pytest
import torch
from ranks import on, replayed

from rltrain.batch import data_proto
from rltrain.batch.row_assignment import minibatches
from rltrain.settings.compose import compose
from tests.policy_weights import weights_of
from workers.cluster.processes import RayProcess
from workers.placement import Training, spawner
from workers.training.actor import ActorWorker
from workers.training.policy_update import update_policy
from workers.training.reference import ReferenceWorker
from workers.training.shared_columns import FORWARD, log_probs_columns

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
WORDS = [
    "algorithm.kl_loss.kl_estimator=full", "algorithm.kl_loss.kl_loss_coef=0.5", "algorithm.loss_mode=reinforce",
    "algorithm.kl_in_reward.kl_estimator=full", "algorithm.kl_in_reward.kl_coef=0.1", "placement.actor_ranks=2",
    "trainer.prompts_per_step=6", "trainer.prompts_per_minibatch=3", "actor.lr_schedule=constant",
]  # fmt: skip
BUDGET = 40


@pytest.fixture
def read(monkeypatch):
    """Return a dict with the bytes of each column that this process, the driver, receives or puts into the store."""
    found: dict[str, int] = {}
    receive, put = data_proto.receive, RayProcess.share

    def note(name, size):
        found[name] = found.get(name, 0) + size

    def receiving(packet):
        for name, _, _, _, memory in packet.tensors:
            note(name, memoryview(memory).nbytes)
        return receive(packet)

    def sharing(self, value):
        for name in value.keys():  # noqa: SIM118 (iterating a batch gives its rows)
            column = value.select([name]).batch[name]
            note(name, (column.values() if column.is_nested else column).nbytes)
        return put(self, value)

    monkeypatch.setattr(data_proto, "receive", receiving)
    monkeypatch.setattr(RayProcess, "share", sharing)
    return found


async def trained(start, overrides, *, keep):
    """Take two steps, and return the metrics, the exact KLs before each update, and the trained weights."""
    config = compose([*WORDS, *overrides])[0]
    roles = config.roles(needs_critic=False)
    shared = spawner(config, "training rank", 2)
    own = {role: spawner(config, f"{role} rank", 2) for role in roles}
    training = Training(
        config, dict.fromkeys(roles, start), dict.fromkeys(roles, shared) if config.placement.share_ranks else own
    )
    try:
        await training.build()
        actor, reference, history, kls = training.groups["actor"], training.groups["reference"], [], []
        for step in range(2):
            batch = replayed(step)
            method = ReferenceWorker.compute_log_probs
            batch = batch.union(await reference.rows(method, batch, FORWARD, max_tokens=BUDGET, keep=keep))
            columns = log_probs_columns(config.algorithm)
            batch = batch.union(await actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=BUDGET))
            kls.append(batch.values("full_kl"))
            plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
            history.append(await update_policy(actor, batch, plan, config, max_tokens=BUDGET, entropy_coef=0.0))
            processes = [rank.process for rank in reference.ranks]
            kept = await on(processes, lambda host: len(host.roles["reference"].kept._kept))
            assert kept == [0 if keep is None else 1] * 2
            await actor.drop_kept()
            assert await on(processes, lambda host: len(host.roles["reference"].kept._kept)) == [0, 0]
        return history, kls, await weights_of(actor)
    finally:
        for process in training.processes:
            process.kill()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["placement.share_ranks=false"],
        pytest.param(["placement.sequence_ranks=2"], marks=pytest.mark.broad),
        pytest.param(["placement.sequence_ranks=2", "placement.share_ranks=false"], marks=pytest.mark.broad),
    ],
)
async def test_the_driver_reads_no_hidden_states_and_the_training_is_bitwise_the_same(start, read, overrides):
    history, kls, weights = await trained(start, overrides, keep=None)
    through_driver = read["ref_hidden"]
    assert through_driver > 0
    read.clear()
    found = await trained(start, overrides, keep="ref_hidden")
    assert "ref_hidden" not in read
    assert sum(read.values()) < through_driver / 4
    assert found[0] == history
    assert all(torch.equal(one, other) for one, other in zip(found[1], kls, strict=True))
    assert float(kls[1].max()) > 1e-6
    assert all(torch.equal(found[2][name], weight) for name, weight in weights.items())
