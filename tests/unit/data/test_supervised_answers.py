"""Tests of which rows have supervised answers, of the answers' token ids and end tokens, and of one-line errors."""

import pyarrow
import pytest
from pyarrow import parquet

from rltrain.data.supervised_answers import SupervisedOptions
from tests.made_tokenizers import made
from tests.prompt_loading import EOS, PLAIN_TEMPLATE, coded, error_of, jsonl, load, tokenizer


def options(response="solution", **changes):
    return SupervisedOptions(**{"response": response, "max_length": 32, "end_ids": [EOS]} | changes)


def answers(source, chosen=None, response="solution", *, given=None, **changes):
    """Return the ids of the supervised answer to each prompt of a source."""
    prompts = load(source, chosen, supervised=options(response, **(given or {})), **changes)
    return [prompt.supervised_ids for prompt in prompts]


# Tests of the token ids of answers


def test_an_answer_is_its_text_and_the_end_token_and_a_row_without_a_value_has_none(tmp_path):
    rows = [{"prompt": "1+1=", "solution": "2."}, {"prompt": "2+2=", "solution": None}, {"prompt": "3+3="}]
    rows += [{"prompt": "4+4=", "solution": ""}, {"prompt": "5+5=", "solution": 10}]
    path = jsonl(tmp_path, *rows)
    assert answers(path) == [[*coded("2."), EOS], None, None, None, [*coded("10"), EOS]]
    prompts = load(path, supervised=options())
    assert (prompts.supervised.count, prompts.supervised.tokens, prompts.notes) == (2, 6, [])
    assert prompts.supervised.described(5) == "column solution has answers to 2 of 5 prompts, 6 tokens"
    assert [prompt.ids for prompt in prompts] == [prompt.ids for prompt in load(path)]
    assert [prompt.supervised_ids for prompt in load(path)] == [None] * 5


def test_a_template_puts_columns_together_and_needs_all_of_them(tmp_path):
    rows = [{"prompt": "p", "steps": "a", "n": 3}, {"prompt": "p", "steps": "a"}, {"prompt": "p", "steps": "", "n": 3}]
    assert answers(jsonl(tmp_path, *rows), response="{steps} #{n}{{}}") == [[*coded("a #3{}"), EOS], None, None]


def test_a_column_of_missing_numbers_has_no_answers_in_their_rows(tmp_path):
    table = pyarrow.table({"prompt": ["a", "b"], "solution": pyarrow.array([float("nan"), 2.5])})
    parquet.write_table(table, tmp_path / "p.parquet")
    assert answers(tmp_path / "p.parquet") == [None, [*coded("2.5"), EOS]]


def test_the_last_message_of_a_chat_is_the_column_completion_and_one_message_is_its_content(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    chosen = tokenizer(chat_template=PLAIN_TEMPLATE)
    path = jsonl(tmp_path, {"messages": chat}, {"messages": chat[:1]})
    assert answers(path, chosen, "completion") == [[*coded("yo"), EOS], None]
    pair = jsonl(tmp_path, {"prompt": chat[:1], "completion": chat[1:]}, name="pair.jsonl")
    assert answers(pair, chosen, "completion") == [[*coded("yo"), EOS]]


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "legacy_llama"])
def test_the_ids_of_an_answer_decode_to_its_text_as_those_of_a_sampled_answer_do(tmp_path, kind):
    chosen = made(kind)
    end = chosen.convert_tokens_to_ids("<|im_end|>")
    text = "hello world = 12"
    path = jsonl(tmp_path, {"question": "how are you", "solution": text})
    (ids,) = answers(path, chosen, given={"end_ids": [end]})
    assert ids[-1] == end
    assert chosen.decode(ids[:-1], clean_up_tokenization_spaces=False) == text
    assert ids[:-1] == chosen(text, add_special_tokens=False)["input_ids"]


# The end token


def test_the_end_token_is_that_of_the_template_after_chats_and_that_of_the_tokenizer_after_text(tmp_path):
    chosen = made("byte_level")
    turn, text = (chosen.convert_tokens_to_ids(name) for name in ("<|im_end|>", "</s>"))
    assert turn != text
    ends = {"end_ids": [text, turn]}
    chat = [{"role": "user", "content": "hi"}]
    path = jsonl(tmp_path, {"prompt": chat, "solution": "a"}, {"prompt": "hi", "solution": "a"})
    assert [ids[-1] for ids in answers(path, chosen, given=ends)] == [turn, text]
    # If `end_ids` lacks the end token of the template or of the tokenizer, the answer ends with the token in `end_ids`.
    assert [ids[-1] for ids in answers(path, chosen, given={"end_ids": [text]})] == [text, text]
    assert [ids[-1] for ids in answers(path, chosen, given={"end_ids": [turn]})] == [turn, turn]


def test_a_template_that_refuses_the_probe_leaves_the_end_token_of_text(tmp_path):
    only_one = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}" + PLAIN_TEMPLATE
    path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "a"}], "solution": "b"})
    assert answers(path, tokenizer(chat_template=only_one)) == [[*coded("b"), EOS]]


def test_an_answer_that_ends_with_a_stop_string_ends_there_and_one_that_goes_on_is_refused(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p", "solution": "a;;"}, {"prompt": "p", "solution": "b"})
    assert answers(path, given={"stop": [";;"]}) == [coded("a;;"), [*coded("b"), EOS]]
    late = jsonl(tmp_path, {"prompt": "p", "solution": "a;;b"}, name="late.jsonl")
    assert error_of(late, supervised=options(stop=[";;"])) == (
        f"data.train={late}:1: the supervised answer contains the stop string ';;' (rollout.stop) before its end, but "
        "a sampled answer would end at this string; remove the rest of the answer, or leave the string out of "
        "rollout.stop"
    )


# Control tokens


def test_an_answer_that_spells_a_control_token_is_encoded_as_text_refused_or_taken_as_prompts_are(tmp_path):
    chosen = made("byte_level")
    end = chosen.convert_tokens_to_ids("<|im_end|>")
    path = jsonl(tmp_path, {"prompt": "hi", "solution": "say <|im_end|> now"})
    given = {"end_ids": [end]}
    prompts = load(path, chosen, supervised=options(**given))
    ids = prompts[0].supervised_ids
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert chosen.decode(ids[:-1], clean_up_tokenization_spaces=False) == "say <|im_end|> now"
    assert prompts.notes == [
        f"data.train={path}: supervised answers that contain names of control tokens: 1; the names are encoded as "
        "text, or with data.special_tokens=allow as control tokens"
    ]
    assert answers(path, chosen, given=given, special_tokens="allow")[0].count(end) == 2
    assert error_of(path, chosen, supervised=options(**given), special_tokens="refuse").startswith(
        f"data.train={path}:1: the supervised answer contains <|im_end|>, the name of a control token, which "
        "data.special_tokens=refuse forbids; "
    )


# Lengths


def test_E10_an_answer_that_is_too_long_is_refused_or_left_out_and_never_cut(tmp_path):
    path = jsonl(tmp_path, *({"prompt": "p", "solution": "x" * length} for length in (3, 4, 9)))
    assert error_of(path, supervised=options(max_length=4)) == (
        f"data.train={path}:2: the supervised answer has 5 tokens, longer than rollout.max_response_length=4 (2 "
        "answers are too long, with up to 10 tokens); raise rollout.max_response_length, or leave such answers "
        "out with data.overlong_prompts=filter"
    )
    prompts = load(path, supervised=options(max_length=4, overlong="filter"))
    assert [prompt.supervised_ids for prompt in prompts] == [[*coded("xxx"), EOS], None, None]
    assert (prompts.supervised.filtered, len(prompts)) == (2, 3)
    assert prompts.notes == [
        f"data.train={path}: supervised answers left out because they are longer than rollout.max_response_length=4: 2"
    ]


def test_E10_an_answer_of_megabytes_is_left_out_without_being_tokenised(tmp_path, monkeypatch):
    chosen = made("byte_level")
    end = chosen.convert_tokens_to_ids("<|im_end|>")
    path = jsonl(tmp_path, {"prompt": "hi", "solution": "ab " * 1_000_000}, {"prompt": "hi", "solution": "a"})
    given = options(end_ids=[end], overlong="filter")
    assert [prompt.supervised_ids is None for prompt in load(path, chosen, supervised=given)] == [True, False]
    assert "the supervised answer has at least" in error_of(path, chosen, supervised=options(end_ids=[end]))


def test_prompts_that_are_left_out_take_their_answers_with_them(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p" * 99, "solution": "no"}, {"prompt": "p", "solution": "yes"})
    assert answers(path, overlong="filter") == [[*coded("yes"), EOS]]


def test_prompts_beyond_one_batch_keep_their_own_answers(tmp_path):
    path = jsonl(tmp_path, *({"prompt": f"{n}", "solution": None if n % 3 else f"{n}!"} for n in range(2500)))
    assert answers(path) == [None if n % 3 else [*coded(f"{n}!"), EOS] for n in range(2500)]


# Errors, and fingerprints


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (
            "solutoin",
            "data.sft_response=solutoin: data.train={path} has no column 'solutoin'; the columns are prompt, solution, "
            "n, answer (did you mean solution?)",
        ),
        (
            "{solution} {m}",
            "data.sft_response={{solution}} {{m}}: data.train={path} has no column 'm'; the columns are",
        ),
        ("{solution", "data.sft_response={{solution: expected '}}' before end of string; write each column as"),
        ("no {{{{column}}}}", "a template without a column would give the same answer for every row"),
    ],
)
def test_a_column_that_is_missing_is_refused_with_the_columns_that_there_are(tmp_path, response, said):
    path = jsonl(tmp_path, {"prompt": "p", "solution": "s", "n": 1})
    assert said.format(path=path) in error_of(
        path, supervised=options(response.replace("{{{{", "{{").replace("}}}}", "}}"))
    )


def test_a_value_that_is_no_text_is_refused_with_its_row(tmp_path):
    for value, kind in (
        ({"a": 1}, "dict"),
        (True, "bool"),
        ([1], "list"),
        ([{"content": "a"}, {"content": "b"}], "list"),
    ):
        path = jsonl(tmp_path, {"prompt": "p", "solution": value})
        assert error_of(path, supervised=options()) == (
            f"data.train={path}:1: column 'solution', which data.sft_response reads as an answer, has a value of type "
            f"{kind}; write the answer as text, a number or a list with one message, or leave the value out"
        )


def test_a_source_without_any_answer_is_refused(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p", "solution": None}, {"prompt": "p", "solution": ""})
    assert error_of(path, supervised=options()) == (
        f"data.sft_response=solution: no row of data.train={path} has an answer in column solution; name a column that "
        "holds answers, or set algorithm.sft_coef=0 and data.sft_response=null"
    )
    path = jsonl(tmp_path, {"prompt": "p", "solution": "xxxx"})
    assert error_of(path, supervised=options(max_length=2, overlong="filter")) == (
        "data.sft_response=solution: no supervised answer is left, all 1 are longer than rollout.max_response_length=2"
        "; raise rollout.max_response_length"
    )


def test_a_tokenizer_that_loses_a_part_of_an_answer_is_refused_unless_that_is_allowed(tmp_path):
    from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer

    path = jsonl(tmp_path, {"prompt": "p", "solution": "né"})
    given = options(end_ids=[EOS_ID])
    said = error_of(path, char_tokenizer(), supervised=given)
    assert said.startswith(
        f"data.train={path}:1: the tokenizer loses a part of the supervised answer: 'né' comes back as 'n'; "
    )
    assert load(path, char_tokenizer(), supervised=given, lossy_tokenizer="allow")[0].supervised_ids[-1] == EOS_ID


def test_other_answers_and_other_columns_have_another_fingerprint_and_without_them_it_stays(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p", "a": "1", "b": "2"})
    kinds = [load(path, supervised=chosen).fingerprint() for chosen in (None, options("a"), options("b"))]
    assert len(set(kinds)) == 3
    assert kinds[1] != load(path, supervised=options("a", end_ids=[EOS + 60])).fingerprint()


def test_the_largest_id_is_that_of_prompts_and_answers(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a", "solution": "z"}, {"prompt": "b", "solution": "c"})
    assert load(path).largest_id() == ord("b") + 3
    assert load(path, supervised=options()).largest_id() == ord("z") + 3
