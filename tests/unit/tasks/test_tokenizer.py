import string
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rltrain.tasks.tiny_model import tiny_model
from rltrain.tasks.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, char_tokenizer

PRINTABLE = "".join(map(chr, range(32, 127)))
TEXTS = [PRINTABLE, PRINTABLE[::-1], "2299907=0227999#7", "  2  spaces ", "a\n\tb\r\n", "I'll don't , .", "0" * 40, ""]


@pytest.fixture(params=["built", "loaded"], scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    if request.param == "built":
        return char_tokenizer()
    folder: Path = tmp_path_factory.mktemp("model")
    # The type of the model decides which tokenizer class is loaded, so the model's config is saved too.
    tiny_model().config.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_a_token_whose_id_is_its_code(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer(text)["input_ids"] == [ord(character) for character in text]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_back_the_exact_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_there_are_128_ids_and_no_begin_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == VOCAB_SIZE == 128
    assert tokenizer.bos_token_id is None


def test_the_pad_and_end_tokens_differ_and_are_no_character_of_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID) == (0, 3)
    assert not {chr(PAD_ID), chr(EOS_ID), chr(tokenizer.unk_token_id)} & set(string.printable)


def test_special_tokens_are_left_out_of_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [PAD_ID, ord("#"), ord("7"), EOS_ID, PAD_ID]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "#7"


def test_a_batch_is_padded_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer(["7", "77"], padding=True)["input_ids"] == [[PAD_ID, 55], [55, 55]]
