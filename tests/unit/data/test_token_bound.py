"""Tests that the lower bound on a text's number of tokens never exceeds that number.

The tests also check that the bound is high enough to reject texts of several megabytes without tokenising them.
"""

import random

import pytest
from tokenizers import normalizers, pre_tokenizers
from transformers import ByT5Tokenizer

from rltrain.data import token_bound
from rltrain.data.token_bound import TokenBound
from rltrain.tasks.tokenizer import char_tokenizer
from tests.made_tokenizers import KINDS, made

PIECES = [
    "hello",
    " ",
    "   ",
    "\n",
    "1",
    "=",
    "é",
    "e\u0301",
    "ﬃ",
    "\U0001f642",
    "zzzz",
    "<s>",
    " <s>",
    "</s>",
    "<think>",
    "日",
    "\x00",
]
CHOSEN = {"char": char_tokenizer} | {kind: lambda kind=kind: made(kind, adds_bos=True) for kind in KINDS}


@pytest.fixture
def any_length(monkeypatch):
    monkeypatch.setattr(token_bound, "SHORT", 0)


@pytest.mark.parametrize("flags", [{}, {"lstrip": True, "rstrip": True}, {"normalized": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens_than_the_bound(any_length, kind, flags):
    tokenizer, rng = made(kind, adds_bos=True, **flags), random.Random(0)
    bound = TokenBound(tokenizer)
    for _ in range(300):
        text = "".join(rng.choices(rng.sample(PIECES, 3), k=rng.randint(1, 40)))
        assert bound.least(text) <= len(tokenizer(text)["input_ids"]), text


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: setattr(inner, "normalizer", normalizers.Replace(" ", "")),
        lambda inner: setattr(
            inner, "normalizer", normalizers.Sequence([normalizers.NFKC(), normalizers.StripAccents()])
        ),
        lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.CharDelimiterSplit("1")),
        lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.Split("1", "removed")),
        lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.Punctuation("removed")),
        lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda inner: setattr(inner, "pre_tokenizer", None),
    ],
)
def test_parts_that_drop_characters_lower_the_bound_or_take_it_away(any_length, change):
    tokenizer, rng = made("metaspace"), random.Random(0)
    change(tokenizer.backend_tokenizer)
    bound = TokenBound(tokenizer)
    for _ in range(200):
        text = "".join(rng.choices(rng.sample([*PIECES, "."], 3), k=rng.randint(1, 40)))
        assert bound.least(text) <= len(tokenizer(text)["input_ids"]), text


@pytest.mark.parametrize("kind", ["char", "byte_level", "metaspace"])
def test_a_long_text_has_at_least_as_many_tokens_as_the_longest_token_allows(kind):
    tokenizer = CHOSEN[kind]()
    bound, longest = TokenBound(tokenizer), max(map(len, tokenizer.get_vocab()))
    assert longest <= len("<|im_start|>")
    assert bound.least("1 " * 600_000) == -(-1_200_000 // longest)
    assert bound.least("1 " * 1000) == 0  # Short texts have the bound 0, because they are tokenised anyway.


def test_begin_tokens_at_the_start_are_not_counted(any_length):
    assert TokenBound(made("byte_level")).least("<s> <s>" * 1000) == 0


@pytest.mark.parametrize("tokenizer", [made("word_piece"), ByT5Tokenizer()], ids=["word_piece", "python"])
def test_where_a_token_may_hold_any_text_or_nothing_is_known_there_is_no_bound(any_length, tokenizer):
    assert TokenBound(tokenizer).least("hello" * 1000) == 0
