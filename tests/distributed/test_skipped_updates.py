"""Tests that all ranks skip an update if its loss or gradient is not finite."""

import math

import pytest
import torch
from ranks import config_of, group, prepared, updated

from rltrain.base.errors import NumericsError
from rltrain.batch.data_proto import DataProto
from tests.policy_weights import weights_of
from workers.training.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
HALVES = [list(range(12)), list(range(12, 24))]


def poisoned(batch: DataProto, row: int, value: float = math.inf) -> DataProto:
    """Set the advantage of the first token of row `row`, which only one rank processes, to `value`."""
    advantages = batch.values("advantages").clone()
    advantages[int(batch.offsets("advantages")[row])] = value
    return batch.with_values("responses", advantages=advantages)


async def update(workers: dict[str, WorkerGroup], batch: DataProto) -> dict[str, float]:
    return await updated(workers["actor"], batch, HALVES)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("value", [math.inf, math.nan])
async def test_a_skipped_update_leaves_weights_and_moments_bitwise_alone_and_the_schedule_goes_on(start, ranks, value):
    """Skipping step 3 of 4 gives bitwise the weights of three steps at the learning rates of steps 1, 2 and 4."""
    workers = await group(config_of(), start, ranks)
    rates = [(await update(workers, await prepared(workers)))["lr"]]
    before = await weights_of(workers["actor"])
    batch = await prepared(workers, 1)
    both = poisoned(poisoned(batch, 3, value), 15, value)
    metrics = await update(workers, both)
    assert metrics["skipped_updates"] == 2
    assert metrics["lr"] < rates[0]
    assert math.isnan(metrics["grad_norm"])
    assert math.isnan(metrics["policy_loss"])
    assert same(before, await weights_of(workers["actor"]))
    after = await update(workers, batch)
    assert after["skipped_updates"] == 0
    assert after["lr"] < metrics["lr"]
    assert all(math.isfinite(number) for number in after.values())
    assert not same(before, await weights_of(workers["actor"]))


@pytest.mark.parametrize("ranks", [0, 2])
async def test_the_other_mini_batch_of_a_step_is_trained_on_as_if_the_skipped_one_were_not_there(start, ranks):
    config = config_of("actor.lr_schedule=constant")
    workers, others = await group(config, start, ranks), await group(config, start, ranks)
    metrics = await update(workers, poisoned(await prepared(workers), 3))
    alone = await updated(others["actor"], await prepared(others), HALVES[1:])
    assert same(await weights_of(workers["actor"]), await weights_of(others["actor"]))
    assert metrics["skipped_updates"] == 1
    # Metrics that compare with the old policy come from the first mini-batch, and are missing if the first mini-batch
    # was skipped.
    for name in ("policy_loss", "grad_norm", "grad_norm_max", "entropy", "ref_kl"):
        assert metrics[name] == alone[name], name


async def test_too_many_skipped_updates_in_a_row_stop_the_run_and_those_between_good_ones_do_not(start):
    workers = await group(config_of("trainer.max_skipped_updates=1"), start, 2)
    for step in range(3):
        assert (await update(workers, poisoned(await prepared(workers, step), 3)))["skipped_updates"] == 1
    before = await weights_of(workers["actor"])
    batch = poisoned(poisoned(await prepared(workers), 3), 15)
    with pytest.raises(
        NumericsError, match=r"^2 updates in a row, up to optimizer step 8, .*max_skipped_updates=1; look"
    ):
        await update(workers, batch)
    assert same(before, await weights_of(workers["actor"]))


def test_a_loss_that_is_not_finite_is_enough_though_its_gradient_is(start, process_group):
    from torch import nn

    from workers.models.fsdp import Optimizer

    parameter = nn.Parameter(torch.ones(3))
    optimizer = Optimizer([parameter], config_of().actor, 10, max_skipped=1)
    parameter.grad = torch.ones(3)
    assert optimizer.step(finite=False)["skipped"] == 1
    assert torch.equal(parameter, torch.ones(3))
    assert not optimizer.adamw.state
    parameter.grad = torch.ones(3)
    assert optimizer.step()["skipped"] == 0
    assert not torch.equal(parameter, torch.ones(3))
