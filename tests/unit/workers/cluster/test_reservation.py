"""Tests of the reservation of a run's CPUs and GPUs, with a fake of Ray's placement groups."""

from types import SimpleNamespace

import pytest
import ray
import ray._private.state

from rltrain.base.errors import ConfigError, WorkerError
from workers.cluster import reservation as module
from workers.cluster.bundle_plan import Bundle, BundleGroup
from workers.cluster.reservation import Reservation


def group(*names: str, gpus: float = 1.0) -> BundleGroup:
    bundles = tuple(Bundle((name,), {"GPU": gpus}) for name in names)
    return BundleGroup(bundles, (len(names), 1) if len(names) > 1 else (1,))


RANKS = group("actor rank 0", "actor rank 1")
ENGINES = [group("rollout replica 0"), group("rollout replica 1")]


class FakeRay:
    """A fake of Ray's placement groups. A placement group becomes ready if the function `ready` returns True for it.

    Attributes:
        nodes: maps the id of each node to its number of GPUs.
        free: maps the id of each node to its number of free GPUs.
        made: all placement groups, each with its bundles, its chosen nodes and whether it was removed.
        table: the nodes that Ray chooses for bundles.
    """

    def __init__(self, monkeypatch, **nodes: float) -> None:
        self.nodes, self.free, self.made, self.table = dict(nodes), dict(nodes), [], {}
        self.ready = lambda made: True
        monkeypatch.setattr(ray, "nodes", self._nodes)
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray.util, "placement_group", self._group)
        monkeypatch.setattr(ray.util, "remove_placement_group", lambda made: setattr(made, "removed", True))
        monkeypatch.setattr(ray.util, "placement_group_table", lambda _: {"bundles_to_node_id": self.table})
        free = lambda: {node: {"GPU": count} for node, count in self.free.items()}  # noqa: E731
        monkeypatch.setattr(ray._private.state, "available_resources_per_node", free)
        monkeypatch.setattr(module, "_SEEN_S", 0.0)

    def _nodes(self):
        return [
            {"NodeID": node, "Alive": True, "Resources": {"GPU": count}, "NodeManagerHostname": f"host-{node}",
             "NodeManagerAddress": f"10.0.0.{number}"}
            for number, (node, count) in enumerate(self.nodes.items())
        ]  # fmt: skip

    def _group(self, bundles, *, strategy, bundle_label_selector=None):
        assert strategy == "PACK"
        nodes = bundle_label_selector and [one["ray.io/node-id"] for one in bundle_label_selector]
        made = SimpleNamespace(bundles=bundles, nodes=nodes, removed=False)
        made.ready = lambda: made
        self.made.append(made)
        return made

    def _wait(self, pending, *, timeout):
        assert timeout >= 0
        done = [made for made in pending if self.ready(made)]
        return done, [made for made in pending if made not in done]


def bundle_of(reservation: Reservation, worker: str) -> tuple[object, int]:
    strategy = reservation.options(worker)["scheduling_strategy"]
    return strategy.placement_group, strategy.placement_group_bundle_index


def test_all_bundles_are_reserved_at_once_on_the_chosen_nodes(monkeypatch):
    cluster = FakeRay(monkeypatch, a=2, b=3)
    reservation = Reservation([*ENGINES, RANKS], limit_s=9.0)
    (made,) = cluster.made
    assert made.bundles == [{"GPU": 1.0}] * 4
    assert made.nodes == ["b", "b", "a", "a"]
    assert bundle_of(reservation, "rollout replica 1") == (made, 1)
    assert bundle_of(reservation, "actor rank 1") == (made, 3)
    assert [reservation.node_of(f"actor rank {rank}") for rank in (0, 1)] == ["a", "a"]
    reservation.free()
    assert made.removed


def test_a_worker_without_a_bundle_takes_what_is_free(monkeypatch):
    FakeRay(monkeypatch, a=4)
    reservation = Reservation([*ENGINES, RANKS], limit_s=9.0)
    assert reservation.options("rollout replica 2") == {}
    assert reservation.node_of("rollout replica 2") is None


def test_a_run_that_fits_on_no_cluster_of_this_size_is_refused_at_once(monkeypatch):
    cluster = FakeRay(monkeypatch, a=2, b=1)
    with pytest.raises(ConfigError) as caught:
        Reservation([*ENGINES, RANKS], limit_s=9.0)
    assert str(caught.value) == (
        "placement: rollout replica 1 needs 1 GPU on one node; beside the other ranks and engines, host-a (10.0.0.0) "
        "lacks 1 GPU, host-b (10.0.0.1) lacks 1 GPU; use fewer ranks or engines, a smaller "
        "rollout.vllm.tensor_parallel_size, or more or larger nodes"
    )
    assert cluster.made == []


def test_if_the_resources_are_not_free_yet_ray_chooses_the_nodes_and_groups_stay_together_where_possible(monkeypatch):
    cluster = FakeRay(monkeypatch, a=2, b=2)
    cluster.free = {"a": 0, "b": 1}
    cluster.table = {0: "a", 1: "b", 2: "a", 3: "b"}
    reservation = Reservation([*ENGINES, RANKS], limit_s=9.0)
    (made,) = cluster.made
    assert made.nodes is None
    bundles = [bundle_of(reservation, f"actor rank {rank}")[1] for rank in (0, 1)]
    assert len({cluster.table[bundle] for bundle in bundles}) == 1
    others = [bundle_of(reservation, f"rollout replica {number}")[1] for number in (0, 1)]
    assert sorted([*bundles, *others]) == [0, 1, 2, 3]


def test_engines_over_several_gpus_get_none_of_the_bundles_of_ranks(monkeypatch):
    cluster = FakeRay(monkeypatch, a=4)
    cluster.free = {"a": 0}
    cluster.table = dict.fromkeys(range(3), "a")
    reservation = Reservation([group("rollout replica 0", gpus=2.0), RANKS], limit_s=9.0)
    made = cluster.made[0]
    assert made.bundles == [{"GPU": 2.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    assert bundle_of(reservation, "rollout replica 0") == (made, 0)


def test_if_another_run_is_faster_ray_chooses_other_nodes(monkeypatch):
    cluster = FakeRay(monkeypatch, a=2, b=2)
    cluster.ready = lambda made: made.nodes is None
    cluster.table = {0: "a", 1: "a", 2: "b", 3: "b"}
    Reservation([*ENGINES, RANKS], limit_s=9.0)
    assert [(made.nodes is None, made.removed) for made in cluster.made] == [(False, True), (True, False)]


def test_resources_that_are_not_free_in_time_are_an_error_that_names_them_and_nothing_stays_reserved(monkeypatch):
    cluster = FakeRay(monkeypatch, a=2, b=2)
    cluster.free = {"a": 2, "b": 1}
    cluster.ready = lambda made: False
    with pytest.raises(WorkerError) as caught:
        Reservation([*ENGINES, RANKS], limit_s=9.0)
    assert str(caught.value) == (
        "starting: the training ranks and engines had no room within placement.start_timeout_s=9 s: rollout replica 1 "
        "needs 1 GPU on one node; beside the other ranks and engines, host-a (10.0.0.0) lacks 1 GPU, host-b (10.0.0.1) "
        "lacks 1 GPU; use fewer ranks and engines, or wait for other runs to end"
    )
    assert [made.removed for made in cluster.made] == [True]


def test_a_start_that_is_interrupted_leaves_nothing_reserved(monkeypatch):
    cluster = FakeRay(monkeypatch, a=4)

    def interrupt(_):
        raise KeyboardInterrupt

    cluster.ready = interrupt
    with pytest.raises(KeyboardInterrupt):
        Reservation([*ENGINES, RANKS], limit_s=9.0)
    assert [made.removed for made in cluster.made] == [True]


def test_ranks_whose_node_is_lost_get_other_bundles_together_and_an_engine_gets_its_own(monkeypatch):
    cluster = FakeRay(monkeypatch, a=3, b=2)
    workers = ["actor rank 0", "actor rank 1", "rollout replica 0", "rollout replica 1"]
    reservation = Reservation([RANKS, *ENGINES], limit_s=9.0)
    first = cluster.made[0]
    assert first.nodes == ["b", "b", "a", "a"]
    assert [bundle_of(reservation, worker) for worker in workers] == [(first, bundle) for bundle in range(4)]

    cluster.nodes = cluster.free = {"a": 1, "c": 2, "d": 2}
    assert bundle_of(reservation, "rollout replica 0") == (first, 2)  # the engine's node is alive
    second = bundle_of(reservation, "actor rank 1")[0]
    assert (second.bundles, second.nodes) == ([{"GPU": 1.0}] * 2, ["c", "c"])
    assert bundle_of(reservation, "actor rank 1") == (second, 1)
    assert bundle_of(reservation, "actor rank 0") == (second, 0)

    cluster.nodes = cluster.free = {"c": 0, "d": 1}
    third = bundle_of(reservation, "rollout replica 1")[0]
    assert (third.bundles, third.nodes) == ([{"GPU": 1.0}], ["d"])
    cluster.free = {"c": 0, "d": 0}
    fourth, index = bundle_of(reservation, "rollout replica 0")
    assert (fourth.nodes, index) == (None, 0)  # nothing is free, so Ray chooses the node later
    assert len(cluster.made) == 4
    reservation.free()
    assert all(made.removed for made in cluster.made)


def test_a_worker_that_starts_for_the_first_time_does_not_ask_ray_for_its_nodes(monkeypatch):
    cluster = FakeRay(monkeypatch, a=4)
    reservation = Reservation([*ENGINES, RANKS], limit_s=9.0)
    asked = []
    monkeypatch.setattr(ray, "nodes", lambda: asked.append(1) or cluster._nodes())
    reservation.options("actor rank 0")
    assert asked == []
    reservation.options("actor rank 0")
    assert asked == [1]
