"""Tests of the groups of weights that ranks exchange, and of the moving average of weights."""

import pytest
import torch
from torch import nn

from workers.models import weight_shards
from workers.models.weight_shards import local_shard, move_weights, weight_groups, whole_of


def test_an_update_on_a_case_worked_by_hand():
    reference = [torch.tensor([1.0, -2.0]), torch.tensor([[4.0]])]
    actor = [torch.tensor([3.0, 2.0]), torch.tensor([[0.0]])]
    move_weights(reference, actor, 0.25)
    # 0.25 * 3 + 0.75 * 1 = 1.5, 0.25 * 2 + 0.75 * -2 = -1, and 0.25 * 0 + 0.75 * 4 = 3
    assert [tensor.tolist() for tensor in reference] == [[1.5, -1.0], [[3.0]]]
    move_weights(reference, actor, 0.5)
    assert [tensor.tolist() for tensor in reference] == [[2.25, 0.5], [[1.5]]]
    assert [tensor.tolist() for tensor in actor] == [[3.0, 2.0], [[0.0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_coefficient_1_the_target_is_the_source_to_the_last_bit(dtype):
    source = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    target = torch.full((1000,), 1e30, dtype=dtype)
    move_weights([target], [source], 1.0)
    assert torch.equal(target, source.to(dtype))


@pytest.mark.parametrize("coef", [0.001, 0.1, 0.6])
def test_a_hundred_updates_accumulate_in_float32_as_a_float64_reference_says(coef):
    generator = torch.Generator().manual_seed(0)
    actor = torch.randn(2000, generator=generator)
    target, expected, origin = actor.clone(), actor.double(), actor.double()
    for _ in range(100):
        actor += 1e-4 * torch.randn(2000, generator=generator)
        move_weights([target], [actor], coef)
        expected = coef * actor.double() + (1 - coef) * expected
    distance = (expected - origin).abs().max()
    assert (target.double() - expected).abs().max() < 0.02 * distance
    rounded = origin.to(torch.bfloat16)
    assert distance < (rounded.double() * 2**-8).abs().max()  # in bfloat16, the same updates would be rounded away


def test_a_moving_average_in_bfloat16_is_a_mistake_of_the_program():
    with pytest.raises(AssertionError, match="would round the small updates"):
        move_weights([torch.zeros(1, dtype=torch.bfloat16)], [torch.ones(1)], 0.5)


def test_groups_keep_the_order_of_the_weights_and_are_of_limited_size(monkeypatch):
    monkeypatch.setattr(weight_shards, "GROUP_NUMBERS", 10)
    model = nn.Module()
    for name, size in (("a", 4), ("b", 6), ("c", 1), ("d", 25), ("e", 10), ("f", 1)):
        model.register_parameter(name, nn.Parameter(torch.zeros(size)))
    model.register_parameter("tied", model.a)
    assert weight_groups(model) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert weight_groups(nn.Module()) == []


def test_a_shard_shares_the_memory_of_its_weight_and_is_gathered_again(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(6.0).view(3, 2)
    sharded = distribute_tensor(whole.clone(), init_device_mesh("cpu", (1,)), [Shard(0)])
    shard = local_shard(sharded)
    assert torch.equal(whole_of(shard, sharded), whole)
    shard += 1
    assert torch.equal(sharded.full_tensor(), whole + 1)
    assert local_shard(whole).data_ptr() == whole.data_ptr()
    assert whole_of(whole, whole) is whole
