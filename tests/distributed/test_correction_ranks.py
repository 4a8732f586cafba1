"""Tests that statistics of importance weights cover the whole mini-batch, for any ranks and any token budget."""

import pytest
import torch
from ranks import NUMBERS, built, processes_of, replayed

from rltrain.batch.row_assignment import minibatches
from rltrain.settings.compose import compose
from tests.policy_weights import weights_of
from workers.placement import ROLES
from workers.training.actor import ActorWorker
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.policy_update import update_policy
from workers.training.shared_columns import log_probs_columns
from workers.training.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
# (number of ranks, token budget, ranks that split the tokens of a pack)
SPLITS = [(1, 8192, 1), (1, 40, 1), (2, 8192, 1), (2, 40, 1), (2, 8192, 2)]
OPTIONS = {
    "kept tokens": ["level=token", "mode=mask", "lower=0.8", "upper=1.3", "normalize=kept"],
    "kept rows": ["level=geometric", "mode=mask", "upper=1.05", "normalize=kept"],
    "self-normalised tokens": ["level=token", "upper=1.3", "batch_normalize=true"],
    "self-normalised rows": ["level=sequence", "upper=2", "batch_normalize=true"],
}


async def trained(config, start, ranks, budget, sequence_ranks):
    """Train two steps on given answers, and return the metrics of each step and the final weights."""
    processes = await processes_of({1: 0, 2: 2}[ranks])
    workers = await built(processes, f"actor {next(NUMBERS)}", ROLES["actor"], config, start)
    actor, history = WorkerGroup(workers, ranks_per_pack=sequence_ranks, token_ranks=sequence_ranks), []
    for step in range(2):
        batch = replayed(step)
        columns = log_probs_columns(config.algorithm)
        batch = batch.union(await actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=budget))
        engine = batch.values("old_log_probs") + 0.3 * batch.values("advantages").sin()
        batch = batch.with_values("responses", rollout_log_probs=engine)
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        history.append(await update_policy(actor, batch, plan, config, max_tokens=budget, entropy_coef=0.0))
    return history, await weights_of(actor)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", OPTIONS)
async def test_A1_A2_A3_the_update_is_the_same_on_any_ranks_with_any_token_budget(start, name, mode):
    options = [f"algorithm.correction.{text}" for text in OPTIONS[name]]
    sizes = ["trainer.prompts_per_step=6", "trainer.prompts_per_minibatch=3", "actor.lr_schedule=constant"]
    found = []
    for ranks, budget, sequence_ranks in SPLITS:
        placed = [f"placement.actor_ranks={ranks}", f"placement.sequence_ranks={sequence_ranks}"]
        config = compose([*sizes, *options, *placed, f"algorithm.loss_agg_mode={mode}"])[0]
        found.append(await trained(config, start, ranks, budget, sequence_ranks))
    plain = [text for text in options if "normalize" not in text]
    without = await trained(compose([*sizes, *plain, f"algorithm.loss_agg_mode={mode}"])[0], start, 1, 8192, 1)
    first, weights = found[0]
    assert abs(first[0]["policy_loss"] - without[0][0]["policy_loss"]) > 1e-4
    for history, others in found[1:]:
        for got, expected in zip(history, first, strict=True):
            for key, value in expected.items():
                assert key in OVERHEAD_METRICS or got[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        for key, tensor in weights.items():
            assert (others[key] - tensor).abs().max() < 1e-4, key
    if "kept" in name:
        assert all(0 < step["correction_dropped_fraction"] < 1 for step in first)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
