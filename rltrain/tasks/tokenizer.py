"""A tokenizer that needs no files: one token per ASCII character, and the token's id is the character's code."""

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

VOCAB_SIZE = 128
# Control codes that no text uses; each special token takes the code of that meaning where there is one.
PAD_ID, PAD_TOKEN = 0, "<pad>"  # NUL
EOS_ID, EOS_TOKEN = 3, "<eos>"  # ETX, end of text
UNK_ID, UNK_TOKEN = 26, "<unk>"  # SUB; never produced, but the class would add a token of its own without it


def char_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer: 128 ids, no begin token, nothing added to a text, and decoding gives the text back.

    `AutoTokenizer`, and with it vLLM, loads every Qwen2 directory as `Qwen2Tokenizer`, whatever class was saved
    there: so this is one, a byte-level BPE without merges. Characters outside ASCII are dropped in encoding.
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
    """Name a code's token: byte-level BPE writes each byte as a visible character, the space as U+0120."""
    special = {PAD_ID: PAD_TOKEN, EOS_ID: EOS_TOKEN, UNK_ID: UNK_TOKEN}
    if code in special:
        return special[code]
    ((visible, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(code))
    return visible
