"""Tests of the tool calls in the text of an action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.environments.tool_calls import TOOL_CALL_FORMATS, BrokenCall, ToolCall, format_of

TWO = [("add", {"a": 1, "b": [2]}), ("say", {"text": "x"})]
WRITTEN = {
    "hermes": 'Hm. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>\n'
    '<tool_call>{"name": "say", "arguments": {"text": "x"}}</tool_call>',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2]}}; '
    '{"name": "say", "parameters": {"text": "x"}}<|eom_id|>',
    "mistral": 'Hm.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2]}}, '
    '{"name": "say", "arguments": {"text": "x"}}]',
    "deepseek": "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": [2]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n```json\n'
    '{"text": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "json": 'Hm.\n```json\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n```\n'
    '```json\n{"name": "say", "arguments": {"text": "x"}}\n```',
}
OTHER_FORMS = {
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}[TOOL_CALLS]say[ARGS]{"text": "x"}',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2]}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>say<｜tool▁sep｜>{"text": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": [2]}}\n{"name": "say", "parameters": {"text": "x"}}',
    "json": '{"name": "add", "arguments": {"a": 1, "b": [2]}} {"name": "say", "arguments": "{\\"text\\": \\"x\\"}"}',
}


@pytest.mark.parametrize(("name", "text"), [*WRITTEN.items(), *OTHER_FORMS.items()])
def test_parallel_calls_are_found_in_their_order(name, text):
    parsed = TOOL_CALL_FORMATS[name](text)
    assert [(call.name, call.arguments) for call in parsed.calls] == TWO
    assert [call.id for call in parsed.calls] == ["call00000", "call00001"]
    assert parsed.content == ("Hm." if text.startswith("Hm") else "")


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_an_action_without_calls_is_text(name):
    parsed = TOOL_CALL_FORMATS[name](" The answer is {7}. \n")
    assert (parsed.content, list(parsed.calls)) == ("The answer is {7}.", [])


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_a_call_that_was_cut_off_is_broken_and_the_call_before_it_is_not(name):
    text = WRITTEN[name]
    parsed = TOOL_CALL_FORMATS[name](text[: text.index('"x"')])
    if name == "mistral":  # a list that was cut off has no whole calls
        (cut,) = parsed.calls
    else:
        first, cut = parsed.calls
        assert first == ToolCall(*TWO[0], "call00000")
    assert isinstance(cut, BrokenCall)
    assert "closing" in cut.error or "not valid JSON" in cut.error


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("{'name': 'add'}", "the call is not valid JSON: Expecting property name"),
        ('["add"]', 'the call must be a JSON object with "name" and "arguments"'),
        ('{"name": 3, "arguments": {}}', 'the call must be a JSON object with "name" and "arguments"'),
        ('{"name": "", "arguments": {}}', 'the call must be a JSON object with "name" and "arguments"'),
        ('{"name": "add", "arguments": [1]}', "the arguments of the call must be a JSON object"),
        ('{"name": "add", "arguments": "[1]"}', "the arguments of the call must be a JSON object"),
        ("[" * 100_000, "the call is not valid JSON"),
        ("__import__('os').abort()", "the call is not valid JSON"),
    ],
)
def test_the_error_of_a_malformed_call_is_one_line(call, error):
    parsed = TOOL_CALL_FORMATS["hermes"](f'<tool_call>{call}</tool_call><tool_call>{{"name": "add"}}</tool_call>')
    broken, good = parsed.calls
    assert isinstance(broken, BrokenCall)
    assert broken.error.startswith(error)
    assert "\n" not in broken.error
    assert good == ToolCall("add", {}, "call00001")


PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "```json\n", "```", "<|python_tag|>", "{", "}", "[", "]",
    '"name": "add"', '"arguments": {}', ",", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", " x ",
    "\n", '"',
]  # fmt: skip


@given(st.sampled_from(sorted(TOOL_CALL_FORMATS)), st.lists(st.sampled_from(PIECES), max_size=16).map("".join))
def test_no_text_makes_a_parser_raise(name, text):
    parsed = TOOL_CALL_FORMATS[name](text)
    assert [call.id for call in parsed.calls] == [f"call{number:05d}" for number in range(len(parsed.calls))]
    for call in parsed.calls:
        assert isinstance(call, BrokenCall) or isinstance(call.arguments, dict)


def test_the_format_is_that_of_the_chat_template():
    assert format_of("... <tool_call>{{ call }}</tool_call>") == "hermes"
    assert format_of("{{ '[TOOL_CALLS] [' }}") == "mistral"
    assert format_of("{{ '<|python_tag|>' }}") == "llama3"
    assert format_of("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>") == "deepseek"
    assert format_of("{{ messages }}") is None
