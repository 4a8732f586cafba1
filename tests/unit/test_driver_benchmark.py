"""Test that the fake ranks of the driver's benchmark still have the interface of real ranks."""

from rltrain.settings.compose import compose
from tests.benchmarks.driver import OVERRIDES, measured, pickled, rollouts


async def test_simulated_ranks_take_the_calls_of_a_step_and_the_driver_accepts_what_they_return():
    phases = await measured(pickled(2), rollouts(), compose(OVERRIDES)[0], rounds=1)
    assert list(phases) == ["log-probs", "credit", "mini-batches", "update", "all"]
    assert all(seconds >= 0 for seconds in phases.values())
