"""A tokenizer that needs no files: one token per ASCII character, and the token's id is the character's code."""

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 128
# Control codes that no text uses; each special token takes the code of that meaning where there is one.
PAD_ID, PAD_TOKEN = 0, "<pad>"  # NUL
EOS_ID, EOS_TOKEN = 3, "<eos>"  # ETX, end of text
UNK_ID, UNK_TOKEN = 26, "<unk>"  # SUB, substitute: whatever is not ASCII


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: 128 ids, no begin token, nothing added to a text, and decoding gives the text back.

    Text outside ASCII becomes `<unk>`. `save_pretrained` writes it so that `AutoTokenizer` and vLLM load it offline.
    """
    special = {PAD_ID: PAD_TOKEN, EOS_ID: EOS_TOKEN, UNK_ID: UNK_TOKEN}
    vocab = {special.get(code, chr(code)): code for code in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=UNK_TOKEN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()  # without a decoder, tokens are joined with spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=1024,
    )
