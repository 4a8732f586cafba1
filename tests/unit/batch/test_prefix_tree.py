"""Tests of the prefix tree: which tokens are kept, and that every sequence can be read back from the tree."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch.prefix_tree import LEAST, SHORTEST_PROMPT, distinct_tokens

SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=12
)


def tokens_of(sequences, prompts=None):
    """Return the distinct tokens of lists of ids."""
    ids = torch.tensor(list(itertools.chain.from_iterable(sequences)), dtype=torch.int64)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return ids, distinct_tokens(ids, lengths, torch.tensor(prompts or [0] * len(sequences)))


def read_back(sequences, ids, tokens):
    """Check that the places of each sequence's tokens have its ids, and that they are the path to its last segment."""
    kept, ends = ids[tokens.kept], tokens.lengths.cumsum(0)
    paths = torch.arange(len(kept)) if tokens.keys is None else tokens.keys
    paths = paths.split((tokens.lengths + tokens.depths).tolist())
    begin = 0
    for sequence in sequences:
        places = tokens.places[begin : begin + len(sequence)]
        begin += len(sequence)
        assert kept[places].tolist() == sequence
        if sequence:
            last = int((ends > places[-1]).nonzero()[0])
            assert paths[last][: len(sequence)].tolist() == places.tolist()
            assert int(places[-1]) == int(paths[last][len(sequence) - 1])


def test_a_common_prompt_is_kept_once_and_each_answer_follows_it():
    prompt = [5, 6, 7, 8, 9]
    ids, tokens = tokens_of([[*prompt, 1, 2], [*prompt, 1, 3], prompt, [*prompt, 4]], [5] * 4)
    assert ids[tokens.kept].tolist() == [*prompt, 1, 2, 1, 3, 4]
    assert tokens.lengths.tolist() == [5, 2, 2, 1]
    assert tokens.depths.tolist() == [0, 5, 5, 5]
    assert tokens.keys.split([5, 7, 7, 6])[2].tolist() == [0, 1, 2, 3, 4, 7, 8]


def test_the_turns_of_a_conversation_form_a_chain():
    turns = list(range(100, 190))
    sequences = [turns[:30], turns[:60], turns[:90]]
    ids, tokens = tokens_of(sequences, [20, 50, 80])
    assert ids[tokens.kept].tolist() == turns
    assert tokens.lengths.tolist() == [30, 30, 30]
    assert tokens.depths.tolist() == [0, 30, 60]
    read_back(sequences, ids, tokens)


def test_rows_that_share_nothing_keep_their_order_and_need_no_keys():
    sequences = [[3, 4, 5], [6], [1, 2, 3, 4]]
    ids, tokens = tokens_of(sequences, [1, 1, 1])
    assert tokens.kept.tolist() == tokens.places.tolist() == list(range(len(ids)))
    assert tokens.keys is None


def test_few_common_tokens_are_not_worth_a_segment():
    short = list(range(SHORTEST_PROMPT - 1))
    _, tokens = tokens_of([[*short, 8], [*short, 9]], [len(short)] * 2)
    assert tokens.keys is None
    common = list(range(50, 50 + LEAST))
    for length, shares in ((LEAST - 1, False), (LEAST, True)):
        _, tokens = tokens_of([[*common[:length], 8], [*common[:length], 9]])
        assert (tokens.keys is not None) is shares
    prompt = [1, 2, 3, 4, 5, 6]
    _, tokens = tokens_of([[*prompt, *common[:5], 8], [*prompt, *common[:5], 9]], [6, 6])
    assert tokens.lengths.tolist() == [6, 6, 6], "the prompt alone is shared"
    _, tokens = tokens_of([[*prompt, *common, 8], [*prompt, *common, 9]], [6, 6])
    assert tokens.lengths.tolist() == [6 + LEAST, 1, 1], "long equal answers are shared too"


def test_prompts_that_begin_alike_share_their_beginning():
    system = list(range(100, 130))
    rows = [[*system, question, 7, 8, 9, *answer] for question in (1, 2) for answer in ([30], [31, 32])]
    ids, tokens = tokens_of(rows, [34] * 4)
    assert tokens.depths.tolist() == [0, 30, 34, 34, 30, 34, 34]
    read_back(rows, ids, tokens)


@given(SEQUENCES)
@settings(deadline=None)
def test_every_sequence_can_be_read_back(drawn):
    """Sequences consist of a prompt of equal ids and an answer of equal ids, so that many begin alike."""
    sequences = [[prompt] * length + [3 + answer] * rest for prompt, length, answer, rest in drawn]
    ids, tokens = tokens_of(sequences, [length for _, length, _, _ in drawn])
    read_back(sequences, ids, tokens)
    assert int(tokens.lengths.sum()) == len(tokens.kept)
    assert len(tokens.kept) <= len(ids)
