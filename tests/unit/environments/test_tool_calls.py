"""Tests of the parsers of tool calls: valid, malformed, truncated and parallel calls, and text without a call."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.environments.tool_calls import TOOL_CALL_FORMATS, BrokenCall, ToolCall, format_of

ADD, SUB = ("add", {"a": 1, "b": [None, "x"]}), ("sub", {"code": 'print("</tool_call> ``` ; é")\n'})
DEEPSEEK_OLD = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK_NEW = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def obj(call, key="arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def fence(lang, text) -> str:
    return f"```{lang}\n{text}\n```\n"


WRITERS = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{obj(call)}\n</tool_call>" for call in calls),
    "llama3": lambda calls: "<|python_tag|>" + "; ".join(obj(call, "parameters") for call in calls),
    "llama3 lines": lambda calls: "\n".join(obj(call, "parameters") for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(map(obj, calls))}]",
    "mistral named": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls),
    "deepseek": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(DEEPSEEK_OLD.format(name, json.dumps(args)) for name, args in calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek new": lambda calls: "".join(DEEPSEEK_NEW.format(name, json.dumps(args)) for name, args in calls),
    "json": lambda calls: "".join(fence("json", obj(call)) for call in calls),
    "json list": lambda calls: fence("tool_calls", f"[{','.join(map(obj, calls))}]"),
}


def parse(kind, text):
    return TOOL_CALL_FORMATS[kind.split()[0]](text)


def read(action):
    return [(call.name, call.arguments) if isinstance(call, ToolCall) else call.error for call in action.calls]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("calls", [[ADD], [SUB], [ADD, SUB, ADD]])
def test_calls_are_read_in_order_and_have_different_ids(kind, calls):
    action = parse(kind, f"I think.\n{WRITERS[kind](calls)}")
    assert read(action) == calls
    assert action.content == "I think."
    ids = [call.id for call in action.calls]
    assert len({*ids}) == len(ids)
    assert all(len(id) == 9 and id.isalnum() for id in ids)


@pytest.mark.parametrize("kind", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("text", ["", "plain {text} [with] `marks`", '{"answer": 3}', "```json\n{}\n```", "```json\nx"])
def test_text_without_calls_is_content(kind, text):
    assert parse(kind, text).calls == []
    assert parse(kind, text).content == text.strip()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_text_cut_anywhere_gives_no_call_that_is_not_in_it_and_never_raises(kind):
    text = WRITERS[kind]([ADD, SUB])
    for end in range(len(text)):
        found = read(parse(kind, text[:end]))
        good = [call for call in found if isinstance(call, tuple)]
        assert good == [ADD, SUB][: len(good)]
        assert found[: len(good)] == good, "only the last call may be malformed"
        assert len(found) - len(good) <= 1


@pytest.mark.parametrize(
    ("kind", "text", "errors"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call><tool_call>{"name": "g"}</tool_call>',
            ["the call is not valid JSON: Expecting value (character 33)", ("g", {})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f"<tool_call>{"name": "g"}</tool_call>',
            ["the call is not valid JSON: Expecting ',' delimiter (character 12)", ("g", {})],
        ),
        ("hermes", '<tool_call>{"name": "f", "argu', ["the call is cut off: </tool_call> is missing"]),
        ("hermes", '<tool_call>{"name": "f"}', ["the call is cut off: </tool_call> is missing"]),
        (
            "hermes",
            '<tool_call>{"name": "f"} and</tool_call>',
            ["write </tool_call> directly after the JSON of the call"],
        ),
        (
            "hermes",
            "<tool_call>[1]</tool_call>",
            ['the call is not a JSON object; write {"name": "...", "arguments": {...}}'],
        ),
        (
            "hermes",
            '<tool_call>{"name": 3, "arguments": "</tool_call>"}</tool_call> rest',
            ['the call has no name of a tool; write {"name": "...", "arguments": {...}}'],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "argments": {}}</tool_call>',
            ['the call has the unknown key "argments"; write {"name": "...", "arguments": {...}}'],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
            ['the call is not valid JSON: the key "a" occurs twice'],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            ["the call is not valid JSON: NaN is not a JSON value"],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
            ["the call is not valid JSON: invalid Unicode"],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            ["the arguments of the call are not a JSON object"],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>',
            ["the call has both the key arguments and the key parameters; keep only one of these keys"],
        ),
        (
            "llama3",
            '{"name": "f", "parameters": {"a" 1}}\n{"name": "g", "parameters": {}}',
            ["the call is not valid JSON: Expecting ':' delimiter (character 33)", ("g", {})],
        ),
        ("llama3", "<|python_tag|>print(1)", ["the call is not valid JSON: Expecting value (character 0)"]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"arguments": {}}, {"name": "g"}]',
            [("f", {}), 'the call has no name of a tool; write {"name": "...", "arguments": {...}}', ("g", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f"}',
            [("f", {}), "the list of calls is cut off: ] is missing after its last call"],
        ),
        ("mistral", "[TOOL_CALLS] f(1)", ["after [TOOL_CALLS], write a JSON list of calls"]),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>" + DEEPSEEK_NEW.format("g", "{}"),
            ["write the name of the tool and <｜tool▁sep｜> before its arguments", ("g", {})],
        ),
        (
            "json",
            '```json\n{"name": "f", "arguments": {"a": 01}}\n```\n```tool_call\n{"name": "g"}\n```',
            ["the call is not valid JSON: Expecting ',' delimiter (character 34)", ("g", {})],
        ),
    ],
)
def test_a_malformed_call_is_told_and_hides_no_other(kind, text, errors):
    action = parse(kind, text)
    assert read(action) == errors
    for call in action.calls:
        assert not isinstance(call, BrokenCall) or call.text in text


def test_arguments_may_be_a_string_with_json():
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(parse("hermes", text)) == [("f", {"a": 1})]
    assert read(parse("hermes", text.replace("1}", "1} x"))) == [
        "text follows the JSON object in the arguments of the call"
    ]
    assert read(parse("hermes", text.replace("1}", "1"))) == [
        "in the arguments, the call is not valid JSON: Expecting ',' delimiter (character 7)"
    ]


def test_a_call_in_thoughts_is_a_thought():
    call = WRITERS["hermes"]([ADD])
    for text, count in [
        (f"<think>{call}</think>{call}", 1),
        (f"\n<think>{call}", 0),
        (f"{call}</think> now {call} {call}", 2),
        (f"<think></think>{call}", 1),
    ]:
        action = parse("hermes", text)
        assert len(action.calls) == count
        assert action.content.count("add") == text.count("add") - count


def test_ids_of_mistral_are_kept_where_its_template_accepts_them():
    listed = json.dumps([{"name": "f", "id": id} for id in ("abcDEF123", "abcDEF123", "short", 7, "call00001")])
    ids = [call.id for call in parse("mistral", f"[TOOL_CALLS]{listed}").calls]
    assert ids[0] == "abcDEF123"
    assert len({*ids}) == 5
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    named = parse("mistral", '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}').calls
    assert named == [ToolCall("f", {"a": 1}, "abcDEF123")]


def test_deep_nesting_and_long_numbers_are_malformed_calls():
    for value in ("[" * 100_000, "9" * 5000):
        (call,) = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>').calls
        assert isinstance(call, BrokenCall)
        assert "\n" not in call.error
        assert len(call.error) <= 300


MARKS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "function", "<｜tool▁call▁end｜>", "```json\n", "```tool_call\n", "```", "\n", ";", "[", "]",
    ",", '"a": 1', "{", "}", '{"name": "f", "arguments": {}}', '{"name": "f"', "f", "<think>", "</think>", "é",
    "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("kind", TOOL_CALL_FORMATS)
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(MARKS), max_size=14))
def test_any_text_is_parsed(kind, parts):
    text = "".join(parts)
    action = parse(kind, text)
    at = 0
    for call in action.calls:
        if isinstance(call, BrokenCall):
            assert "\n" not in call.error
            at = text.index(call.text, at)
        else:
            assert call.name == "f"
    assert len({call.id for call in action.calls}) == len(action.calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            "{% for tool_call in message.tool_calls %}<tool_call>{{ tool_call | tojson }}</tool_call>{% endfor %}",
            "hermes",
        ),
        ("{% for tool_call in message.tool_calls %}<tool_call><function={{ tool_call.name }}>{% endfor %}", None),
        ("{{ '<|python_tag|>' }}{{ message.tool_calls }}", "llama3"),
        ('{{ \'{"name": "\' + tool_call.name + \'", "parameters": \' }}', "llama3"),
        ("{{ '[TOOL_CALLS]' }}{{ message.tool_calls }}", "mistral"),
        ("{{ '<｜tool▁call▁begin｜>```json' }}{{ message.tool_calls }}", "deepseek"),
        ("{{ '```json' }}{{ message.tool_calls }}", "json"),
        ("{{ '```json' }}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_of_a_template(template, name):
    assert format_of(template) == name


def test_nothing_heavy_is_imported():
    code = "import sys, rltrain.environments.tool_calls; print({'torch', 'transformers', 'vllm'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
