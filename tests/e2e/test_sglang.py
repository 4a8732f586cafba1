"""A run with the SGLang engine. A stand-in takes the place of the library SGLang, which needs a GPU."""

import os

import pytest
from runs import ROOT, WHOLE_STACK, finish, start

pytestmark = pytest.mark.slow


def test_a_run_trains_with_the_sglang_engine_and_a_stand_in_for_sglang(tmp_path):
    words = [word for word in WHOLE_STACK if "deterministic" not in word]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "stand_ins")])
    output = tmp_path / "run"
    process = start(output, *words, "rollout=sglang", python_path=path)
    found = finish(process, output)
    assert found.status == 0, found.stderr
    assert "answers    SGLang" in found.stdout
    steps = found.metrics()
    assert [row["step"] for row in steps] == [1, 2, 3]
    # The engine samples from the actor's present weights.
    assert all(row["rollout/log_prob_gap"] < 1e-5 for row in steps)
