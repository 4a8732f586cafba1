"""Tests that distillation from two teachers gives the same training for any ranks and any token budget."""

import pytest
import torch
from ranks import replayed

from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import minibatches
from rltrain.settings.compose import compose
from rltrain.trajectories.teachers import merged
from tests.made_teachers import make_teacher
from tests.policy_weights import weights_of
from workers.placement import Training, spawner
from workers.training.actor import ActorWorker
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.policy_update import update_policy
from workers.training.shared_columns import FORWARD, log_probs_columns
from workers.training.teacher import TeacherWorker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
KINDS = {
    "full": ["algorithm=distill"],
    "sampled": ["algorithm=distill", "algorithm.distillation.kl=sampled"],
}
# Triples of (number of ranks, token budget, further settings). The first triple is the reference for the others.
SPLITS = [
    (1, 8192, []),
    (2, 8192, []),
    (2, 40, []),
    (2, 40, ["placement.sequence_ranks=2"]),
    (2, 40, ["placement.context_ranks=2"]),
    (2, 40, ["placement.tensor_ranks=2"]),
    (2, 8192, ["placement.share_ranks=false"]),
]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    return [make_teacher(folder / name, width=width, seed=width) for name, width in (("wide", 96), ("narrow", 32))]


async def trained(start, teachers, kind, split):
    """Take two steps of two mini-batches each, and return the metrics of each step and the trained weights."""
    ranks, budget, overrides = split
    words = [f"algorithm.distillation.teachers=[{','.join(teachers)}]", "algorithm.distillation.teacher_column=domain"]
    sizes = ["trainer.prompts_per_step=6", "trainer.prompts_per_minibatch=3", "actor.lr_schedule=constant"]
    placement = [f"placement.actor_ranks={ranks}", "rollout.temperature=0.8", *overrides]
    config = compose([*KINDS[kind], *words, *sizes, *placement])[0]
    roles = config.roles(needs_critic=False)
    paths = dict(zip(roles, [start, *teachers], strict=True))
    shared = spawner(config, "training rank", ranks)
    own = {role: spawner(config, f"{role} rank", ranks) for role in roles}
    training = Training(config, paths, dict.fromkeys(roles, shared) if config.placement.share_ranks else own)
    try:
        await training.build()
        actor, history = training.groups["actor"], []
        for step in range(2):
            batch = replayed(step)
            numbers = [(row % 5) - 1 if row % 5 < 3 else row % 2 for row in range(len(batch))]
            found = []
            for number, teacher in enumerate(config.algorithm.distillation.teachers):
                rows = [row for row, one in enumerate(numbers) if one == number]
                group = training.groups[teacher.role]
                columns = await group.rows(TeacherWorker.score_responses, batch, FORWARD, max_tokens=budget, only=rows)
                found.append((rows, columns))
            batch = batch.with_values("responses", **merged(batch, found))
            batch = batch.union(DataProto.from_dict({"teacher": torch.tensor(numbers)}))
            columns = log_probs_columns(config.algorithm)
            batch = batch.union(await actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=budget))
            plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
            history.append(await update_policy(actor, batch, plan, config, max_tokens=budget, entropy_coef=0.0))
        return history, await weights_of(actor)
    finally:
        for process in training.processes:
            process.kill()


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["full", "sampled"])
async def test_A2_A3_two_teachers_over_ranks_train_as_in_one_process(start, teachers, kind):
    first, weights = await trained(start, teachers, kind, SPLITS[0])
    assert all(step["teacher_kl"] > 0.1 and step["distillation_loss"] > 0.01 for step in first)
    for split in SPLITS[1:]:
        history, others = await trained(start, teachers, kind, split)
        for got, expected in zip(history, first, strict=True):
            for key, value in expected.items():
                assert key in OVERHEAD_METRICS or got[key] == pytest.approx(value, rel=2e-4, abs=1e-6), (split, key)
        for key, tensor in weights.items():
            assert (others[key] - tensor).abs().max() < 1e-4, (split, key)
