"""Runs with a user's own model, data and reward: several architectures, chat templates and a reward file."""

import json

import pyarrow.parquet as pq
import pytest
from own_models import SPECIAL, byte_tokenizer, save_model
from runs import train, train_here

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


@pytest.mark.broad
@pytest.mark.parametrize("name", ["llama", "qwen3"])
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


def test_questions_and_answers_become_chats_after_a_system_prompt(tmp_path, settings_restored):
    questions = [f"What is {n} + 1?" for n in range(12)]
    rows = [{"question": question, "answer": str(n + 1)} for n, question in enumerate(questions)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(tmp_path / "model", "llama", positions=128)
    system = "Be brief.\nAnswer with one number."
    run = train_here(
        tmp_path / "run", "placement=inprocess", "rollout=hf", "profile=demo", f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/rows.jsonl", r"data.system_prompt=Be brief.\nAnswer with one number.",
        "data.val_size=4", "reward.functions=[numeric_match]", "rollout.max_prompt_length=96",
        "rollout.max_response_length=8", "rollout.samples_per_prompt=2", "trainer.total_steps=1",
        "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=2",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    form = "prompt = column question, as a user message after data.system_prompt"
    assert f"data       12 rows of {tmp_path}/rows.jsonl; {form}\n" in run.stdout
    chats = {
        f"{system}{question}": [{"role": "system", "content": system}, {"role": "user", "content": question}]
        for question in questions
    }
    samples = run.samples()["step_000001.parquet"].to_pylist()
    assert len(samples) == 8
    for sample in samples:
        chat = chats[sample["prompt"]]
        rendered = byte_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert sample["prompt_ids"] == rendered
