"""Runs that train on the stored answers of an earlier run."""

import pytest
from runs import SMALL, train, train_here
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
RUN = [
    *SMALL, "rollout=hf", "placement=inprocess", "trainer.total_steps=3", "trainer.deterministic=true", "data.val=null",
]  # fmt: skip


def weights(run):
    return load_file(run.output / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    return train(tmp_path_factory.mktemp("earlier") / "run", *RUN)


@pytest.mark.usefixtures("settings_restored")
def test_a_run_on_stored_answers_repeats_the_updates_bitwise(earlier, tmp_path):
    run = train_here(tmp_path / "run", *RUN, "rollout=stored", f"rollout.run={earlier.output}")
    assert (run.status, run.stderr) == (0, "")
    assert run.metrics()[0]["actor/grad_norm"] > 0
    assert run.timeless() == earlier.timeless()
    assert run.samples().keys() == earlier.samples().keys()
    for name, table in run.samples().items():
        assert table == earlier.samples()[name]
    again, first = weights(run), weights(earlier)
    assert again.keys() == first.keys()
    assert all(again[name].equal(first[name]) for name in first)


@pytest.mark.usefixtures("settings_restored")
def test_another_loss_trains_on_the_same_answers_to_other_weights(earlier, tmp_path):
    run = train_here(tmp_path / "run", *RUN, "algorithm=gspo", "rollout=stored", f"rollout.run={earlier.output}")
    assert run.status == 0, run.stderr
    for name, table in run.samples().items():
        assert table["response_ids"] == earlier.samples()[name]["response_ids"]
    other, first = weights(run), weights(earlier)
    assert not any(other[name].equal(first[name]) for name in first)


@pytest.mark.broad
def test_engines_and_ranks_in_processes_of_their_own_train_on_stored_answers(earlier, tmp_path):
    run = train(
        tmp_path / "run", *RUN, "placement=local", "placement.actor_ranks=2", "rollout=stored",
        f"rollout.run={earlier.output}",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert run.survivors == []
    for name, table in run.samples().items():
        assert table["response_ids"] == earlier.samples()[name]["response_ids"]
