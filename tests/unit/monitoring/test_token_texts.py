import pytest

from rltrain.monitoring.token_texts import read_token_texts, token_texts, write_token_texts
from rltrain.tasks.tokenizer import EOS_ID, PAD_ID, UNK_ID, char_tokenizer
from tests.made_tokenizers import KINDS, made


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_the_tokens_of_a_sentence_add_up_to_it(kind):
    tokenizer = made(kind)
    text = "hello world how are you"
    texts = token_texts(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids
    assert "".join(texts[one] for one in ids).strip() == text


def test_a_part_of_a_character_is_written_as_its_bytes():
    tokenizer = made("byte_level")
    ids = tokenizer("日", add_special_tokens=False)["input_ids"]
    assert "".join(token_texts(tokenizer)[one] for one in ids) == r"\xe6\x97\xa5"


def test_the_table_of_tokens_has_each_text_and_knows_the_special_ones(tmp_path):
    texts, special = read_token_texts(write_token_texts(char_tokenizer(), tmp_path))
    assert len(texts) == 128
    assert (texts[ord("a")], texts[ord(" ")], texts[ord("\n")], texts[EOS_ID]) == ("a", " ", "\n", "<eos>")
    assert special == {PAD_ID, EOS_ID, UNK_ID}


def test_control_tokens_that_a_chat_adds_are_special(tmp_path):
    tokenizer = made("byte_level")
    texts, special = read_token_texts(write_token_texts(tokenizer, tmp_path))
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in special
    assert texts[tokenizer.convert_tokens_to_ids("<|im_end|>")] == "<|im_end|>"
