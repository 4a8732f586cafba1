"""Runs with tiny random models of several families: training, verified weight syncs, and resuming from a checkpoint."""

import json

import pytest
from own_models import save_model
from runs import train

from tests.attention_families import FAMILIES

pytestmark = pytest.mark.slow
WITH_VLLM = ["mistral", "olmo2", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "olmoe"]
REPLAYED = ["qwen3_moe", "olmoe"]  # Model families that are trained with `actor.router_replay`.
# vLLM has its own implementation of Gemma 2, but runs OLMo 2 with the implementation of transformers.
EVERY_DAY = {("qwen3_moe", "hf"), ("gemma2", "vllm"), ("olmo2", "vllm")}
CASES = [
    pytest.param(*case, marks=[] if case in EVERY_DAY else pytest.mark.broad)
    for case in [*((family, "hf") for family in FAMILIES), *((family, "vllm") for family in WITH_VLLM)]
]


@pytest.mark.parametrize(("family", "engine"), CASES)
def test_a_family_trains_with_verified_syncs_and_resumes(family, engine, tmp_path):
    # OLMoE derives the width of a head, 32, from the hidden size.
    options = FAMILIES[family] | ({"hidden_size": 128} if family == "olmoe" else {})
    save_model(tmp_path / "model", family, positions=128, **options)
    rows = [{"prompt": f"Say {number} twice", "answer": str(number)} for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_reward.py").write_text("def letters(prompt, response):\n    return len(set(response)) / 16\n")
    overrides = [
        "profile=demo", f"rollout={engine}", f"model.path={tmp_path}/model", f"data.train={tmp_path}/prompts.jsonl",
        "data.val=null", f"reward.functions=[{tmp_path}/my_reward.py:letters]", "rollout.max_prompt_length=64",
        "rollout.max_response_length=16", "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=2",
        "rollout.samples_per_prompt=4", "algorithm.kl_loss.kl_loss_coef=0.01", "trainer.save_every=2",
    ]  # fmt: skip
    if engine == "hf":
        overrides.append("placement=inprocess")
    if family in REPLAYED:
        overrides.append(f"actor.router_replay={'engine' if engine == 'hf' else 'actor'}")
    run = train(tmp_path / "run", *overrides, "trainer.total_steps=2")
    assert run.status == 0, run.stderr
    run = train(tmp_path / "run", *overrides, "trainer.total_steps=3", "trainer.resume=auto")
    assert run.status == 0, run.stderr
    metrics = run.metrics()
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert max(row["rollout/log_prob_gap_max"] for row in metrics) < 1e-4
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
    assert all(row["sync/verified"] == 1 for row in metrics if "sync/verified" in row)
