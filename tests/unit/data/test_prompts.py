"""Tests of prompts from files and built-in tasks, and of one-line errors for wrong prompts."""

import json
import subprocess
import sys
from array import array
from decimal import Decimal

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers.normalizers import Replace
from transformers import PreTrainedTokenizerFast

from tests.made_tokenizers import byte_level
from tests.prompt_loading import (
    BOS,
    BOS_TEMPLATE,
    EOS,
    PLAIN_TEMPLATE,
    STRICT_TEMPLATE,
    coded,
    error_of,
    jsonl,
    load,
    tokenizer,
)

# Tests of the conversion of rows to prompts


def test_a_text_prompt_becomes_its_ids_and_its_other_columns_pass_through(tmp_path):
    path = jsonl(tmp_path, {"prompt": "1+1=", "answer": "2", "level": {"n": 1}}, {"prompt": "2+2=", "answer": "4"})
    prompts = load(path)
    assert (len(prompts), prompts.source, prompts.columns, prompts.filtered) == (2, str(path), ("answer", "level"), 0)
    first = prompts[0]
    assert (first.index, first.text, first.ids) == (0, "1+1=", [BOS, *coded("1+1=")])
    assert first.columns == {"answer": "2", "level": {"n": 1}}
    # A missing column of a row gets the value None, as in parquet files.
    assert prompts[1].columns == {"answer": "4", "level": None}
    assert [p.index for p in prompts[-1:]] == [1]
    assert prompts[-1] == prompts[1]
    with pytest.raises(IndexError):
        prompts[2]


def test_json_jsonl_and_parquet_of_the_same_rows_give_the_same_prompts(tmp_path):
    rows = [{"prompt": f"{n}+{n}=", "answer": 2 * n, "tags": ["a", str(n)]} for n in range(2000)]
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=1))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    sets = [load(source) for source in (jsonl(tmp_path, *rows), tmp_path / "p.json", tmp_path / "p.parquet")]
    assert list(sets[0]) == list(sets[1]) == list(sets[2])
    assert [s.columns for s in sets] == [("answer", "tags")] * 3
    assert sets[0][1999].columns == {"answer": 3998, "tags": ["a", "1999"]}


def test_null_columns_are_those_without_a_value_in_any_row(tmp_path):
    rows = [{"prompt": "a", "answer": None, "level": None, "n": 0}, {"prompt": "b", "answer": None, "level": 1}]
    assert load(jsonl(tmp_path, *rows)).null_columns() == {"answer"}


def test_a_json_file_may_hold_one_object_per_line_too(tmp_path):
    assert [p.text for p in load(jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, name="p.json"))] == ["a", "b"]


def test_blank_lines_and_a_byte_order_mark_are_no_rows_but_count_as_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n{"prompt": 5}\n')
    assert error_of(path).startswith(f"data.train={path}:3: the prompt is neither text nor chat messages")


def test_builtin_tasks_give_their_own_number_of_rows_and_val_is_not_train():
    train, val = load("builtin:median"), load("builtin:median", split="val")
    assert (len(train), len(val), len(load("builtin:sort", split="val", limit=7))) == (8192, 512, 7)
    assert train.columns == ("answer",)
    assert not {p.text for p in train} & {p.text for p in val}
    assert sorted(train[0].text[:-1])[3] == train[0].columns["answer"]


def test_a_limit_takes_the_first_prompts_that_fit(tmp_path):
    path = jsonl(tmp_path, *({"prompt": "x" * n} for n in (1, 90, 3, 4)))
    prompts = load(path, limit=2, overlong="filter")
    assert ([p.text for p in prompts], prompts.filtered) == (["x", "xxx"], 1)


# Tests that the chat template is applied once, and that a prompt has at most one begin token


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "?"}]


def test_E9_chat_messages_go_through_the_template_once_with_the_generation_prompt(tmp_path):
    chosen = tokenizer(chat_template=PLAIN_TEMPLATE)
    (prompt,) = load(jsonl(tmp_path, {"prompt": CHAT}), chosen)
    assert prompt.ids == coded("[user]hi[assistant]yo[user]?[bot]")
    assert prompt.ids == chosen.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert prompt.text == "[user]hi[assistant]yo[user]?[bot]"
    assert prompt.messages == CHAT  # The messages are kept for reward models, which apply their own chat templates.
    assert load(jsonl(tmp_path, {"prompt": "hi"}), chosen)[0].messages is None


def test_E9_a_template_that_writes_bos_and_a_tokenizer_that_adds_it_give_one(tmp_path):
    (prompt,) = load(jsonl(tmp_path, {"prompt": CHAT[:1]}), tokenizer(chat_template=BOS_TEMPLATE))
    assert prompt.ids == [BOS, *coded("[user]hi[bot]")]
    assert prompt.text == "[user]hi[bot]"  # Reward functions never see special tokens.


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi"])
def test_E9_text_that_starts_with_bos_gets_no_second_one(tmp_path, text):
    (prompt,) = load(jsonl(tmp_path, {"prompt": text}), special_tokens="allow")
    assert (prompt.ids, prompt.text) == ([BOS, *coded("hi")], "hi")
    (prompt,) = load(jsonl(tmp_path, {"prompt": text}), special_tokens="text")
    assert (prompt.ids, prompt.text) == ([BOS, *coded(text)], text)


def test_E9_a_tokenizer_without_bos_gets_none(tmp_path):
    chosen = tokenizer(adds="$A")
    chosen.bos_token = None
    assert load(jsonl(tmp_path, {"prompt": "hi"}), chosen)[0].ids == coded("hi")


def test_E9_chat_and_text_rows_of_one_file_keep_their_order(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": CHAT[:1]}, {"prompt": "b"})
    texts = [p.text for p in load(path, tokenizer(chat_template=PLAIN_TEMPLATE))]
    assert texts == ["a", "[user]hi[bot]", "b"]


def test_an_end_token_that_the_tokenizer_adds_does_not_end_the_prompt(tmp_path):
    (prompt,) = load(jsonl(tmp_path, {"prompt": "hi"}), tokenizer(adds="<s> $A </s>"))
    assert prompt.ids == [BOS, *coded("hi")]


# Tests that prompts are never cut silently


def test_E10_an_overlong_prompt_is_refused_with_its_line_and_length(tmp_path):
    path = jsonl(tmp_path, {"prompt": "x" * 8}, {"prompt": "x" * 9}, {"prompt": "x" * 40})
    assert error_of(path, max_prompt_length=9) == (
        f"data.train={path}:2: the prompt has 10 tokens, longer than rollout.max_prompt_length=9 (2 prompts are too "
        "long, with up to 41 tokens); raise rollout.max_prompt_length, or leave such prompts out with "
        "data.overlong_prompts=filter"
    )


def test_E10_overlong_prompts_are_left_out_and_counted_under_filter(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "x" * 40, "answer": 1}, {"prompt": "c", "answer": 3})
    prompts = load(path, max_prompt_length=9, overlong="filter")
    assert ([p.text for p in prompts], prompts.filtered) == (["a", "c"], 1)
    assert prompts[1].columns == {"answer": 3}


def test_E10_a_tokenizer_saved_with_truncation_on_cuts_nothing(tmp_path):
    chosen = tokenizer()
    chosen.backend_tokenizer.enable_truncation(max_length=4)
    assert load(jsonl(tmp_path, {"prompt": "x" * 30}), chosen)[0].ids == [BOS, *coded("x" * 30)]


def test_E10_nothing_left_after_the_filter_is_an_error(tmp_path):
    path = jsonl(tmp_path, {"prompt": "x" * 20}, {"prompt": "x" * 30})
    assert error_of(path, max_prompt_length=9, overlong="filter") == (
        f"data.train={path}: no prompt is left, all 2 are longer than rollout.max_prompt_length=9; raise "
        "rollout.max_prompt_length to at least 21"
    )


# Tests of one-line errors for wrong data


def test_a_missing_file_names_its_nearest_neighbour(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a"}, name="train.jsonl")
    assert error_of(tmp_path / "trian.jsonl") == (
        f"data.train={tmp_path}/trian.jsonl: no such file; did you mean {path}?"
    )
    assert "and no such folder" in error_of(tmp_path / "no" / "train.jsonl", split="val")
    assert "no such file; check the path" in error_of(tmp_path / "zzzzzzzz.parquet")


def test_an_unknown_builtin_task_names_the_known_ones():
    assert error_of("builtin:medain", split="val") == (
        "data.val=builtin:medain: unknown built-in task; the tasks are builtin:median, builtin:sort, builtin:lookup, "
        "builtin:higher_lower, builtin:digit"
    )


@pytest.mark.parametrize(
    ("content", "place", "said"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', ":2", "not valid JSON"),
        (b'{"prompt": "a"}\n"b"\n', ":2", "found str where a JSON object was expected"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ":2", "not UTF-8 (byte 13)"),
        (b'{"prompt": "a"}\n{"question": "b"}\n', ":2", "no prompt; give each row text"),
        (b'{"prompt": ""}\n', ":1", "the prompt is empty"),
        (b'{"prompt": []}\n', ":1", "the prompt is empty"),
        (b'{"prompt": ["hi"]}\n', ":1", "neither text nor chat messages"),
        (b'{"prompt": [{"role": "user"}]}\n', ":1", "the content of the message with role 'user' is None"),
        (b'{"prompt": [{"role": "user", "content": "hi"}]}\n', ":1", "no chat template; use text prompts"),
        (b'{"prompt": "\\ud800"}\n', ":1", "not valid Unicode"),
        (b'{"prompt": "a"}\n{"prompt": "a", "x": ["\\uDFFF"]}\n', ":2", "the row is not valid Unicode"),
        (b'{"prompt": "a", "n": %s}\n' % (b"1" * 5000), ":1", "not valid JSON (Exceeds the limit"),
        (b'{"prompt": "a", "response": "b"}\n', "", "column 'response'"),
        (b'{"prompt": "a", "finish_reason": "b"}\n', "", "column 'finish_reason'"),
        (b"", "", "holds no rows"),
        (b"\n\n", "", "holds no rows"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, content, place, said):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    message = error_of(path)
    assert message.startswith(f"data.train={path}{place}: ")
    assert said in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"prompt": "a"}, {"answer": "b"}]', ", row 2: no prompt"),
        ('[{"prompt": "a"}, 3]', ", row 2: found int where a JSON object was expected"),
        ('[{"prompt": "a"}, {"prompt": "b", "\\ud800": 1}]', ", row 2: the row is not valid Unicode"),
        ('[{"prompt": "a"},', ": the text is not valid JSON"),
        ("[]", ": holds no rows"),
    ],
)
def test_a_bad_json_array_is_named_with_its_row(tmp_path, content, said):
    (tmp_path / "p.json").write_text(content)
    assert said in error_of(tmp_path / "p.json")


def test_two_halves_of_a_surrogate_pair_are_a_character(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a", "x": "\\ud83d\\ude00"}\n')
    assert load(path)[0].columns == {"x": "\U0001f600"}


def test_a_chat_template_that_refuses_a_role_is_named_with_its_row(tmp_path):
    path = jsonl(tmp_path, {"prompt": CHAT}, {"prompt": [{"role": "system", "content": "be good"}, *CHAT]})
    message = error_of(path, tokenizer(chat_template=STRICT_TEMPLATE))
    assert f"{path}:2: the chat template refuses these messages (no system role)" in message


def test_a_parquet_file_that_is_none_or_has_no_prompts_is_refused(tmp_path):
    path = tmp_path / "p.parquet"
    path.write_bytes(b"not parquet at all")
    assert "not a readable parquet file" in error_of(path)
    parquet.write_table(pyarrow.table({"text": ["a"], "label": ["b"]}), path)
    assert "no column is called prompt, messages, " in error_of(path)
    assert "; the columns are text, label; name the column with data.prompt=COLUMN" in error_of(path)
    parquet.write_table(pyarrow.table({"prompt": ["a", None]}), path)
    assert f"{path}, row 2: no prompt" in error_of(path)
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    assert "holds no rows" in error_of(path)


def bad_text() -> pyarrow.Array:
    """Return a pyarrow array of two strings, of which the second has two bytes that are not valid UTF-8.

    The array is built from raw buffers, because pyarrow itself never writes invalid UTF-8.
    """
    offsets, content = pyarrow.py_buffer(array("i", [0, 2, 4]).tobytes()), pyarrow.py_buffer(b"ok\xff\xfe")
    return pyarrow.StringArray.from_buffers(2, offsets, content)


def times(*values: int | None, unit: str = "us", zone: str | None = None) -> pyarrow.Array:
    return pyarrow.array(values, pyarrow.timestamp(unit, zone))


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (bad_text(), "the text is not valid UTF-8 (invalid start byte); write the text as UTF-8, or as binary data"),
        (pyarrow.ListArray.from_arrays([0, 1, 2], bad_text()), "the text is not valid UTF-8"),
        (
            times(None, 1, unit="ns"),
            "value of type timestamp[ns]; write the value as text; a time may also be written in whole microseconds,",
        ),
        (times(0, 2**60), "Python cannot represent this value of type timestamp[us];"),
        (times(None, 0, zone="Mars/Base"), "cannot represent this value of type timestamp[us, tz=Mars/Base];"),
        (times(0, -62135596800000000, zone="America/New_York"), "value of type timestamp[us, tz=America/New_York];"),
        (pyarrow.array([0, 2**31 - 1], pyarrow.int32()).view(pyarrow.date32()), "this value of type date32[day];"),
        (pyarrow.array([0, 1], pyarrow.time64("ns")), "this value of type time64[ns];"),
        (pyarrow.array([0, 2**62], pyarrow.duration("s")), "this value of type duration[s];"),
        (pyarrow.array([[], [[1]]], pyarrow.list_(pyarrow.list_(pyarrow.time64("ns")))), "list<element: list<element"),
        (pyarrow.StructArray.from_arrays([[1, 2], [1, 2]], names=["a", "a"])[1:], "struct<a: int64, a: int64>;"),
    ],
)  # fmt: skip
def test_a_parquet_value_that_python_cannot_hold_is_named_by_row_and_column(tmp_path, column, said):
    path, good = tmp_path / "p.parquet", 3000 - len(column)
    column = pyarrow.chunked_array([pyarrow.nulls(good, column.type), column])
    parquet.write_table(pyarrow.table({"prompt": ["a"] * 3000, "good": ["b"] * 3000, "odd": column}), path)
    message = error_of(path)
    assert message.startswith(f"data.train={path}, row 3000, column 'odd': ")
    assert said in message
    assert "\n" not in message


def test_a_parquet_prompt_that_is_no_utf8_is_named_by_its_row(tmp_path):
    parquet.write_table(pyarrow.table({"prompt": bad_text()}), tmp_path / "p.parquet")
    assert ", row 2, column 'prompt': the text is not valid UTF-8" in error_of(tmp_path / "p.parquet")


def test_parquet_values_of_all_kinds_that_python_can_hold_are_columns(tmp_path):
    kinds = {
        "zone": times(0, zone="Europe/Berlin"), "nanoseconds": times(1000, unit="ns"), "null": pyarrow.nulls(1),
        "decimal": pyarrow.array([Decimal(10) ** 70], pyarrow.decimal256(76, 0)), "binary": pyarrow.array([b"\xff"]),
        "map": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "uuid": pyarrow.array([b"x" * 16], pyarrow.uuid()), "half": pyarrow.array([1.5], pyarrow.float16()),
        "dictionary": pyarrow.array(["x"]).dictionary_encode(), "view": pyarrow.array(["x"], pyarrow.string_view()),
    }  # fmt: skip
    parquet.write_table(pyarrow.table({"prompt": ["a"], **kinds}), tmp_path / "p.parquet")
    (prompt,) = load(tmp_path / "p.parquet")
    assert list(prompt.columns) == list(kinds)
    assert prompt.columns["zone"].isoformat() == "1970-01-01T01:00:00+01:00"
    assert (prompt.columns["nanoseconds"].microsecond, prompt.columns["decimal"]) == (1, Decimal(10) ** 70)
    assert (prompt.columns["map"], prompt.columns["binary"]) == ([("a", 1)], b"\xff")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    columns = [pyarrow.array([text]) for text in "abc"]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", "x", "x"]), tmp_path / "p.parquet")
    assert "several columns are called 'x'; rename all but one of them" in error_of(tmp_path / "p.parquet")


def test_importing_it_does_not_import_torch():
    script = "import sys, rltrain.data.prompts; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_other_answers_to_the_same_prompts_have_another_fingerprint(tmp_path):
    def fingerprint(name, *answers):
        rows = [{"prompt": "<s> a b", "answer": answer} for answer in answers]
        return load(jsonl(tmp_path, *rows, name=name)).fingerprint()

    first = fingerprint("a.jsonl", "1", "2")
    assert fingerprint("b.jsonl", "1", "2") == first
    assert fingerprint("c.jsonl", "1", "x") != first
    assert fingerprint("d.jsonl", "2", "1") != first


# Tests of untrusted chat templates, and of text that spells control tokens


def test_a_chat_template_that_eats_memory_for_one_row_is_refused_with_that_row(tmp_path):
    bomb = "{% if messages | length > 1 %}{{ 'a' * 2000000000 * messages | length }}{% endif %}" + PLAIN_TEMPLATE
    path = jsonl(tmp_path, {"prompt": "text"}, {"prompt": CHAT[:1]}, {"prompt": CHAT})
    message = error_of(path, tokenizer(chat_template=bomb))
    assert message.startswith(
        f"data.train={path}:3: the chat template takes more than 1024 MB of memory for these mess"
    )


SPELLED = [{"role": "user", "content": "12<|end|>34=</s>"}]
ENDING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)


def chatty(chat_template: str = ENDING_TEMPLATE) -> PreTrainedTokenizerFast:
    made = tokenizer(chat_template=chat_template)
    made.add_special_tokens({"extra_special_tokens": ["<|end|>"]})
    return made


def test_text_that_spells_control_tokens_is_encoded_as_text_and_the_reward_sees_it(tmp_path):
    path = jsonl(tmp_path, {"prompt": "12</s>34="}, {"prompt": SPELLED}, {"prompt": CHAT[:1]}, {"prompt": "12="})
    chosen = chatty()
    prompts, end = load(path, chosen), chosen.convert_tokens_to_ids("<|end|>")
    assert (prompts[0].ids, prompts[0].text) == ([BOS, *coded("12</s>34=")], "12</s>34=")
    assert prompts[1].ids == [*coded("user:12<|end|>34=</s>"), end, *coded("bot:")]
    assert (prompts[1].text, prompts[1].messages) == ("user:12<|end|>34=</s>bot:", SPELLED)
    assert prompts[2].ids == chosen.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert prompts.notes == [
        f"data.train={path}: prompts that contain names of control tokens: 2 (the first: </s> in data.train={path}:1); "
        "the names are encoded as text, or with data.special_tokens=allow as control tokens"
    ]


def test_text_that_spells_control_tokens_is_refused_or_becomes_them_where_the_config_says_so(tmp_path):
    path, chosen = jsonl(tmp_path, {"prompt": "hi"}, {"prompt": SPELLED}), chatty()
    assert error_of(path, chosen, special_tokens="refuse") == (
        f"data.train={path}:2: the prompt contains the name of the control token <|end|>, which "
        "data.special_tokens=refuse forbids; change the prompt, set data.special_tokens=text to encode the name as "
        "text, or set "
        "data.special_tokens=allow to encode the names of control tokens as control tokens"
    )
    prompts, end = load(path, chosen, special_tokens="allow"), chosen.convert_tokens_to_ids("<|end|>")
    assert prompts[1].ids == [*coded("user:12"), end, *coded("34="), EOS, end, *coded("bot:")]
    assert (prompts[1].text, prompts.notes) == ("user:1234=bot:", [])
    (prompt,) = load(jsonl(tmp_path, {"prompt": "12</s>34="}), chosen, special_tokens="allow")
    assert (prompt.ids, prompt.text) == ([BOS, *coded("12"), EOS, *coded("34=")], "1234=")


def test_a_template_that_acts_on_spelled_control_tokens_is_refused_with_its_row(tmp_path):
    chosen = chatty("{% for m in messages %}{{ m['content'].split('<|end|>')[0] }}{% endfor %}")
    assert error_of(jsonl(tmp_path, {"prompt": SPELLED}), chosen) == (
        f"data.train={tmp_path}/p.jsonl:1: the prompt contains <|end|>, the name of a control token, and this name "
        "cannot be encoded as text (the chat template renders control-token names differently from other text); change "
        "the prompt, or set data.special_tokens=allow to encode the names of control tokens as control tokens"
    )


def test_E10_a_prompt_of_megabytes_is_refused_or_left_out_without_being_tokenised(tmp_path):
    longest = []

    class Watched(PreTrainedTokenizerFast):
        def __call__(self, text, *arguments, **settings):
            longest.append(max(map(len, [text] if isinstance(text, str) else text)))
            return super().__call__(text, *arguments, **settings)

    chosen = Watched(tokenizer_object=byte_level(), chat_template=PLAIN_TEMPLATE)
    rows = [{"prompt": "hello"}, {"prompt": "1 " * 10**6}, {"prompt": [{"role": "user", "content": "é" * 10**6}]}]
    path = jsonl(tmp_path, *rows)
    most = max(map(len, chosen.get_vocab()))
    assert error_of(path, chosen) == (
        f"data.train={path}:2: the prompt has at least {-(-2 * 10**6 // most)} tokens, longer than "
        f"rollout.max_prompt_length=64 (2 prompts are too long, with up to {-(-(2 * 10**6 + 11) // most)} tokens); "
        "raise rollout.max_prompt_length, or leave such prompts out with data.overlong_prompts=filter"
    )
    prompts = load(path, chosen, overlong="filter")
    assert ([prompt.text for prompt in prompts], prompts.filtered) == (["hello"], 2)
    assert prompts.notes == [
        f"data.train={path}: prompts left out because they are longer than rollout.max_prompt_length=64: 2"
    ]
    assert max(longest) < 100


def test_a_tokenizer_that_loses_a_part_of_the_first_prompts_is_refused_unless_that_is_allowed(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a b"}, {"prompt": [{"role": "user", "content": "b é"}]})
    chosen = tokenizer(chat_template=PLAIN_TEMPLATE)
    assert error_of(path, chosen) == (
        f"data.train={path}:2: the tokenizer loses a part of the prompt: 'b é' comes back as 'b <unk>'; save the "
        "tokenizer again with the class that made it (it loads as TokenizersBackend), change the prompt, or accept "
        "the loss with data.lossy_tokenizer=allow"
    )
    assert len(load(path, chosen, lossy_tokenizer="allow")) == 2
    chosen.backend_tokenizer.normalizer = Replace(" ", "")
    assert ":1: the tokenizer loses a part of the prompt: 'a b' comes back as 'ab'" in error_of(path, chosen)
