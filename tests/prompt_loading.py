"""Load prompts from files that tests write, with a tokenizer that makes one token of each character."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rltrain.base.errors import ConfigError
from rltrain.data.prompt_form import PromptOptions
from rltrain.data.prompts import load_prompts

BOS, EOS = 1, 2
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}"
)
BOS_TEMPLATE = "{{ bos_token }}" + PLAIN_TEMPLATE
STRICT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN_TEMPLATE
)


def tokenizer(*, adds: str = "<s> $A", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per ASCII character, where the id of a token is the character code + 3.

    The template `adds` defines which special tokens the tokenizer puts around a text.
    """
    vocab = {"<unk>": 0, "<s>": BOS, "</s>": EOS} | {chr(code): code + 3 for code in range(128)}
    inner = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = Fuse()
    inner.post_processor = TemplateProcessing(single=adds, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=16
    )
    made.chat_template = chat_template
    return made


def coded(text: str) -> list[int]:
    return [ord(character) + 3 for character in text]


def load(source, chosen=None, *, prompt=None, system_prompt=None, chat="auto", images=None, **changes):
    options = PromptOptions(prompt=prompt, system_prompt=system_prompt, chat=chat, images=images)
    settings = {
        "options": options,
        "split": "train",
        "seed": 0,
        "max_prompt_length": 64,
        "overlong": "refuse",
    } | changes
    return load_prompts(str(source), chosen or tokenizer(), **settings)


def jsonl(folder: Path, *rows: object, name: str = "p.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def error_of(source, chosen=None, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, chosen, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)
