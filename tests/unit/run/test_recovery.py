"""Tests of restarts of the training ranks: the number of restarts, the growing pauses, and the final error."""

import logging
from types import SimpleNamespace

import pytest

from rltrain.base.errors import WorkerError, WorkerLost
from rltrain.run import recovery
from rltrain.run.recovery import PAUSES_S, Restarts

LOST = WorkerLost("actor.update: training rank 1 is gone")


@pytest.fixture
def pauses(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(recovery, "asyncio", SimpleNamespace(sleep=sleep))
    return slept


async def test_each_restart_waits_longer_and_says_who_died_where_and_from_which_step_the_run_goes_on(pauses, caplog):
    done = []

    async def restart():
        done.append("restart")

    restarts = Restarts(restart, 3)
    with caplog.at_level(logging.WARNING):
        await restarts.after(LOST, 4)
        await restarts.after(LOST, 8)
    assert (done, pauses) == (["restart"] * 2, list(PAUSES_S[:2]))
    assert caplog.messages == [
        "actor.update: training rank 1 is gone: the training ranks start again, from step 4 (restart 1 of 3)",
        "actor.update: training rank 1 is gone: the training ranks start again in 2 s, from step 8 (restart 2 of 3)",
    ]


async def test_ranks_that_die_while_they_start_count_too_and_the_end_is_one_line(pauses):
    tried = []

    async def restart():
        tried.append(1)
        raise WorkerLost("starting: training rank 0 died while it started")

    with pytest.raises(
        WorkerError, match=r"^actor.update: .* rank 1 is gone; .* rank 0 died while it started; .* restarted 3 times"
    ) as told:
        await Restarts(restart, 3).after(LOST, 0)
    assert len(tried) == 3
    # The error must not be a WorkerLost, because the trainer restarts the ranks again after a WorkerLost.
    assert not isinstance(told.value, WorkerLost)


async def test_an_error_of_a_fresh_rank_is_not_tried_again(pauses):
    async def restart():
        raise WorkerError("no such model")

    with pytest.raises(WorkerError, match=r"^no such model$"):
        await Restarts(restart, 3).after(LOST, 0)


async def not_called():
    raise AssertionError("no restart is allowed")


@pytest.mark.parametrize(("restart", "limit"), [(None, 3), (not_called, 0)])
async def test_where_no_restart_is_possible_or_allowed_the_death_ends_the_run(pauses, restart, limit):
    with pytest.raises(WorkerError, match=r"training rank 1 is gone; the training ranks were restarted 0 times"):
        await Restarts(restart, limit).after(LOST, 0)
    assert pauses == []
