"""Tests of the choice of a node for the bundle of each training rank and each engine."""

import pytest

from rltrain.settings.compose import compose
from workers.cluster.bundle_plan import BundleGroup, NoRoomError, bundle_groups, plan

CLUSTER = ["placement=disaggregated", "placement.address=10.0.0.1:6379"]
COLOCATED = ["placement=colocated", "placement.address=10.0.0.1:6379"]
SHARDED_ENGINES = ["rollout.vllm.process=async", "rollout.vllm.tensor_parallel_size=4"]


def gpus(*counts: int, cpus: int = 64) -> dict[str, dict[str, float]]:
    """Return nodes `a`, `b` and so on with the given numbers of GPUs."""
    return {node: {"GPU": float(count), "CPU": float(cpus)} for node, count in zip("abcdefgh", counts, strict=False)}


def groups_of(*overrides: str, on_gpus: bool = True, roles: tuple[str, ...] = ("actor",)) -> list[BundleGroup]:
    return bundle_groups(compose([*overrides])[0], roles, on_gpus=on_gpus)


def placed(groups: list[BundleGroup], nodes: dict[str, dict[str, float]]) -> dict[str, str]:
    """Return the node of each worker, after checking that no node gives more than it has."""
    bundles = [bundle for group in groups for bundle in group.bundles]
    found = plan(groups, nodes)
    for node, has in nodes.items():
        own = [bundle for bundle, where in zip(bundles, found, strict=True) if where == node]
        assert all(sum(one.resources.get(name, 0.0) for one in own) <= amount for name, amount in has.items())
    return {worker: node for bundle, node in zip(bundles, found, strict=True) for worker in bundle.workers}


def ranks(found: dict[str, str], role: str = "actor") -> str:
    """Return the nodes of a role's ranks, one letter for each rank."""
    return "".join(node for worker, node in found.items() if worker.startswith(f"{role} rank"))


def test_each_role_that_has_its_own_devices_has_a_bundle_for_each_rank_and_for_each_engine():
    groups = groups_of(
        *CLUSTER, *SHARDED_ENGINES, "placement.actor_ranks=2", "placement.rollout_replicas=2-4",
        roles=("actor", "critic"),
    )  # fmt: skip
    assert [[bundle.workers for bundle in group.bundles] for group in groups] == [
        [("rollout replica 0",)],
        [("rollout replica 1",)],
        [("actor rank 0",), ("actor rank 1",)],
        [("critic rank 0",), ("critic rank 1",)],
    ]
    assert groups[0].bundles[0].resources == {"GPU": 4.0, "CPU": 1.0}
    assert groups[2].bundles[0].resources == {"GPU": 1.0, "CPU": 1.0}


def test_a_rank_and_an_engine_that_share_a_gpu_share_a_bundle_that_has_the_whole_gpu():
    groups = groups_of(*COLOCATED, "placement.actor_ranks=2", "placement.rollout_replicas=3")
    bundles = [bundle for group in groups for bundle in group.bundles]
    assert [bundle.workers for bundle in bundles] == [
        ("training rank 0", "rollout replica 0"), ("training rank 1", "rollout replica 1"), ("rollout replica 2",),
    ]  # fmt: skip
    assert {tuple(bundle.resources.items()) for bundle in bundles} == {(("GPU", 1.0), ("CPU", 1.0))}
    assert [len(group.bundles) for group in groups] == [2, 1]


def test_without_gpus_a_bundle_has_only_the_cpus_that_its_processes_need():
    groups = groups_of(*COLOCATED, "placement.actor_ranks=2", "placement.rollout_replicas=1", on_gpus=False)
    assert [bundle.resources for group in groups for bundle in group.bundles] == [{"CPU": 1.0}, {"CPU": 0.5}]


def test_without_gpus_an_engine_has_a_cpu_for_each_shard():
    groups = groups_of(*CLUSTER, *SHARDED_ENGINES, on_gpus=False)
    assert [bundle.resources for group in groups for bundle in group.bundles] == [{"CPU": 4.0}, {"CPU": 1.0}]


def test_on_this_machine_only_gpus_are_reserved():
    assert groups_of("placement.actor_ranks=2", on_gpus=False) == []
    groups = groups_of("placement.share_ranks=false", "placement.actor_ranks=2")
    assert [bundle.resources for group in groups for bundle in group.bundles] == [{"GPU": 1.0}] * 3


def test_engines_that_replay_stored_answers_need_no_gpu():
    groups = groups_of(*CLUSTER, "rollout=stored", "rollout.run=answers")
    assert groups[0].bundles[0].resources == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["placement.actor_ranks=8"], [(8, 1)]),
        (["placement.actor_ranks=8", "placement.shard_ranks=4"], [(4, 1)] * 2),
        (["placement.actor_ranks=8", "placement.shard_ranks=4", "placement.sequence_ranks=2"], [(4, 2, 1)] * 2),
        (["placement.actor_ranks=8", "placement.shard_ranks=2", "placement.sequence_ranks=8"], [(8, 2, 1)]),
        (
            ["placement.actor_ranks=8", *(f"placement.{name}_ranks=2" for name in ("shard", "sequence", "context"))],
            [(4, 2, 1)] * 2,
        ),
        (["placement.actor_ranks=4", "placement.shard_ranks=1"], [(1,)] * 4),
    ],
)
def test_ranks_that_share_a_copy_of_a_model_or_a_sequence_are_a_group(overrides, sizes):
    groups = groups_of(*CLUSTER, *overrides)[1:]
    assert [group.sizes for group in groups] == sizes
    assert sum(len(group.bundles) for group in groups) == compose(overrides)[0].placement.actor_ranks


def test_groups_are_not_divided_where_an_engine_would_leave_half_of_a_group_on_its_node():
    groups = groups_of(
        *CLUSTER, "rollout.vllm.process=async", "rollout.vllm.tensor_parallel_size=2", "placement.actor_ranks=12",
        "placement.shard_ranks=4",
    )  # fmt: skip
    found = placed(groups, gpus(8, 8))
    assert ranks(found) == "aaaaaaaabbbb"
    assert found["rollout replica 0"] == "b"


def test_a_group_goes_where_it_fits_and_leaves_the_largest_nodes_free():
    groups = groups_of(*CLUSTER, "placement.actor_ranks=6", "placement.shard_ranks=3")
    found = placed(groups, gpus(8, 3, 4))
    assert ranks(found) == "bbbccc"
    assert found["rollout replica 0"] == "c"


def test_a_group_that_fits_on_no_node_is_divided_into_sequence_groups_on_few_nodes():
    overrides = ["placement.actor_ranks=8", "placement.sequence_ranks=2"]
    groups = groups_of(*CLUSTER, *overrides)
    assert ranks(placed(groups, gpus(3, 5, 1, 3))) == "bbbbaadd"
    # without room for whole sequence groups, the ranks are placed one by one
    assert ranks(placed(groups, gpus(*[1] * 8, cpus=64) | {"i": {"GPU": 1.0, "CPU": 1.0}})) == "abcdefgh"


def test_ranks_of_many_nodes_fill_one_node_after_the_other():
    groups = groups_of(*CLUSTER, "placement.actor_ranks=24", "placement.rollout_replicas=8")
    assert ranks(placed(groups, gpus(8, 8, 8, 8))) == "a" * 8 + "b" * 8 + "c" * 8


def test_an_engine_over_several_gpus_is_placed_before_a_group_that_would_take_its_node():
    groups = groups_of(*CLUSTER, *SHARDED_ENGINES, "placement.actor_ranks=6")
    found = placed(groups, gpus(6, 3, 1))
    assert found["rollout replica 0"] == "a"
    assert sorted(ranks(found)) == ["a", "a", "b", "b", "b", "c"]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (
            gpus(3, 3),
            "rollout replica 0 needs 4 GPUs and 1 CPU on one node; beside the other ranks and engines, node a lacks "
            "1 GPU, node b lacks 1 GPU",
        ),
        (
            gpus(4, 1),
            "actor rank 1 needs 1 GPU and 1 CPU on one node; beside the other ranks and engines, node a lacks 1 GPU, "
            "node b lacks 1 GPU",
        ),
        (
            {"a": {"GPU": 8.0, "CPU": 1.0}, "b": {"GPU": 8.0, "CPU": 1.0}},
            "actor rank 1 needs 1 GPU and 1 CPU on one node; beside the other ranks and engines, node a lacks 1 CPU, "
            "node b lacks 1 CPU",
        ),
        (
            gpus(4, 0, 0, 0, 0, 0),
            "actor rank 0 needs 1 GPU and 1 CPU on one node; beside the other ranks and engines, node a lacks 1 GPU, "
            "node b lacks 1 GPU, node c lacks 1 GPU, node d lacks 1 GPU, and 2 more nodes lack as much or more",
        ),
        ({}, "rollout replica 0 needs 4 GPUs and 1 CPU on one node; beside the other ranks and engines, there is no "
             "node"),
    ],
)  # fmt: skip
def test_a_process_without_room_is_named_with_what_each_node_lacks(nodes, text):
    groups = groups_of(*CLUSTER, *SHARDED_ENGINES, "placement.actor_ranks=2")
    with pytest.raises(NoRoomError) as caught:
        plan(groups, nodes)
    assert caught.value.described({node: f"node {node}" for node in nodes}) == text


def test_processes_that_share_a_bundle_are_named_together():
    with pytest.raises(NoRoomError) as caught:
        plan(groups_of(*COLOCATED), gpus(0))
    assert caught.value.described({"a": "node1 (10.0.0.1)"}).startswith(
        "training rank 0 and rollout replica 0 need 1 GPU and 1 CPU on one node; "
    )


def test_every_plan_uses_only_what_nodes_have_and_divides_no_group_that_would_fit_alone():
    for counts in [(8, 8), (7, 5, 4), (4, 4, 4, 4), (16,), (6, 6, 4), (2,) * 8]:
        for shard in (1, 2, 4, 8):
            groups = groups_of(*CLUSTER, "placement.actor_ranks=8", f"placement.shard_ranks={shard}",
                               "placement.rollout_replicas=8")  # fmt: skip
            found = ranks(placed(groups, gpus(*counts)))
            parts = [set(found[first : first + shard]) for first in range(0, 8, shard)]
            whole = sum(count // shard for count in counts)
            assert sum(len(part) == 1 for part in parts) == min(len(parts), whole)
