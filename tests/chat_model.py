"""A tiny random model with a chat template for tools, and environments for tests of conversations."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rltrain.tasks.tokenizer import char_tokenizer

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){% endfor %}
Call: <tool_call>{"name": NAME, "arguments": {}}</tool_call><|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

GAME = '''
"""A game with three guesses, whose observations depend on the guesses, the column `answer` and the seed."""


class Game:
    def reset(self, answer, seed):
        self.answer, self.guesses, self.seed = answer, [], seed
        return f"seed {seed % 97}"

    def step(self, text):
        self.guesses.append(text)
        reward = sum(map(ord, text)) % 5 / 4
        return f"{len(self.guesses)}{text[:2]!r}{self.seed % 7}", reward, len(self.guesses) == 3

    def reward(self):
        return 0.125
'''


def chat_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer of the built-in tasks with a chat template for tools."""
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_config(tokenizer: Qwen2Tokenizer, **sizes: Any) -> Qwen2Config:
    """Return the config of a model with the vocabulary of a tokenizer and the given sizes."""
    return Qwen2Config(
        vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **sizes,
    )  # fmt: skip


def save_chat_model(folder: Path) -> Path:
    """Save a random model of 0.3M parameters with the tokenizer of the built-in tasks and a chat template."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    config = chat_config(
        tokenizer, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.eos_token_id] *= (
            4  # The output head shares the embedding matrix, so the end token becomes frequent.
        )
    model.save_pretrained(folder)
    return folder
