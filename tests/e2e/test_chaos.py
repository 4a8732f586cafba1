"""The runs of `make chaos` lose no results, although one process of each run is killed or stopped by a signal."""

import psutil
import pytest

from tests.chaos.runs import ASYNCHRONOUS, CONVERSATIONS, distillation, run, start, usual
from tests.chaos.strikes import named

pytestmark = pytest.mark.broad
STRIKES = named(
    ["gcs_server:update_actor:KILL", "reference:ref_log_probs:STOP", "reference:generate:KILL",
     "actor:update_actor:KILL", "driver:checkpoint:KILL", "rollout:generate:KILL", "reward:generate:KILL",
     "actor:sync_weights:STOP", "driver:start:KILL"]
)  # fmt: skip


def children() -> set[int]:
    """Return the pids of the test process's own children, including adopted orphans of a run."""
    return {process.pid for process in psutil.Process().children()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos") / "undisturbed"
    before = children()
    life = start(folder, None, {})
    assert (life.status, life.left) == (0, []), life.said
    assert children() <= before, "orphans of the run were adopted but not reaped"
    return folder


@pytest.mark.parametrize("strike", [pytest.param(strike, id=strike.name) for strike in STRIKES])
def test_F4_a_run_whose_process_is_struck_ends_with_the_weights_and_the_ledger_of_an_undisturbed_one(
    strike, undisturbed, tmp_path
):
    outcome = run(strike, tmp_path / "struck", undisturbed, usual(undisturbed))
    assert not outcome.wrong
    assert outcome.detected_s is not None, "the run did not report the failure"
    # After a rank's death, the current training step is repeated. The previous step is also repeated if its checkpoint
    # was unfinished.
    assert outcome.repeated <= (0 if strike.role in ("rollout", "reward") else 2)


def test_F4_a_training_rank_that_dies_in_a_weight_sync_while_answers_are_under_way_is_replaced_too(
    undisturbed, tmp_path
):
    (strike,) = named(["actor:sync_weights:KILL"])
    outcome = run(strike, tmp_path / "struck", undisturbed, {}, *ASYNCHRONOUS)
    assert not outcome.wrong
    assert outcome.detected_s is not None, "the run did not report the failure"


@pytest.mark.parametrize("name", ["environment:update_actor:KILL", "rollout:sync_weights:KILL"])
def test_T5_conversations_that_go_on_during_training_survive_the_death_of_their_processes(name, undisturbed, tmp_path):
    (strike,) = named([name])
    outcome = run(strike, tmp_path / "struck", undisturbed, {}, *ASYNCHRONOUS, *CONVERSATIONS)
    assert not outcome.wrong
    assert outcome.detected_s is not None, "the run did not report the failure"
    assert outcome.repeated == 0


def test_F4_a_run_whose_teacher_or_driver_dies_ends_as_an_undisturbed_one(tmp_path):
    overrides = distillation(tmp_path)
    undisturbed = tmp_path / "undisturbed"
    assert start(undisturbed, None, {}, *overrides).status == 0
    for strike in named(["teacher:teacher_log_probs:KILL", "driver:update_actor:KILL"]):
        outcome = run(strike, tmp_path / strike.name, undisturbed, usual(undisturbed), *overrides)
        assert not outcome.wrong
        assert outcome.detected_s is not None, "the run did not report the failure"
