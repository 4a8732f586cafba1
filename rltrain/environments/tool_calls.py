"""Tool calls in the text of a policy's action, in the formats in which chat models write them.

Calls are parsed as JSON and never evaluated. The order of the calls is kept, and a call that cannot be read becomes a
`BrokenCall`, whose error tells the policy what was wrong.

vLLM has parsers for more formats. This module exists because importing one of them takes 10 seconds and loads vLLM, and
because they tell nobody what was wrong: with one malformed call, the Hermes parser of vLLM 0.32 takes all calls of an
action for text. A run can name a function of its own for any other format.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A well-formed tool call.

    Attributes:
        name: name of the tool, which need not exist.
        arguments: arguments by name.
        id: identifier of the call in its action: nine letters and digits, which some chat templates demand.
    """

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class BrokenCall:
    """A tool call that cannot be read.

    Attributes:
        text: the text of the call.
        error: one line that tells the policy what is wrong with the call.
        id: identifier of the call in its action.
    """

    text: str
    error: str
    id: str


@dataclass(frozen=True)
class ParsedAction:
    """The content and the tool calls of an action.

    Attributes:
        content: text outside of the calls, without surrounding white space.
        calls: the calls, in the order of the text.
    """

    content: str
    calls: Sequence[ToolCall | BrokenCall] = ()


def hermes(text: str) -> ParsedAction:
    """Parse calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen)."""
    return _parsed(text, re.compile(r"<tool_call>(?P<call>.*?)(?P<end></tool_call>|\Z)", re.DOTALL), "</tool_call>")


def llama3(text: str) -> ParsedAction:
    """Parse an action that consists of calls `{"name": ..., "parameters": {...}}`, separated by `;` or white space.

    The mark `<|python_tag|>` before the calls is optional (Llama 3.1 and later).
    """
    body = text.strip().removeprefix("<|python_tag|>").removesuffix("<|eom_id|>").strip()
    if not body.startswith("{"):
        return ParsedAction(text.strip())
    return ParsedAction("", [_call(value, part, number) for number, (value, part) in enumerate(_values(body))])


def mistral(text: str) -> ParsedAction:
    """Parse calls after the mark `[TOOL_CALLS]`: a JSON list of calls, or `NAME[ARGS]{...}` for each call."""
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return ParsedAction(text.strip())
    if "[ARGS]" in rest:
        calls = []
        for number, part in enumerate(rest.split("[TOOL_CALLS]")):
            name, _, arguments = part.partition("[ARGS]")
            calls.append(_named(name.strip(), arguments, number))
        return ParsedAction(content.strip(), calls)
    found = list(_values(rest.strip()))
    first = found[0][0] if len(found) == 1 else None
    if isinstance(first, list):
        return ParsedAction(content.strip(), [_call(one, json.dumps(one), n) for n, one in enumerate(first)])
    return ParsedAction(content.strip(), [_call(value, part, n) for n, (value, part) in enumerate(found)])


def deepseek(text: str) -> ParsedAction:
    """Parse calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>` (DeepSeek V3, R1 and V3.1)."""
    begin, end, separator = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    pattern = re.compile(rf"{re.escape(begin)}(?P<call>.*?)(?P<end>{re.escape(end)}|\Z)", re.DOTALL)
    calls: list[ToolCall | BrokenCall] = []
    for number, found in enumerate(pattern.finditer(text)):
        head, _, tail = found["call"].partition(separator)
        fenced = re.fullmatch(r"\s*(?P<name>[^\n`]+)\n```json\n(?P<json>.*?)\n?```\s*", tail, re.DOTALL)
        name, arguments = (fenced["name"], fenced["json"]) if fenced else (head, tail)
        if not found["end"]:
            calls.append(BrokenCall(found["call"], f"the call has no closing {end}", _id(number)))
        else:
            calls.append(_named(name.strip(), arguments, number))
    content = re.sub(r"<｜tool▁calls▁(begin|end)｜>", "", pattern.sub("", text))
    return ParsedAction(content.strip(), calls)


def plain_json(text: str) -> ParsedAction:
    """Parse calls `{"name": ..., "arguments": {...}}` in fenced blocks of JSON, or an action that is one such call."""
    fenced = re.compile(r"```(?:json|tool_call)?[ \t]*\n(?P<call>\s*\{.*?)(?P<end>```|\Z)", re.DOTALL)
    if fenced.search(text):
        return _parsed(text, fenced, "```")
    body = text.strip()
    found = list(_values(body)) if body.startswith("{") else []
    if found and all(isinstance(value, dict) and "name" in value for value, _ in found):
        return ParsedAction("", [_call(value, part, number) for number, (value, part) in enumerate(found)])
    return ParsedAction(body)


Parser = Callable[[str], ParsedAction]
TOOL_CALL_FORMATS: dict[str, Parser] = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "deepseek": deepseek,
    "json": plain_json,
}
_MARKS = {  # Texts in a chat template that show the format of the calls.
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁call": "deepseek",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
}


def format_of(chat_template: str) -> str | None:
    """Return the name of the format in which a chat template writes tool calls, or None if it shows no known format."""
    return next((name for mark, name in _MARKS.items() if mark in chat_template), None)


def _parsed(text: str, pattern: re.Pattern[str], closing: str) -> ParsedAction:
    """Parse the calls that a pattern finds with the groups `call` and `end`."""
    calls: list[ToolCall | BrokenCall] = []
    for number, found in enumerate(pattern.finditer(text)):
        if not found["end"]:
            calls.append(BrokenCall(found["call"], f"the call has no closing {closing}", _id(number)))
        else:
            calls.append(_call(_loaded(found["call"]), found["call"], number))
    return ParsedAction(pattern.sub("", text).strip(), calls)


def _values(text: str) -> Iterator[tuple[Any, str]]:
    """Yield each JSON value of a text and the text of the value. The last value is an exception if it is not JSON."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield error, text[at:]
            return
        yield value, text[at:end]
        at = end + len(text[end:]) - len(text[end:].lstrip("; \t\r\n"))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error


def _named(name: str, arguments: str, number: int) -> ToolCall | BrokenCall:
    return _call({"name": name, "arguments": _loaded(arguments)}, f"{name}{arguments}", number)


def _call(value: Any, text: str, number: int) -> ToolCall | BrokenCall:
    """Return a call from its JSON value, which is an exception if the text was not JSON."""

    def broken(error: str) -> BrokenCall:
        return BrokenCall(text, " ".join(error.split()), _id(number))

    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else value
    arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
    if isinstance(arguments, Exception):
        return broken(f"the call is not valid JSON: {arguments or 'it is nested too deeply'}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return broken('the call must be a JSON object with "name" and "arguments"')
    if not isinstance(arguments, dict):
        return broken("the arguments of the call must be a JSON object")
    return ToolCall(value["name"], arguments, _id(number))


def _id(number: int) -> str:
    return f"call{number:05d}"
