"""Small tokenizers for tests, one of each kind that real models use, trained on a few lines of text.

Every tokenizer has the control tokens of the ChatML format.
"""

import functools
import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["hello world how are you", "the quick brown fox = 1234567890", "user assistant system im_end < > | / é"] * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"


def byte_level() -> Tokenizer:
    """Make a byte-level BPE tokenizer with NFC normalisation, like Qwen's."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def metaspace() -> Tokenizer:
    """Make a BPE tokenizer with byte fallback that puts a space before the first word only, like Mistral's."""
    made = _byte_fallback()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return _trained(made)


def legacy_llama() -> Tokenizer:
    """Make a BPE tokenizer with byte fallback whose normaliser writes spaces as U+2581, like Llama 2's."""
    made = _byte_fallback()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(spaces)
    return _trained(made)


def unigram() -> Tokenizer:
    """Make a Unigram tokenizer with NFKC normalisation, like XGLM's.

    The model's vocabulary itself contains the special tokens `<unk>`, `<s>` and `</s>`.
    """
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    return made


def word_piece() -> Tokenizer:
    """Make a lower-case WordPiece tokenizer, like BERT's."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    )
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level, "metaspace": metaspace, "legacy_llama": legacy_llama, "unigram": unigram,
    "word_piece": word_piece,
}  # fmt: skip


def made(kind: str, *, chat_template: str | None = CHATML, adds_bos: bool = False, **flags) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the given kind.

    The keyword arguments `flags` are options of the control tokens, such as `lstrip=True`.
    """
    inner = Tokenizer.from_str(_saved(kind))
    unknown = next((token for token in ("<unk>", "[UNK]") if inner.token_to_id(token) is not None), None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=unknown, chat_template=chat_template)
    bos, eos, start, end = (AddedToken(name, **flags) for name in ("<s>", "</s>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_special_tokens({"bos_token": bos, "eos_token": eos, "extra_special_tokens": [start, end]})
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "<|user|>")])
    if adds_bos:
        added = [("<s>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=added)
    return tokenizer


@functools.cache
def _saved(kind: str) -> str:
    return KINDS[kind]().to_str()


def _byte_fallback() -> Tokenizer:
    return Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))


def _trained(made: Tokenizer) -> Tokenizer:
    special = ["<unk>", "<s>", "</s>", *BYTES]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(spec))
