"""Tests of runs with a rollout engine from a package outside rltrain."""

import pytest
from runs import WHOLE_STACK, train

pytestmark = pytest.mark.slow
ENGINE = ["rollout=hf", "rollout.engine=tests.e2e.my_engines.naive"]


def test_a_run_trains_with_an_engine_from_a_folder_of_its_own(tmp_path):
    words = [word for word in WHOLE_STACK if "deterministic" not in word]
    found = train(tmp_path / "run", *words, *ENGINE, "rollout.engine_options={answers_at_once: 16}")
    assert found.status == 0, found.stderr
    assert "answers    naive sampler" in found.stdout
    steps = found.metrics()
    assert [row["step"] for row in steps] == [1, 2, 3]
    # The engine samples from the actor's present weights.
    assert all(row["rollout/log_prob_gap"] < 1e-5 for row in steps)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout.engine_options={speed: 2}"],
            "engine_options.speed: the engine naive sampler has no such option; its options are answers_at_once",
        ),
        (
            ["model.lora.rank=4", "rollout.engine_options={answers_at_once: 2}"],
            "the naive sampler cannot merge adapters",
        ),
        (
            ["actor.router_replay=engine"],
            "with rollout.engine=tests.e2e.my_engines.naive: naive sampler records no experts",
        ),
        ([], "without its option: set 'rollout.engine_options={answers_at_once: NUMBER}'"),
        (["trainer.deterministic=true", "placement.rollout_replicas=2"], "with 2 naive sampler replicas: which"),
    ],
)
def test_a_setting_that_the_engine_does_not_support_is_refused(tmp_path, words, message):
    found = train(tmp_path / "run", *ENGINE, *words)
    assert found.status == 2
    assert message in found.stderr
