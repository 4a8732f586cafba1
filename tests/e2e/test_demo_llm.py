"""`make demo-llm` and `make demo-reasoning`: a real language model, SmolLM2-135M-Instruct, on a laptop."""

import pytest
import yaml

from rltrain.rewards.numeric_match import numeric_match
from tests.e2e.runs import ROOT, train

DEMOS = ROOT / "examples" / "demo_llm"
MODEL = ROOT / "build" / "smollm2" / "model"


@pytest.mark.parametrize("demo", ["sums", "reasoning"])
def test_the_reward_of_the_demo_accepts_the_forms_in_which_the_model_answers(demo):
    assert yaml.safe_load((DEMOS / f"{demo}.yaml").read_text())["reward"] == {"functions": ["numeric_match"]}
    for right in ["7", "3 + 4 = 7", "The answer is 7."]:
        assert numeric_match("What is 3 + 4? Answer with the number only.", right, answer="7") == 1.0
    for wrong in ["", "3 + 4", "7 + 1 = 8", "The answer is 34."]:
        assert numeric_match("What is 3 + 4? Answer with the number only.", wrong, answer="7") == 0.0


@pytest.mark.broad
@pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="make demo-llm installs the model")
def test_the_model_solves_some_but_not_all_sums_before_training(tmp_path):
    run = train(tmp_path / "run", "--config", str(DEMOS / "sums.yaml"), "trainer.total_steps=1", "trainer.eval_every=0")
    assert run.status == 0, run.stderr
    assert 0.3 < run.lines("evaluations.jsonl")[0]["eval/greedy_accuracy"] < 0.8
    (step,) = run.metrics()
    assert step["reward/mean"] > 0
    assert step["actor/grad_norm"] > 0
