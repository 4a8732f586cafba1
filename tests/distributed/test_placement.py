"""Which processes a placement makes, on a Ray cluster of this machine."""

import dataclasses
import os

import pytest
import ray
import torch

from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID
from workers.placement import start as start_workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]


def pids(group) -> list[int]:
    return ray.get([actor.__ray_call__.remote(lambda host: os.getpid()) for actor in group.hosts.actors])


@pytest.mark.parametrize("shared", [True, False])
def test_roles_share_processes_or_have_their_own_and_compute_the_same(start, sampled_batch, shared):
    """placement=colocated and placement=disaggregated, with all three training roles."""
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
    workers = start_workers(config, start, [EOS_ID], needs_critic=True)
    try:
        processes = {pid for group in (workers.actor, workers.reference, workers.critic) for pid in pids(group)}
        assert len(processes) == (1 if shared else 3)
        batch = sampled_batch
        old = workers.actor.rows("compute_log_probs", batch, max_tokens=64)
        ref = workers.reference.rows("compute_log_probs", batch, max_tokens=4096)
        values = workers.critic.rows("compute_values", batch, max_tokens=4096)
        assert torch.allclose(old.values("old_log_probs"), ref.values("ref_log_probs"), atol=1e-5)
        assert values.values("values").shape == old.values("old_log_probs").shape
    finally:
        workers.close()
        for group in (workers.actor, workers.reference, workers.critic, workers.rollout):
            for actor in group.hosts.actors:
                ray.kill(actor)
