"""A tokenizer that needs no files: one token per ASCII character, and the token's id is the character's code."""

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

VOCAB_SIZE = 128
# The ids of special tokens are control codes that no text uses, with a fitting meaning where a code has one.
PAD_ID, PAD_TOKEN = 0, "<pad>"  # NUL
EOS_ID, EOS_TOKEN = 3, "<eos>"  # ETX, end of text
UNK_ID, UNK_TOKEN = 26, "<unk>"  # SUB; never produced, but Qwen2Tokenizer would otherwise add an unknown token


def char_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer: it has 128 ids and no begin token, adds nothing to a text, and decodes ids to the same text.

    The tokenizer is a `Qwen2Tokenizer`, a byte-level BPE, without merges, because `AutoTokenizer`, and with it vLLM,
    loads every Qwen2 directory as this class, whatever class was saved there. Characters outside ASCII are dropped in
    encoding.
    """
    vocab = {_visible(code): code for code in range(VOCAB_SIZE)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        clean_up_tokenization_spaces=False,
        padding_side="left",  # generation continues at the right end
        model_max_length=1024,
    )


def _visible(code: int) -> str:
    """Return the token of a character code. Byte-level BPE writes bytes as visible characters, a space as U+0120."""
    special = {PAD_ID: PAD_TOKEN, EOS_ID: EOS_TOKEN, UNK_ID: UNK_TOKEN}
    if code in special:
        return special[code]
    ((visible, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(code))
    return visible
