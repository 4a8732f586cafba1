"""Tests of the driver's benchmark: simulated ranks behave like real ranks, and a batch is sent once."""

from rltrain.settings.compose import compose
from tests.benchmarks.driver import OVERRIDES, bytes_per_step, measured, pickled, rollouts


async def test_simulated_ranks_take_the_calls_of_a_step_and_the_driver_accepts_what_they_return():
    phases = await measured(pickled(2), rollouts(), compose(OVERRIDES)[0], rounds=1)
    assert list(phases) == ["log-probs", "credit", "mini-batches", "update", "all"]
    assert all(seconds >= 0 for seconds in phases.values())


def test_the_driver_sends_only_token_ids_twice_however_many_ranks_there_are():
    """An update moves rows to other ranks than the earlier forward passes, so the rows' token ids are sent again."""
    batch, config = rollouts(), compose(OVERRIDES)[0]
    one, eight, many = (bytes_per_step(ranks, batch, config) for ranks in (1, 8, 64))
    columns = 8 * (len(batch.values("prompts")) + len(batch.values("responses")))  # token ids, int64
    assert columns < one < eight < many < 1.05 * (one + columns)
