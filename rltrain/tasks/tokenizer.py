"""Tokenizers that need no files: each ASCII character is a token, whose id is the character's code."""

from collections.abc import Mapping

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

VOCAB_SIZE = 128
# The ids of the special tokens are control codes that no text uses. Where possible, a special token has the id of a
# control code whose ASCII meaning fits the token.
PAD_ID, PAD_TOKEN = 0, "<pad>"  # The token `<pad>` has the ASCII code NUL.
EOS_ID, EOS_TOKEN = 3, "<eos>"  # `<eos>` has the ASCII code ETX (end of text).
# The token `<unk>` has the ASCII code SUB and is never produced; without `<unk>`, Qwen2Tokenizer would add its own
# unknown token.
UNK_ID, UNK_TOKEN = 26, "<unk>"


def char_tokenizer() -> Qwen2Tokenizer:
    """Build the character tokenizer, which has 128 token ids and no beginning-of-sequence token.

    The tokenizer adds no tokens to a text, and decodes the ids of a text to the same text. When a text is encoded, its
    characters outside ASCII are dropped.
    """
    return byte_tokenizer(eos_token=EOS_TOKEN)


def byte_tokenizer(
    *, eos_token: str, control: Mapping[int, str] = {}, phrases: Mapping[int, str] = {}
) -> Qwen2Tokenizer:
    """Build a tokenizer with 128 token ids, in which some ASCII control codes stand for longer texts.

    The tokenizer is a byte-level BPE without merges. The class of the tokenizer is `Qwen2Tokenizer`, because
    `AutoTokenizer` loads the tokenizer of every Qwen2 directory as a `Qwen2Tokenizer`, whatever class was saved. vLLM
    also loads tokenizers with `AutoTokenizer`.

    Args:
        eos_token: name of the end token, whose id is `EOS_ID`.
        control: dict that maps a token id to the name of a control token, for control tokens other than the padding,
            end and unknown tokens.
        phrases: dict that maps a token id to the text for which the token stands. The tokens in `phrases` are ordinary
            text, not control tokens.
    """
    special = {PAD_ID: PAD_TOKEN, EOS_ID: eos_token, UNK_ID: UNK_TOKEN, **control}
    vocab = {{**special, **phrases}.get(code) or _visible(code): code for code in range(VOCAB_SIZE)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        pad_token=PAD_TOKEN,
        eos_token=eos_token,
        unk_token=UNK_TOKEN,
        clean_up_tokenization_spaces=False,
        padding_side="left",  # Prompts are padded on the left, because generation continues at the right end.
        model_max_length=1024,
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in control.values()], True)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in phrases.values()])
    return tokenizer


def _visible(code: int) -> str:
    """Return the token that stands for the character with the ASCII code `code`.

    Byte-level BPE writes each byte as a visible character, for instance a space as U+0120.
    """
    ((visible, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(code))
    return visible
