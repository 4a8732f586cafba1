"""Tests of the check that finds tokenizers that lose words or characters, and allows changes of the spelling."""

import pytest
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer

from rltrain.data.tokenizer_round_trip import loss
from rltrain.tasks.tokenizer import char_tokenizer
from tests.made_tokenizers import KINDS, made

TEXTS = ["hello world", "the quick  brown fox = 12", " fox\nworld", "hello are you ", "12 = 34"]


def changed(kind, **parts):
    tokenizer = made(kind)
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


@pytest.mark.parametrize("tokenizer", [*(made(kind) for kind in KINDS), char_tokenizer(), ByT5Tokenizer()])
def test_good_tokenizers_lose_nothing(tokenizer):
    texts = [text.replace("=", "are").replace("\n", " ") for text in TEXTS]
    assert loss(texts, tokenizer) is None


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (normalizers.NFKC(), "ﬁne Å 日本"),
        (normalizers.Lowercase(), "HELLO World"),
        (normalizers.BertNormalizer(), "Éa\x00\tb"),
        (normalizers.Replace("``", '"'), "``hello``"),
    ],
)
def test_normalisation_is_no_loss(normalizer, text):
    assert loss([text], changed("byte_level", normalizer=normalizer)) is None


def test_the_amount_of_white_space_is_no_loss():
    squeezed = normalizers.Replace("\n\n", " ")
    assert loss(["hello\n\nworld", " how  are"], changed("byte_level", normalizer=squeezed)) is None


def test_spaces_that_vanish_between_words_are_a_loss_and_the_first_difference_is_shown():
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = changed("byte_level", pre_tokenizer=split)
    assert loss(["hello", "hello how are you"], tokenizer) == (1, "'hello how are you' comes back as 'hellohowareyou'")
    assert loss(["1 + 2 ="], tokenizer) == (0, "'1 + 2 =' comes back as '1+2='")
    long = "x" * 60 + " y" + "z" * 60
    assert loss([long], tokenizer) == (
        0, f"'...{'x' * 24} y{'z' * 22}...' comes back as '...{'x' * 24}y{'z' * 23}...'"
    )  # fmt: skip
    dropped = normalizers.Replace(" ", "")
    assert loss(["hello how"], changed("byte_level", normalizer=dropped)) == (0, "'hello how' comes back as 'hellohow'")


def test_spaces_that_only_go_before_punctuation_are_clean_up():
    tokenizer = changed("byte_level", decoder=decoders.Sequence([decoders.ByteLevel(), decoders.Replace(" .", ".")]))
    assert loss(["hello world .", "how are you"], tokenizer) is None
    assert loss(["hello .", "how ."], tokenizer) == (0, "'hello .' comes back as 'hello.'")


@pytest.mark.parametrize(
    ("kind", "text", "back"),
    [
        ("word_piece", "hello 日", "hello [UNK]"),
        ("unigram", "hello 日", "hello <unk>"),
        ("char", "hello 日é!", "hello !"),
    ],
)
def test_characters_that_the_tokenizer_does_not_know_are_a_loss(kind, text, back):
    tokenizer = char_tokenizer() if kind == "char" else made(kind)
    assert loss(["how are you", text], tokenizer) == (1, f"{text!r} comes back as {back!r}")
