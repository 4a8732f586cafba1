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


def test_only_engines_get_the_environment_variables_of_their_description(made):
    config, _ = compose([])
    for name in ("training rank", placement.REPLICA, placement.ENVIRONMENT):
        placement.spawner(config, name, 1)(0)
    assert ["VLLM_CPU_OMP_THREADS_BIND" in environment for _, environment in made] == [False, True, False]


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ([], True, "expandable_segments:True"),
        ([], False, None),
        (["rollout.weight_transport=device_handles", "placement=colocated"], True, None),
    ],
)
def test_training_ranks_on_gpus_allocate_expandable_segments(made, monkeypatch, overrides, gpus, expected):
    monkeypatch.setattr(placement, "_has_gpus", lambda: gpus)
    config, _ = compose(overrides)
    for name in ("training rank", placement.REPLICA, placement.ENVIRONMENT):
        placement.spawner(config, name, 1)(0)
    assert [environment.get("PYTORCH_ALLOC_CONF") for _, environment in made] == [expected, None, None]


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
        reservation = SimpleNamespace(free=lambda: self.how.append("reservation"))
        return placement.Workers(rollout, rewards, None, [], reservation, None)


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, ["engines closed", "rewards", "reservation"]),
        (WorkerError("broke"), ["engines closed", "rewards", "reservation"]),
        (KeyboardInterrupt(), ["rewards", "reservation"]),
        (asyncio.CancelledError(), ["rewards", "reservation"]),
    ],
)
async def test_engines_may_finish_what_they_do_unless_the_run_is_to_stop_at_once(error, how):
    noted = Noted()
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        async with noted.workers():
            if error:
                raise error
    assert noted.how == how


@pytest.mark.parametrize(
    ("overrides", "gpus", "workers"),
    [
        (["placement.actor_ranks=2"], 8.0, ["training rank 0", "rollout replica 0", "training rank 1"]),
        (["placement.share_ranks=false"], 8.0, ["rollout replica 0", "actor rank 0"]),
        (["placement.actor_ranks=2"], 0.0, None),
        (["placement=disaggregated"], 0.0, ["rollout replica 0", "actor rank 0"]),
        (["placement=inprocess", "rollout=hf"], 8.0, None),
    ],
)
def test_the_devices_of_all_ranks_and_engines_are_reserved_unless_they_need_none(monkeypatch, overrides, gpus, workers):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": gpus})
    monkeypatch.setattr(placement, "Reservation", lambda groups, *, limit_s: (groups, limit_s))
    reservation = placement.reserve(compose(overrides)[0], ["actor"])
    if workers is None:
        assert reservation is None
    else:
        groups, limit_s = reservation
        assert [worker for group in groups for one in group.bundles for worker in one.workers] == workers
        assert limit_s == 300.0


def test_a_worker_starts_on_its_bundle_with_the_share_of_the_device_that_its_kind_needs(monkeypatch):
    asked = []

    def remote(**options):
        asked.append(options)
        actor = SimpleNamespace(remote=lambda *_, **__: None)
        return lambda _: SimpleNamespace(options=lambda **options: asked.append(options) or actor)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 8.0})
    reservation = SimpleNamespace(options=lambda worker: {"bundle of": worker})
    config = compose(["placement=colocated"])[0]
    placement.spawner(config, "rollout replica", 4, reservation=reservation)(3)
    assert (asked[0]["num_gpus"], asked[0]["num_cpus"]) == (0.5, 0.5)
    assert asked[1] == {"bundle of": "rollout replica 3"}
