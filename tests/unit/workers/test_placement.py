"""Tests of the resources and environment variables that each placement gives to worker processes."""

import asyncio
import contextlib
import os
from types import SimpleNamespace

import pytest
import ray
import torch

from rltrain.base.errors import WorkerError
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID
from workers import placement
from workers.cluster.shared_devices import SharedDevices


@pytest.fixture
def made(monkeypatch):
    """Replace Ray by a fake, and return the list of (options, environment) of all Ray actors that the test requests."""
    found = []

    def remote(**options):
        return lambda _: SimpleNamespace(remote=lambda environment, **_: found.append((options, environment)))

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0})
    monkeypatch.setattr(placement, "cpu_cores", lambda: 12)
    return found


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        (["placement.actor_ranks=3"], "4"),
        # the engine computes at the same time as the training ranks
        (["placement.actor_ranks=3", "trainer.max_staleness=1"], "3"),
        (["placement.actor_ranks=3", "placement.threads_per_worker=7"], "7"),
        (["placement.actor_ranks=24"], "1"),
    ],
)
def test_the_cores_that_may_be_used_are_shared_out_as_threads(made, overrides, threads):
    config, _ = compose(overrides)
    spawn = placement.spawner(config, "training rank", config.placement.actor_ranks)
    processes = [spawn(rank) for rank in range(config.placement.actor_ranks)]
    assert [process.name for process in processes] == [f"training rank {rank}" for rank in range(len(processes))]
    assert [environment["OMP_NUM_THREADS"] for _, environment in made] == [threads] * config.placement.actor_ranks
    assert {environment["OMP_WAIT_POLICY"] for _, environment in made} == {"PASSIVE"}


@pytest.mark.parametrize(("setting", "threads"), [("3", 3), ("null", 2)])
async def test_without_ray_the_one_process_has_the_threads_asked_for_or_keeps_its_own(
    monkeypatch, start, tasks, setting, threads
):
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in os.environ if name != "OMP_NUM_THREADS"})
    torch.set_num_threads(2)
    own = ["placement=inprocess", "rollout=hf", f"placement.threads_per_worker={setting}"]
    try:
        async with await placement.start(compose(own)[0], start, [EOS_ID], tasks, needs_critic=False):
            pass
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


class Noted:
    """Fake parts of a run, which record the calls that end each part."""

    def __init__(self):
        self.how = []

    async def _closed(self):
        self.how.append("engines closed")

    def workers(self):
        rollout = SimpleNamespace(close=self._closed)
        rewards = SimpleNamespace(close=lambda: self.how.append("rewards"))
        devices = SimpleNamespace(free=lambda: self.how.append("devices"))
        return placement.Workers(rollout, rewards, None, [], devices, None)


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, ["engines closed", "rewards", "devices"]),
        (WorkerError("broke"), ["engines closed", "rewards", "devices"]),
        (KeyboardInterrupt(), ["rewards", "devices"]),
        (asyncio.CancelledError(), ["rewards", "devices"]),
    ],
)
async def test_engines_may_finish_what_they_do_unless_the_run_is_to_stop_at_once(error, how):
    noted = Noted()
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        async with noted.workers():
            if error:
                raise error
    assert noted.how == how


def test_a_ray_of_its_own_has_the_cores_that_may_be_used(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(placement, "cpu_cores", lambda: 12)
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(placement.ray_daemons, "find", lambda: (tmp_path, []))
    placement.connect(compose(["verbose=true"])[0])
    placement.disconnect()
    assert asked["num_cpus"] == 12


def test_devices_of_one_machine_are_numbered_one_after_the_other(monkeypatch):
    """Ray assigns the bundles of a large placement group to machines in arbitrary order.

    Machines with more devices must come first in the numbering of devices.
    """
    nodes = {0: "b", 1: "a", 2: "b", 3: "a", 4: "a", 5: "c"}
    asked = []

    def group(bundles, *, strategy):
        asked.append((bundles, strategy))
        return SimpleNamespace(ready=lambda: "ready")

    monkeypatch.setattr(ray.util, "placement_group", group)
    monkeypatch.setattr(ray, "wait", lambda pending, *, timeout: (pending, []))
    monkeypatch.setattr(ray.util, "placement_group_table", lambda _: {"bundles_to_node_id": nodes})
    devices = SharedDevices(6, cpus=1.0, limit_s=9.0)
    assert asked == [([{"GPU": 1.0, "CPU": 1.0}] * 6, "PACK")]
    assert devices.bundles == [1, 3, 4, 0, 2, 5]
    assert devices.options(2)["scheduling_strategy"].placement_group_bundle_index == 4


@pytest.mark.parametrize("interrupted", [True, False])
def test_devices_that_are_not_waited_for_to_the_end_are_given_up(monkeypatch, interrupted):
    def wait(pending, *, timeout):
        if interrupted:
            raise KeyboardInterrupt
        return [], pending

    removed = []
    monkeypatch.setattr(ray.util, "placement_group", lambda *_, **__: SimpleNamespace(ready=lambda: "ready"))
    monkeypatch.setattr(ray.util, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray, "wait", wait)
    with pytest.raises(KeyboardInterrupt if interrupted else WorkerError):
        SharedDevices(6, cpus=0.0, limit_s=9.0)
    assert len(removed) == 1


@pytest.mark.parametrize(
    ("overrides", "gpus", "count"),
    [
        (["placement.actor_ranks=3"], 8.0, 3),
        (["placement.rollout_replicas=5"], 8.0, 5),
        (["placement.actor_ranks=3"], 0.0, None),
        (["placement.share_ranks=false"], 8.0, None),
        (["placement=inprocess", "rollout=hf"], 8.0, None),
    ],
)
def test_only_ranks_and_engines_that_share_gpus_have_them_set_aside(monkeypatch, overrides, gpus, count):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": gpus})
    monkeypatch.setattr(placement, "SharedDevices", lambda count, **limits: (count, limits))
    expected = None if count is None else (count, {"cpus": 0.0, "limit_s": 300.0})
    assert placement.shared_devices(compose(overrides)[0]) == expected
