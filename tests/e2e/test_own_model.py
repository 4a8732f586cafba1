"""Runs with a user's own model, data and reward: other architectures, chat templates, a reward file."""

import json

import pyarrow.parquet as pq
import pytest
from runs import train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
REWARD = """
def vowels(prompt, response, *, wanted, finish_reason):
    assert "<|" not in prompt and "<|" not in response, "special tokens reached the reward function"
    return sum(response.count(letter) for letter in wanted) / 8
"""
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


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


@pytest.mark.parametrize("name", sorted(MODELS))
def test_another_architecture_trains_through_vllm_with_a_chat_template_and_a_reward_file(folder, name):
    kind, config = MODELS[name]
    tokenizer = byte_tokenizer()
    model = kind(config(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=2, bos_token_id=0, **SIZES))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
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
    assert row["prompt_ids"][0] == 0  # E9: the only BOS token comes from the chat template
    assert row["prompt_ids"].count(0) == 1
    assert row["prompt_ids"][-1] == SPECIAL.index("<|assistant|>")
    assert row["prompt"].startswith("Be brief.Say ")
