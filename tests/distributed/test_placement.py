"""Tests of the processes that each placement starts on a local Ray cluster."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import on

from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID
from workers.placement import start as start_workers
from workers.training.actor import ActorWorker
from workers.training.critic import CriticWorker
from workers.training.reference import ReferenceWorker
from workers.training.shared_columns import FORWARD

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]


def processes_of(group) -> list:
    return [rank.process for rank in group.ranks]


@pytest.mark.parametrize("shared", [True, False])
async def test_roles_share_processes_or_have_their_own_and_compute_the_same(start, sampled_batch, shared, tasks):
    """Compare placement=colocated with placement=disaggregated, with all three training roles."""
    config, _ = compose(
        [
            "algorithm=ppo",
            "algorithm.kl_loss.kl_loss_coef=0.1",
            "rollout=hf",
            "placement=disaggregated",
            "placement.address=local",
        ]
    )
    config = dataclasses.replace(config, placement=dataclasses.replace(config.placement, share_ranks=shared))
    workers = await start_workers(config, start, [EOS_ID], tasks, needs_critic=True)
    try:
        ranks = [one for group in (workers.actor, workers.reference, workers.critic) for one in processes_of(group)]
        assert len(ranks) == 3
        assert len(set(await on(ranks, lambda host: os.getpid()))) == (1 if shared else 3)
        batch = sampled_batch
        old = await workers.actor.rows(ActorWorker.compute_log_probs, batch, FORWARD, max_tokens=64)
        ref = await workers.reference.rows(ReferenceWorker.compute_log_probs, batch, FORWARD, max_tokens=4096)
        values = await workers.critic.rows(CriticWorker.compute_values, batch, FORWARD, max_tokens=4096)
        assert torch.allclose(old.values("old_log_probs"), ref.values("ref_log_probs"), atol=1e-5)
        assert values.values("values").shape == old.values("old_log_probs").shape
    finally:
        await workers.close()
        for process in (*workers.training.processes, *(replica.role.process for replica in workers.rollout.replicas)):
            process.kill()


def test_a_worker_of_a_local_cluster_has_few_memory_arenas_however_many_threads_it_has():
    """An arena of glibc never returns its peak memory, so a training rank with many arenas grows during a run."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    script = Path(__file__).with_name("arenas.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment | {"PYTHONPATH": str(script.parents[2])}, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2
