"""Tool calls in a model's text, in the formats that chat templates use.

A text can contain several tool calls. The parsers keep the order of the tool calls. A malformed tool call becomes a
`BrokenCall`, whose error tells the model what to change. The tool calls before and after a malformed call are still
read. Tool calls are read as JSON and are never evaluated as code. A parser does not check whether the called tool
exists. A text may begin with a thought in `<think>...</think>`, in which no tool calls are read.

rltrain has its own parsers of tool calls, because the parsers of other projects do not report malformed calls.
Importing vLLM 0.32's Hermes parser takes 19 s and loads torch. If one call of a text is malformed, or if an argument
contains `</tool_call>`, vLLM's Hermes parser returns none of the text's calls. The response parser of transformers
takes 3 s to import, and needs a response template from the model's tokenizer. Most models have a tokenizer without a
response template, so the response parser of transformers cannot be used for these models.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(r"\s*")
_KEYS = {"name", "arguments", "parameters", "id", "type"}
_SHAPE = 'write {"name": "...", "arguments": {...}}'
# Mistral's chat templates accept only tool-call ids of nine letters or digits; other chat templates accept any id.
_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: name of the called tool, which need not exist.
        arguments: dict that maps the name of each argument to the value decoded from JSON.
        id: nine letters or digits, unique among the calls in one answer of the model.
    """

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class BrokenCall:
    """A part of a text that is meant as a tool call, but cannot be read as a tool call.

    Attributes:
        text: the malformed part of the model's text.
        error: one line that tells the model what is wrong with the call.
        id: nine letters or digits, unique among the calls in one answer of the model.
    """

    text: str
    error: str
    id: str


@dataclass(frozen=True)
class ParsedAction:
    """A model's text, separated into tool calls and other text.

    Attributes:
        content: the text outside the tool calls, without white space at its start and end.
        calls: the tool calls, in the order in which they occur in the text.
    """

    content: str
    calls: Sequence[ToolCall | BrokenCall] = ()


def hermes(text: str) -> ParsedAction:
    """Read calls such as `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>` (Hermes, Qwen)."""
    return _action(text, _hermes)


def llama3(text: str) -> ParsedAction:
    """Read calls such as `{"name": "add", "parameters": {"a": 1}}` at the start of a line (Llama 3).

    Several tool calls are separated by semicolons or line breaks. `<|python_tag|>` can precede a tool call. A JSON
    object without the keys of a tool call is ordinary text, unless `<|python_tag|>` precedes the object.
    """
    return _action(text, _llama3)


def mistral(text: str) -> ParsedAction:
    """Read calls such as `[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]` or `[TOOL_CALLS]add[ARGS]{"a": 1}`."""
    return _action(text, _mistral)


def deepseek(text: str) -> ParsedAction:
    """Read calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

    In DeepSeek V3.1, a call is `name<｜tool▁sep｜>{...}`. In DeepSeek V3 and R1, a call is
    `function<｜tool▁sep｜>name`, followed by a fenced block with the arguments.
    """
    return _action(text, _deepseek)


def fenced_json(text: str) -> ParsedAction:
    """Read calls in blocks that are fenced as ```json, ```tool_call or ```tool_calls.

    A fenced block contains one tool call such as `{"name": "add", "arguments": {"a": 1}}`, or a list of tool calls. A
    ```json block without the keys of a tool call is ordinary text.
    """
    return _action(text, _fenced)


def plain_text(text: str) -> ParsedAction:
    """Read no calls: the whole text is the content of the action. A run without tools reads actions in this way."""
    return ParsedAction(text.strip())


TOOL_CALL_FORMATS: Mapping[str, Callable[[str], ParsedAction]] = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "deepseek": deepseek,
    "json": fenced_json,
}


def format_of(chat_template: str) -> str | None:
    """Return the name of the format in `TOOL_CALL_FORMATS` in which a chat template writes tool calls.

    Return None if the chat template writes no tool calls, or writes them in a format for which rltrain has no parser,
    such as XML.
    """
    if "<tool_call>" in chat_template:
        xml = "<function=" in chat_template or "<arg_key>" in chat_template
        return None if xml else "hermes"
    marks = {
        "[TOOL_CALLS]": "mistral",
        _DEEPSEEK_OPEN: "deepseek",
        "<|python_tag|>": "llama3",
        "```tool_call": "json",
        '"parameters"': "llama3",
        "```json": "json",
    }
    if "tool_call" not in chat_template:
        return None
    return next((name for mark, name in marks.items() if mark in chat_template), None)


class _MalformedError(ValueError):
    """Raised if a part of a text is not a valid tool call; the error's message tells the model what is wrong.

    Attributes:
        end: position in the text at which the tool call's JSON value ends; None if the JSON itself is malformed.
    """

    def __init__(self, message: str, end: int | None = None) -> None:
        super().__init__(" ".join(message.split())[:300])
        self.end = end


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: dict[str, Any]
    id: str | None


@dataclass(frozen=True)
class _Broken:
    text: str
    error: str


_Piece = str | _Call | _Broken


def _action(text: str, pieces: Callable[[str], Iterable[_Piece]]) -> ParsedAction:
    thought = _end_of_thought(text)
    content, calls, ids = text[:thought], list[ToolCall | BrokenCall](), set[str]()
    for piece in pieces(text[thought:]):
        if isinstance(piece, str):
            content += piece
        elif isinstance(piece, _Call):
            calls.append(ToolCall(piece.name, piece.arguments, _unused(ids, piece.id)))
        else:
            calls.append(BrokenCall(piece.text, piece.error, _unused(ids, None)))
    return ParsedAction(content.strip(), calls)


def _unused(ids: set[str], wanted: str | None) -> str:
    """Return a tool-call id that is not yet in `ids`, and add the returned id to `ids`.

    The returned tool-call id is `wanted`, or a new id if `wanted` is None or already in `ids`.
    """
    made = (f"call{number:05d}" for number in range(len(ids) + 1))
    chosen = wanted if wanted is not None and wanted not in ids else next(id for id in made if id not in ids)
    ids.add(chosen)
    return chosen


def _end_of_thought(text: str) -> int:
    """Return the position at which the `<think>` section at the start of a text ends, or 0 if there is no such section.

    The text may lack the opening `<think>`, because the prompt may already contain `<think>`.
    """
    opened = text.lstrip().startswith("<think>")
    closed = text.find("</think>")
    if closed >= 0:
        return closed + len("</think>")
    return len(text) if opened else 0


def _hermes(text: str) -> Iterator[_Piece]:
    at, opening, closing = 0, "<tool_call>", "</tool_call>"
    while (start := text.find(opening, at)) >= 0:
        yield text[at:start]
        piece, at = _enclosed(text, start, opening, closing, _checked)
        yield piece
    yield text[at:]


_LLAMA3_TAG = "<|python_tag|>"
_LLAMA3_START = re.compile(r"<\|python_tag\|>|(?:^|;)[ \t]*(?=\{)", re.MULTILINE)
_LLAMA3_NEXT = re.compile(r'<\|python_tag\|>|(?:^|;)[ \t]*(?=\{\s*"(?:name|type)"\s*:)', re.MULTILINE)
_LLAMA3_HEAD = re.compile(r'\{\s*"(?:name|type)"\s*:')


def _llama3(text: str) -> Iterator[_Piece]:
    at = shown = 0
    while found := _LLAMA3_START.search(text, at):
        tagged, body = found[0] == _LLAMA3_TAG, _after_space(text, found.end())
        try:
            value, end = _decoded(text, body)
            meant = tagged or _has_keys_of_call(value)
            piece: _Piece = _checked(value) if meant else ""
        except _MalformedError as error:
            meant = tagged or _LLAMA3_HEAD.match(text, body) is not None
            end = error.end or (_start_of(_LLAMA3_NEXT, text, body + 1) if meant else body + 1)
            piece = _Broken(text[body:end], str(error))
        if meant:
            yield text[shown : found.start()]
            yield piece
            shown = end
        at = end
    yield text[shown:]


_MISTRAL_OPEN = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _mistral(text: str) -> Iterator[_Piece]:
    before, *parts = text.split(_MISTRAL_OPEN)
    yield before
    for part in parts:
        start = _after_space(part, 0)
        named = _MISTRAL_NAMED.match(part, start)
        yield from _mistral_named(part, named) if named else _mistral_list(part, start)


def _mistral_named(part: str, named: re.Match[str]) -> Iterator[_Piece]:
    try:
        value, end = _decoded(part, named.end())
        yield _checked({"name": named[1], "arguments": value, "id": named[2]}, end)
    except _MalformedError as error:
        end = error.end or len(part)
        yield _Broken(part[named.start() : end], str(error))
    yield part[end:]


def _mistral_list(part: str, start: int) -> Iterator[_Piece]:
    at = start
    try:
        if not part.startswith("[", start):
            raise _MalformedError(f"after {_MISTRAL_OPEN}, write a JSON list of calls")
        at, more = start + 1, True
        while more:
            at = _after_space(part, at)
            value, end = _decoded(part, at)
            yield _checked_or_broken(value, part[at:end])
            at = _after_space(part, end)
            more = part.startswith(",", at)
            at += more
        if not part.startswith("]", at):
            raise _MalformedError("the list of calls is cut off: ] is missing after its last call")
        at += 1
    except _MalformedError as error:
        yield _Broken(part[at:], str(error))
        at = len(part)
    yield part[at:]


_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE, _DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_LISTS = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
_DEEPSEEK_HEAD = re.compile(
    rf"{_DEEPSEEK_OPEN}\s*(?:function{_DEEPSEEK_SEP}([^\n<]*?)\s*```(?:json)?|([^\n<]*?){_DEEPSEEK_SEP})"
)


def _deepseek(text: str) -> Iterator[_Piece]:
    at = 0
    while (start := text.find(_DEEPSEEK_OPEN, at)) >= 0:
        yield _DEEPSEEK_LISTS.sub("", text[at:start])
        piece, at = _deepseek_call(text, start)
        yield piece
    yield _DEEPSEEK_LISTS.sub("", text[at:])


def _deepseek_call(text: str, start: int) -> tuple[_Piece, int]:
    head = _DEEPSEEK_HEAD.match(text, start)
    if head is None:
        end = _end_of_broken(text, start + len(_DEEPSEEK_OPEN), _DEEPSEEK_OPEN, _DEEPSEEK_CLOSE)
        return _Broken(text[start:end], f"write the name of the tool and {_DEEPSEEK_SEP} before its arguments"), end
    name, fenced = (head[1], True) if head[1] is not None else (head[2], False)
    return _enclosed(
        text,
        start,
        head[0],
        _DEEPSEEK_CLOSE,
        lambda value: _checked({"name": name, "arguments": value}),
        reopening=_DEEPSEEK_OPEN,
        fence="```" if fenced else "",
    )


_FENCE = re.compile(r"^[ \t]*```[ \t]*(json|tool_calls?)[ \t]*$\n?", re.MULTILINE)
_FENCE_CLOSE = "```"
_CALL_KEYS = re.compile(r'"name"\s*:.*"(?:arguments|parameters)"\s*:|"(?:arguments|parameters)"\s*:.*"name"\s*:', re.S)


def _fenced(text: str) -> Iterator[_Piece]:
    at = shown = 0
    while found := _FENCE.search(text, at):
        at, pieces = _fenced_block(text, found)
        if pieces:
            yield text[shown : found.start()]
            yield from pieces
            shown = at
    yield text[shown:]


def _fenced_block(text: str, found: re.Match[str]) -> tuple[int, list[_Piece]]:
    """Return the position at which a fenced block ends, and the calls in the block."""
    start, body = found.start(), _after_space(text, found.end())
    try:
        value, end = _decoded(text, body)
        end = _after_closing(text, end, _FENCE_CLOSE)
    except _MalformedError as error:
        closing = text.find(_FENCE_CLOSE, error.end or body)
        end = len(text) if closing < 0 else closing + len(_FENCE_CLOSE)
        meant = found[1] != "json" or _CALL_KEYS.search(text, body, end)
        return end, [_Broken(text[start:end], str(error))] if meant else []
    values = value if isinstance(value, list) else [value]
    meant = found[1] != "json" or (bool(values) and all(map(_has_keys_of_call, values)))
    return end, [_checked_or_broken(value, text[start:end]) for value in values] if meant else []


def _enclosed(
    text: str,
    start: int,
    opening: str,
    closing: str,
    read: Callable[[Any], _Call],
    *,
    reopening: str | None = None,
    fence: str = "",
) -> tuple[_Piece, int]:
    """Read the tool call between an opening and a closing mark, and return the call and the position of the call's end.

    Args:
        text: the model's text, which contains the tool call.
        start: position in the text at which the opening mark of the tool call starts.
        opening, closing: the marks before and after the JSON value of the tool call.
        read: function that converts the JSON value of a tool call to the tool call.
        reopening: mark with which every tool call of the format starts; None if every tool call starts with `opening`.
        fence: mark that ends the fenced code block around the tool call's JSON value; "" if the JSON value is not in a
            code block. In the model's text, only white space may be between `fence` and `closing`.
    """
    body = start + len(opening)
    try:
        value, end = _decoded(text, body)
        end = _after_closing(text, end, fence)
        end = _after_closing(text, end, closing)
    except _MalformedError as error:
        end = _end_of_broken(text, error.end or body, reopening or opening, closing)
        cut = error.end is None and closing not in text[body:] and end == len(text)
        said = f"the call is cut off: {closing} is missing" if cut else str(error)
        return _Broken(text[start:end], said), end
    try:
        return read(value), end
    except _MalformedError as error:
        return _Broken(text[start:end], str(error)), end


def _end_of_broken(text: str, at: int, opening: str, closing: str) -> int:
    """Return the position at which a malformed call ends.

    A malformed call ends after the next closing mark or before the next opening mark, whichever mark comes first. If
    neither a closing mark nor an opening mark follows, the malformed call ends at the end of the text.
    """
    closed, opened = text.find(closing, at), text.find(opening, at)
    if closed >= 0 and not 0 <= opened < closed:
        return closed + len(closing)
    return opened if opened >= 0 else len(text)


def _after_closing(text: str, at: int, closing: str) -> int:
    at = _after_space(text, at)
    if text.startswith(closing, at):
        return at + len(closing)
    if at == len(text):
        raise _MalformedError(f"the call is cut off: {closing} is missing", at)
    raise _MalformedError(f"write {closing} directly after the JSON of the call", at)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _start_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.search(text, at)
    return found.start() if found else len(text)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value after optional white space at position `at`, and the position at which the value ends."""
    at = _after_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        # `encode` raises a UnicodeError if `value` contains an unpaired surrogate, from a JSON escape such as \ud800.
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _MalformedError(f"the call is not valid JSON: {error.msg} (character {error.pos - at})") from None
    except RecursionError:
        raise _MalformedError("the JSON of the call is nested too deeply") from None
    except ValueError as error:
        raise _MalformedError(f"the call is not valid JSON: {_words(error)}") from None
    return value, end


def _words(error: ValueError) -> str:
    return "invalid Unicode" if isinstance(error, UnicodeError) else str(error)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {json.dumps(key)} occurs twice")
        made[key] = value
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_no_constant)


def _has_keys_of_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value)


def _checked_or_broken(value: Any, text: str) -> _Call | _Broken:
    try:
        return _checked(value)
    except _MalformedError as error:
        return _Broken(text, str(error))


def _checked(value: Any, end: int | None = None) -> _Call:
    """Convert a JSON value to a tool call, or raise an error whose message tells the model what is wrong."""
    if not isinstance(value, dict):
        raise _MalformedError(f"the call is not a JSON object; {_SHAPE}", end)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _MalformedError(f"the call has no name of a tool; {_SHAPE}", end)
    if unknown := [key for key in value if key not in _KEYS]:
        raise _MalformedError(f"the call has the unknown key {json.dumps(unknown[0])}; {_SHAPE}", end)
    if "arguments" in value and "parameters" in value:
        raise _MalformedError(
            "the call has both the key arguments and the key parameters; keep only one of these keys", end
        )
    id = value.get("id")
    made = id if isinstance(id, str) and _ID.fullmatch(id) else None
    return _Call(name, _arguments(value.get("arguments", value.get("parameters", {})), end), made)


def _arguments(value: Any, end: int | None) -> dict[str, Any]:
    """Return the arguments of a tool call as a dict.

    `value` is a JSON object, or a string that contains a JSON object.
    """
    if isinstance(value, str):
        try:
            text, (value, after) = value, _decoded(value, 0)
        except _MalformedError as error:
            raise _MalformedError(f"in the arguments, {error}", end) from None
        if text[after:].strip():
            raise _MalformedError("text follows the JSON object in the arguments of the call", end)
    if not isinstance(value, dict):
        raise _MalformedError("the arguments of the call are not a JSON object", end)
    return value
