"""Tiny random teachers with the tokenizer of the built-in tasks, and the exact reverse KL from all logits."""

from pathlib import Path

import torch

from rltrain.batch.data_proto import DataProto
from rltrain.tasks.tokenizer import PAD_ID, VOCAB_SIZE, char_tokenizer


def make_teacher(path: Path, *, width: int, seed: int, words: int = VOCAB_SIZE) -> str:
    """Save a random model with the given hidden size and a vocabulary of `words` tokens, and return its directory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=words, hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD_ID, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


def logits_of(
    model: torch.nn.Module, batch: DataProto, row: int, temperature: float = 1.0, words: int | None = VOCAB_SIZE
) -> torch.Tensor:
    """Return the logits (tokens, vocabulary) of a row's response tokens, divided by the temperature."""
    prompt, response = batch[row].values("prompts"), batch[row].values("responses")
    logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
    return logits[len(prompt) - 1 : len(prompt) + len(response) - 1, :words] / temperature


def reverse_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return sum_v pi_v (log pi_v - log pi_T_v) of each token, in the dtype of the logits."""
    log_pi, log_teacher = logits.log_softmax(-1), teacher.log_softmax(-1).detach()
    return (log_pi.exp() * (log_pi - log_teacher)).sum(-1)
