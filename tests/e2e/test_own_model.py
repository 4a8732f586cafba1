"""Runs with a user's own model, data and reward: several architectures, chat templates and a reward file."""

import json

import pyarrow.parquet as pq
import pytest
from own_models import SPECIAL, save_model
from runs import train

pytestmark = pytest.mark.slow
REWARD = """
def vowels(prompt, response, *, wanted, finish_reason):
    assert "<|" not in prompt and "<|" not in response, "special tokens reached the reward function"
    return sum(response.count(letter) for letter in wanted) / 8
"""


@pytest.fixture
def folder(tmp_path):
    """Make a folder with a file of chat prompts and a reward file.

    The prompts have an extra column, `wanted`.
    """
    rows = [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Say {n}"}],
            "wanted": "aeiou",
        }
        for n in range(12)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.broad), "qwen3"])
def test_another_architecture_trains_through_vllm_with_a_chat_template_and_a_reward_file(folder, name):
    save_model(folder / "model", name, positions=128)
    run = train(
        folder / "run", "profile=demo",
        f"model.path={folder}/model", f"data.train={folder}/prompts.jsonl", "data.val_size=4",
        f"reward.functions=[{folder}/my_reward.py:vowels]", "rollout.max_prompt_length=64", "trainer.total_steps=3",
        "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=4",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert len(run.metrics()) == 3
    assert max(row["rollout/log_prob_gap_max"] for row in run.metrics()) < 1e-4
    assert any(row["actor/grad_norm"] > 0 for row in run.metrics())
    row = pq.read_table(run.output / "rollouts" / "step_000001.parquet").to_pylist()[0]
    assert row["prompt_ids"][0] == 0  # The chat template adds the prompt's only BOS token.
    assert row["prompt_ids"].count(0) == 1
    assert row["prompt_ids"][-1] == SPECIAL.index("<|assistant|>")
    assert row["prompt"].startswith("Be brief.Say ")
