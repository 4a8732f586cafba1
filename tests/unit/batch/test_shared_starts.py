"""Tests of the numbers of tokens that rows share, and of the assignment of rows that share tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch.contexts import contexts_of, row_tokens
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.prefix_tree import distinct_tokens
from rltrain.batch.row_assignment import assign_minibatch
from rltrain.batch.row_costs import KEYS
from rltrain.batch.shared_starts import no_shared_starts, shared_starts


def batch_of(prompts, answers, uids=None, **columns):
    made = {"prompts": jagged(prompts, torch.int64), "responses": jagged(answers, torch.int64), **columns}
    return DataProto.from_dict(made | ({} if uids is None else {"uid": torch.tensor(uids)}))


def groups(sizes, prompt=20, answer=5, seed=0):
    """Return a batch of groups: `prompt` tokens in each prompt, and answers of 1 to 2 * `answer` tokens."""
    source = torch.Generator().manual_seed(seed)
    prompts, answers, uids = [], [], []
    for uid, size in enumerate(sizes):
        ids = torch.randint(1000, (prompt,), generator=source).tolist()
        for _ in range(size):
            length = int(torch.randint(1, 2 * answer + 1, (1,), generator=source))
            prompts.append(ids)
            answers.append(torch.randint(1000, (length,), generator=source).tolist())
            uids.append(uid)
    order = torch.randperm(len(uids), generator=source).tolist()
    return batch_of(*([column[row] for row in order] for column in (prompts, answers, uids)))


def distinct(batch, rows):
    """Return the number of tokens that a pack of the rows has."""
    contexts = contexts_of(batch[rows])
    return len(distinct_tokens(contexts.ids, contexts.lengths, contexts.prompts).kept)


def test_rows_of_a_group_share_their_prompt_wherever_they_are():
    batch = batch_of([[1] * 9, [2] * 7, [1] * 9, [2] * 7], [[5, 6], [7], [8], [9, 9, 9]], [0, 1, 0, 1])
    starts = shared_starts(batch)
    assert starts.ordered(range(4)) == [(0, 0, 0), (2, 9, 9), (1, 0, 0), (3, 7, 7)]
    assert starts.ordered([3, 2]) == [(2, 0, 0), (3, 0, 0)]
    lengths = row_tokens(batch).tolist()
    assert starts.total([0, 1, 2, 3], lengths, lengths) == (9 + 1 + 7 + 2, (10 + 9 + 9 + 7 + 9 + 7 + 1) // 2, 19)
    assert no_shared_starts(4).total([0, 1, 2, 3], lengths, lengths) == (35, 35, 35)


def test_rows_of_different_groups_count_as_sharing_nothing():
    starts = shared_starts(batch_of([[1] * 9] * 2, [[5], [6]], [0, 1]))
    assert starts.tokens == [0, 0]


def test_turns_of_a_conversation_share_all_earlier_turns_and_two_rows_share_the_least_in_between():
    ids = list(range(100, 200))
    batch = batch_of([ids[:20], ids[:60], ids[:40]], [ids[20:30], ids[60:80], ids[40:50]], [0, 0, 0])
    starts = shared_starts(batch)
    assert starts.ordered(range(3)) == [(0, 0, 0), (2, 29 - 15, 29 - 15), (1, 49 - 15, 49 - 15)]
    assert starts.ordered([0, 1]) == [(0, 0, 0), (1, 14, 14)]
    assert starts.of([1, 0]).ordered(range(2)) == [(1, 0, 0), (0, 14, 14)]


def test_only_the_first_context_of_a_row_counts():
    starts = torch.zeros(12, dtype=torch.bool)
    starts[2] = True  # the first row's answer starts a second context at its third token
    batch = batch_of([[1] * 9] * 2, [[5, 6, 7, 8, 9, 9], [6] * 6], [0, 0])
    batch = batch.with_values("responses", context_starts=starts)
    assert shared_starts(batch).tokens == [0, 9]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_a_pack_never_has_more_tokens_than_counted(sizes, seed):
    batch = groups(sizes, seed=seed)
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    rows = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))[: len(batch) // 2 + 1].tolist()
    assert distinct(batch, rows) <= starts.total(rows, lengths, lengths)[0] <= sum(lengths[row] for row in rows)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(30, 90), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_every_row_is_assigned_once_within_the_limit_of_distinct_tokens(sizes, ranks, max_tokens, seed):
    batch = groups(sizes, seed=seed)
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    found = assign_minibatch(lengths, list(range(len(batch))), ranks, max_tokens, starts=starts)
    assert sorted(row for rank in found for rows in rank for row in rows) == list(range(len(batch)))
    assert len({len(rank) for rank in found}) == 1
    assert all(distinct(batch, rows) <= max_tokens for rank in found for rows in rank if rows)


def test_groups_stay_whole_where_the_ranks_have_even_work():
    batch = groups([8] * 8)
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    uids = batch.batch["uid"].tolist()
    found = assign_minibatch(lengths, list(range(64)), 2, 200, starts=starts)
    assert sum(len({uids[row] for row in rows}) for rank in found for rows in rank) == 8
    totals = [starts.total(rows, lengths, lengths) for rank in found for rows in rank]
    assert 3 * sum(total.tokens for total in totals) < sum(lengths)


def test_keys_of_a_long_prompt_count_for_each_of_its_answers():
    batch = groups([16], prompt=60, answer=1)
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    found = assign_minibatch(lengths, list(range(16)), 1, 200, starts=starts)
    assert starts.total(range(16), lengths, lengths).tokens < 100
    keys = [60 + sum(lengths[row] for row in rows) for rows in found[0]]
    assert max(keys) <= KEYS * 200
    assert len(found[0]) > 1


def test_the_message_about_a_long_row_names_the_row():
    batch = batch_of([[1] * 5, [1] * 5, [2] * 100], [[3]] * 3, [0, 0, 1])
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    for known in (None, starts):
        with pytest.raises(ValueError, match="row 2 has 100 tokens, above the token limit of 50"):
            assign_minibatch(lengths, [0, 2], 1, 50, starts=known)


def test_prompts_with_a_common_beginning_never_make_a_pack_larger_than_counted():
    system = list(range(100, 120))
    prompts = [[*system, 7, 8], [*system, 9, 8], [*system, 9, 8, 5]]
    source = torch.Generator().manual_seed(0)
    answers = torch.randint(1000, (48, 10), generator=source).tolist()
    batch = batch_of([prompts[row // 16] for row in range(48)], answers, [row // 16 for row in range(48)])
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    for rows in (range(48), range(32), range(10, 40)):
        assert distinct(batch, list(rows)) <= starts.total(rows, lengths, lengths).tokens


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_rows_of_many_prompts_in_one_group_never_make_a_pack_larger_than_counted(drawn):
    prompts = [[5] * length for length, _, _ in drawn]
    batch = batch_of(prompts, [[kind + 5] * length for _, kind, length in drawn])
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    for rows in (list(range(len(drawn))), list(range(0, len(drawn), 2)), list(range(len(drawn) // 2, len(drawn)))):
        if rows:
            assert distinct(batch, rows) <= starts.total(rows, lengths, lengths).tokens


def test_a_group_is_divided_where_one_rank_would_have_all_the_work():
    batch = groups([8])
    lengths, starts = row_tokens(batch).tolist(), shared_starts(batch)
    found = assign_minibatch(lengths, list(range(8)), 2, 500, starts=starts)
    totals = [starts.total(rank[0], lengths, lengths)[0] for rank in found]
    assert len(totals) == 2
    assert max(totals) < 0.75 * starts.total(range(8), lengths, lengths)[0]
