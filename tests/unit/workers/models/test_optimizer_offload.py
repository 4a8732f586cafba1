"""Tests of moments that are in CPU memory between the updates (`offload_optimizer`)."""

import dataclasses
import weakref

import pytest
import torch
from torch import nn

from rltrain.settings.compose import compose
from workers.models.fsdp import MOMENTS, Optimizer

CONFIG = dataclasses.replace(compose([])[0].actor, lr=1e-2, lr_warmup_steps=0)


def optimizer_of(model, *, offload):
    config = dataclasses.replace(CONFIG, offload_optimizer=offload)
    return Optimizer(list(model.parameters()), config, total_steps=100, max_skipped=0)


def train(model, optimizer, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()
    optimizer.offload()


def offloaded(optimizer):
    """Return whether all moments are in the memory that `offload` allocates."""
    own = {tensor.data_ptr() for tensor in optimizer.cpu_moments.values()}
    return all(optimizer.moments(p)[kind].data_ptr() in own for p in optimizer.parameters for kind in MOMENTS)


def models():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    second.load_state_dict(first.state_dict())
    return first, second


def test_offloaded_moments_give_the_same_updates_to_the_last_bit(process_group):
    one, other = models()
    usual, moving = optimizer_of(one, offload=False), optimizer_of(other, offload=True)
    for _ in range(3):
        train(one, usual)
        train(other, moving)
        assert (offloaded(usual), offloaded(moving)) == (False, True)
        for mine, its in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
            assert all(torch.equal(usual.moments(mine)[kind], moving.moments(its)[kind]) for kind in MOMENTS)


def test_offloading_frees_the_moments_on_the_device_and_reuses_the_memory_on_the_host(process_group):
    model, _ = models()
    optimizer = optimizer_of(model, offload=True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    on_device = [
        weakref.ref(optimizer.moments(parameter)[kind]) for parameter in model.parameters() for kind in MOMENTS
    ]
    optimizer.offload()
    assert [one() for one in on_device] == [None] * 4
    host = [tensor.data_ptr() for tensor in optimizer.cpu_moments.values()]
    train(model, optimizer)
    assert [tensor.data_ptr() for tensor in optimizer.cpu_moments.values()] == host
    assert [optimizer.moments(p)[kind].data_ptr() for p in model.parameters() for kind in MOMENTS] == host


@pytest.mark.parametrize("offload", [False, True])
def test_offloading_before_the_first_step_or_twice_does_nothing(process_group, offload):
    model, _ = models()
    optimizer = optimizer_of(model, offload=offload)
    optimizer.offload()
    optimizer.offload()
    train(model, optimizer)
    optimizer.offload()
    assert offloaded(optimizer) is offload


def test_moments_that_a_checkpoint_has_created_are_offloaded_too(process_group):
    model, _ = models()
    optimizer = optimizer_of(model, offload=True)
    optimizer.offload()
    for parameter in model.parameters():
        optimizer.moments(parameter)
    assert not offloaded(optimizer)
    optimizer.offload()
    assert offloaded(optimizer)
