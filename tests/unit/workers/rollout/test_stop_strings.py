"""Tests that the search for stop strings in tokens finds what a search of the whole text after every token finds."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from workers.rollout.stop_strings import StopStrings, stop_strings, text_before

TEXT = ["the cat sat. the end", "### ## answer ###", "naïve café € 日本 ###", "</answer> </think>\n\n the"] * 4


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which a token can be several characters or a part of one character."""
    made, alphabet = Tokenizer(BPE(unk_token="<unk>")), []
    if kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        made.decoder = decoders.Sequence(list(parts))
    else:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<pad>"]
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    if kind == "metaspace":  # characters that the vocabulary lacks are encoded as tokens of single bytes
        learned = json.loads(made.to_str())["model"]
        vocab = learned["vocab"] | {f"<0x{byte:02X}>": len(learned["vocab"]) + byte for byte in range(256)}
        merges = [tuple(pair) for pair in learned["merges"]]
        made.model = BPE(vocab, merges, byte_fallback=True, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", clean_up_tokenization_spaces=False)


def length_by_whole_texts(ids: list[int], stops: list[str], tokenizer: PreTrainedTokenizerFast) -> int | None:
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return length
    return None


def length_by_search(ids: list[int], stops: list[str], tokenizer: PreTrainedTokenizerFast) -> int | None:
    search = StopStrings(stops, tokenizer)
    return next((length for length in range(1, len(ids) + 1) if search.end(ids[:length])), None)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize(
    "stops", [["###"], ["# "], ["€"], ["\n\n", "end"], ["the end"], [" the"], ["</answer>", "本 "], ["ß"]]
)
def test_an_answer_ends_at_the_first_token_after_which_its_whole_text_has_a_stop_string(kind, stops):
    tokenizer, draws, found = tokenizer_of(kind), random.Random(0), 0
    likely = [id for text in TEXT for id in tokenizer(text)["input_ids"]] + tokenizer("".join(stops))["input_ids"]
    for _ in range(150):
        ids = [draws.choice(likely) if draws.random() < 0.9 else draws.randrange(len(tokenizer)) for _ in range(40)]
        at = draws.randrange(30)
        ids[at:at] = tokenizer(draws.choice(stops))["input_ids"]
        expected = length_by_whole_texts(ids, stops, tokenizer)
        assert length_by_search(ids, stops, tokenizer) == expected
        found += expected is not None
    assert found > 50


def test_a_stop_string_spans_tokens_and_special_tokens_and_ends_within_a_token():
    tokenizer = tokenizer_of("bytes")
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("##", "<pad>", "Ġ", "answer", "Ġ###")]
    assert None not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "## answer ###"
    search = StopStrings(["# answer #"], tokenizer)
    assert [search.end(ids[:length]) for length in range(1, 6)] == [False, False, False, False, True]


def test_parts_of_a_character_are_found_once_the_character_is_complete():
    tokenizer = tokenizer_of("metaspace")
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "ß".encode()]
    search = StopStrings(["ß"], tokenizer)
    assert [search.end(ids[:1]), search.end(ids)] == [False, True]


def test_the_text_ends_before_the_first_of_the_stop_strings():
    assert text_before("one ## two ### three", ["###", "##"]) == "one "
    assert text_before("ab###", ["b##", "###"]) == "a"
    assert text_before("###", ["###"]) == ""
    assert text_before("no stop", ["###"]) == "no stop"
    assert text_before("all", []) == "all"


def test_only_runs_with_stop_strings_load_a_tokenizer(start):
    assert stop_strings([], "no such folder") is None
    search = stop_strings(["="], start)
    assert search is not None
    assert search.end([ord("1"), ord("=")])
