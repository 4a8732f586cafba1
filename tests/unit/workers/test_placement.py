"""What processes of a placement are given."""

from types import SimpleNamespace

import pytest
import ray

from rltrain.compose import compose
from workers import placement


@pytest.fixture
def made(monkeypatch):
    """What Ray is asked for: (options, environment) of each actor; nothing starts."""
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
        (["placement.actor_ranks=3", "trainer.max_staleness=1"], "3"),  # an engine computes beside them
        (["placement.actor_ranks=3", "placement.threads_per_worker=7"], "7"),
        (["placement.actor_ranks=24"], "1"),
    ],
)
def test_the_cores_that_may_be_used_are_shared_out_as_threads(made, overrides, threads):
    config, _ = compose(overrides)
    placement.ray_hosts(config, "training rank", config.placement.actor_ranks)
    assert [environment["OMP_NUM_THREADS"] for _, environment in made] == [threads] * config.placement.actor_ranks


def test_a_ray_of_its_own_has_the_cores_that_may_be_used(monkeypatch):
    asked = {}
    monkeypatch.setattr(placement, "cpu_cores", lambda: 12)
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    placement.connect(compose(["verbose=true"])[0])
    assert asked["num_cpus"] == 12
