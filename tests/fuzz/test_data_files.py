"""Any bad file of prompts is refused before a worker starts, with a one-line error that names the file."""

import dataclasses
import functools
import io
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import cases, check_refusal, command, files, nothing_written_over, read_once, refused
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.model_directory import load_tokenizer
from rltrain.main import load_data
from rltrain.settings.compose import compose

letters = st.text(st.characters(), max_size=8)
scalar = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**30), 10**30), st.floats(), letters,
    st.sampled_from(["1 2 3", "", " ", "\x00", "\ud800", "x" * 5000, "12<eos>34=", "\ufeff", "\u202e", "🙂"]),
)  # fmt: skip
nested = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner, max_size=3), max_leaves=8
)
role = st.sampled_from(["user", "system", "assistant", "tool", "", "nobody", None, 1])
chat = st.lists(
    st.one_of(
        nested,
        st.fixed_dictionaries({"role": role, "content": st.one_of(letters, nested)}),
        st.fixed_dictionaries({"from": st.one_of(role, st.sampled_from(["human", "gpt"])), "value": letters}),
    ),
    max_size=3,
)
FORMS = ["messages", "conversations", "question", "problem", "instruction", "input", "solution", "output", "completion"]
column = st.one_of(
    letters, st.sampled_from(["answer", "response", "finish_reason", "prompt", "prompts", "uid", "", " ", *FORMS])
)
row = st.one_of(
    st.fixed_dictionaries({"prompt": st.one_of(st.just("1 2 3"), scalar, chat, nested)}),
    st.builds(lambda others, prompt: {**others, "prompt": prompt}, st.dictionaries(column, nested, max_size=3), scalar),
    st.dictionaries(st.sampled_from([*FORMS, "answer"]), st.one_of(scalar, chat), min_size=1, max_size=3),
    nested,
)
JUNK = [
    b"", b"\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"\x00" * 100, b"{", b"}", b"[",
    b"[]", b"[[]]",
    b"null", b"NaN", b'{"prompt": NaN}', b'{"prompt": 1e999}', b'{"prompt": ' + b"9" * 5000 + b"}",
    b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": "1 2", "prompt": 3}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\u0000"}',
    b'{"prompt": "1"}{"prompt": "2"}', b'{"prompt": "1"}\r\n{"prompt": "2"}\r\n', b'{"prompt": "1"},\n',
    b"prompt\n1 2\n",
    b'prompt,answer\n"1\n2",3\n', b"prompt,prompt\n1,2\n", b"prompt\n1,2\n", b'prompt\n"1', b"prompt\n\xff",
    b'{"prompt": "' + b"1 " * 100_000 + b'"}', b'{"prompt": "1", "answer": {"a": [1, {"b": null}]}}',
    b"PAR1", b"PAR1PAR1",
]  # fmt: skip
line = st.one_of(row.map(lambda value: json.dumps(value).encode()), st.binary(max_size=20), st.sampled_from(JUNK))
lines = st.lists(line, max_size=4).map(b"\n".join)
array = st.lists(row, max_size=4).map(lambda rows: json.dumps(rows).encode())


def table_bytes(columns: dict[str, list]) -> bytes:
    """Return the bytes of a parquet file with `columns`.

    If parquet cannot hold the types of the columns, the file has one text column instead.
    """
    out = io.BytesIO()
    try:
        pq.write_table(pa.table(columns), out)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        out = io.BytesIO()
        pq.write_table(pa.table({"prompt": ["1 2"]}), out)
    return out.getvalue()


def spoiled(content: bytes, place: int, byte: int, cut: bool) -> bytes:
    """Replace the byte at a position of a file's content, or cut the content off at that position."""
    at = place % max(len(content), 1)
    return content[:at] if cut else content[:at] + bytes([byte]) + content[at + 1 :]


cell = st.one_of(scalar, st.binary(max_size=5), st.datetimes(), st.dates(), st.decimals(allow_nan=False, places=2))
parquet = st.builds(
    table_bytes,
    st.dictionaries(st.sampled_from(["prompt", "answer", "response", "", "b"]), st.lists(cell, min_size=2, max_size=2)),
)
broken = st.builds(spoiled, parquet, st.integers(0, 10_000), st.integers(0, 255), st.booleans())
templates = st.sampled_from(
    ["null", "null", "null", "answer", "{question}", "{prompt} {answer}", "{", "{}", "}", "{{a}}"]
)
file = st.one_of(
    st.tuples(st.sampled_from(["p.jsonl", "p.json"]), lines),
    st.tuples(st.just("p.json"), array),
    st.tuples(st.just("p.parquet"), st.one_of(parquet, broken, st.sampled_from(JUNK))),
    st.tuples(st.sampled_from(["p.csv", "p", "p.JSONL", ".jsonl", "p.jsonl.gz"]), lines),
)


@pytest.mark.timeout(7200)
@given(named=file, overlong=st.sampled_from(["refuse", "filter"]), val=st.booleans(), prompt=templates)
@cases(0.03, 15)
def test_a_file_of_prompts_is_used_or_refused_in_one_line(here_once, model, named, overlong, val, prompt):
    name, content = named
    (here_once / name).write_bytes(content)
    try:
        other = f"data.train=prompts.jsonl data.val={name}" if val else f"data.train={name} data.val=null"
        with nothing_written_over(here_once) as outcomes:
            outcomes.append(
                command([
                    "rollout=hf", "placement=inprocess", "profile=demo", f"model.path={model}", *other.split(),
                    "reward.functions=[my_reward.py:score]", f"data.overlong_prompts={overlong}",
                    "trainer.output_dir=new_run",
                    f"data.prompt={prompt}",
                ])
            )  # fmt: skip
        check_refusal(outcomes[0])
        if outcomes[0].status == 2:
            assert name in outcomes[0].err or "data.prompt" in outcomes[0].err, outcomes[0].err
    finally:
        (here_once / name).unlink()
    assert "prompts.jsonl" in files(here_once)


@functools.cache
def usual(model):
    words = ["rollout=hf", "placement=inprocess", "profile=demo", f"model.path={model}", "data.val=null"]
    with read_once():
        config = compose([*words, "reward.functions=[my_reward.py:score]", "trainer.output_dir=new_run"])[0]
    return config, load_tokenizer(model)


@pytest.mark.timeout(7200)
@given(named=file, overlong=st.sampled_from(["refuse", "filter"]), val=st.booleans(), prompt=templates)
@cases(0.12, 60)
def test_a_file_of_prompts_is_loaded_whole_or_refused_by_name(here_once, model, named, overlong, val, prompt):
    name, content = named
    config, tokenizer = usual(model)
    data = {"val": name, "train": "prompts.jsonl"} if val else {"train": name}
    data["prompt"] = None if prompt == "null" else prompt
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, overlong_prompts=overlong, **data))
    (here_once / name).write_bytes(content)
    try:
        said = refused(lambda: [list(prompts or ()) for prompts in load_data(config, tokenizer)])
        assert not said or name in said or "data.prompt" in said, said
    finally:
        (here_once / name).unlink()


def in_front(here_once, model, *words: str):
    """Run the program on a file with a chat, a text that contains the name of a control token, and a very long text."""
    chat = [{"role": "user", "content": "1 2<eos>"}]
    rows = [{"prompt": chat}, {"prompt": "12<eos>34="}, {"prompt": "1 2 " * 100_000}]
    (here_once / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with nothing_written_over(here_once) as outcomes:
        outcomes.append(
            command([
                "rollout=hf", "placement=inprocess", "profile=demo", f"model.path={model}", "data.train=p.jsonl",
                "data.val=null",
                "reward.functions=[my_reward.py:score]", "trainer.output_dir=new_run", "data.overlong_prompts=filter",
                *words,
            ])
        )  # fmt: skip
    check_refusal(outcomes[0])
    return outcomes[0]


@pytest.fixture
def chatty(model, tmp_path):
    """Return a function that makes a copy of the model with a given chat template."""

    def chatty(template: str) -> str:
        shutil.copytree(model, tmp_path / "chatty")
        (tmp_path / "chatty" / "chat_template.jinja").write_text(template)
        return str(tmp_path / "chatty")

    return chatty


def test_prompts_that_are_left_out_or_encoded_as_text_are_said_before_the_plan(here_once, chatty):
    outcome = in_front(here_once, chatty("{{ messages[0].content }}"), "trainer.prompts_per_step=2",
                       "trainer.prompts_per_minibatch=2")  # fmt: skip
    assert outcome.status is None, outcome.err
    assert "data.train=p.jsonl: prompts left out because they are longer than rollout.max_prompt_length=" in outcome.out
    assert "prompts that contain names of control tokens: 2 (the first: <eos>" in outcome.out


def test_a_chat_template_that_eats_memory_is_refused_in_one_line(here_once, chatty):
    outcome = in_front(here_once, chatty("{{ 'a' * 2000000000 }}"))
    assert outcome.err.startswith("error: data.train=p.jsonl:1: the chat template takes more than 1024 MB of memory")
