"""Runs on a cluster of three hosts whose network, Ray daemons or power fail in the middle of a training step."""

import pytest
from faults import (
    HEAD,
    HEAD_ALONE,
    LINK_5,
    LINK_60,
    NO_ROOM,
    POWER,
    PROMPTS,
    RAYLET,
    STEPS,
    Fault,
    Outcome,
    Run,
    mend,
    suffer,
)
from hosts import Cluster, hosts

from tests.chaos.runs import weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as made:
        yield Cluster(made, {"OMP_NUM_THREADS": "1"})  # each test starts Ray on the hosts that lack it


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> dict[str, bytes]:
    """Return the final weights of a run without a fault."""
    mend(cluster)
    run = Run(cluster, tmp_path_factory.mktemp("undisturbed"))
    run.start()
    assert run.end() == 0, (run.folder / "log.txt").read_text()[-2000:]
    return weights(run.output / "model")


def complete(outcome: Outcome) -> None:
    """Assert that a run ended, trained once on each prompt group, and left no process behind."""
    print(outcome)  # noqa: T201
    assert outcome.status == 0, outcome
    assert outcome.steps == list(range(1, STEPS + 1))
    assert outcome.used == list(range(STEPS * PROMPTS))
    assert outcome.left == []


def replaced(outcome: Outcome) -> None:
    """Assert that a run named the lost host in a log message, and continued from the last checkpoint."""
    complete(outcome)
    assert any(outcome.host in text and "the training ranks start again" in text for text in outcome.said), outcome
    assert outcome.repeated <= 2  # the checkpoint of the step before the fault may not have been complete


def test_a_run_outlives_the_raylet_of_a_host_with_a_training_rank(cluster, tmp_path):
    replaced(suffer(cluster, RAYLET["update_actor"], tmp_path))


@pytest.mark.broad
@pytest.mark.parametrize("phase", [phase for phase in RAYLET if phase != "update_actor"])
def test_a_raylet_may_die_in_each_phase_and_the_weights_stay_the_same(cluster, tmp_path, undisturbed, phase):
    replaced(suffer(cluster, RAYLET[phase], tmp_path))
    assert weights(tmp_path / "out" / "model") == undisturbed


@pytest.mark.broad
def test_a_short_break_of_a_link_costs_nothing_but_time(cluster, tmp_path, undisturbed):
    outcome = suffer(cluster, LINK_5, tmp_path)
    complete(outcome)
    assert (outcome.said, outcome.repeated) == ([], 0)
    assert weights(tmp_path / "out" / "model") == undisturbed


@pytest.mark.broad
@pytest.mark.parametrize("fault", [LINK_60, POWER], ids=["link_down_60_s", "power_loss"])
def test_a_host_that_is_off_the_network_is_replaced(cluster, tmp_path, undisturbed, fault: Fault):
    replaced(suffer(cluster, fault, tmp_path))
    assert weights(tmp_path / "out" / "model") == undisturbed


@pytest.mark.broad
def test_a_run_without_room_for_the_processes_of_a_lost_host_names_it_in_one_line_and_continues_later(
    cluster, tmp_path
):
    outcome = suffer(cluster, NO_ROOM, tmp_path)
    complete(outcome)
    assert outcome.first_status == 1
    (line,) = (text for text in outcome.said if text.startswith("error: "))
    assert outcome.host in line
    assert "did not start within placement.start_timeout_s=120 s; are enough resources free?" in line
    assert line.endswith("continue with trainer.resume=auto")


@pytest.mark.broad
def test_a_job_that_is_submitted_again_after_the_death_of_its_head_and_driver_continues(cluster, tmp_path, undisturbed):
    outcome = suffer(cluster, HEAD, tmp_path)
    complete(outcome)
    assert outcome.first_status == -9
    # The step in which the head died is repeated, and the step before it if its checkpoint was not yet complete.
    assert outcome.repeated in (1, 2)
    assert weights(tmp_path / "out" / "model") == undisturbed


@pytest.mark.broad
def test_a_run_that_loses_the_head_alone_names_it_in_one_line_and_continues_when_submitted_again(
    cluster, tmp_path, undisturbed
):
    outcome = suffer(cluster, HEAD_ALONE, tmp_path)
    complete(outcome)
    assert outcome.first_status == 1
    (line,) = (text for text in outcome.said if text.startswith("error: "))
    assert f"Ray's gcs_server on node {cluster.hosts[0].address} no longer answers" in line
    assert "start the run again with trainer.resume=auto" in line
    assert weights(tmp_path / "out" / "model") == undisturbed
