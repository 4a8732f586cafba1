"""Saves tiny models with random weights and a byte tokenizer, to stand for a user's own models."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2,
}  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, and a chat template."""
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


def save_model(folder: Path, architecture: str, *, positions: int, **options: object) -> Path:
    """Save a model with its tokenizer.

    Args:
        folder: Directory in which the model is saved.
        architecture: Name of the model's type in transformers, such as "llama".
        positions: Maximum number of tokens of a prompt and its answer together.
        options: Further settings of the model's config.
    """
    tokenizer = byte_tokenizer()
    sizes = SIZES | {"max_position_embeddings": positions} | options
    config = CONFIG_MAPPING[architecture](
        vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=2, bos_token_id=0, dtype="float32", **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
