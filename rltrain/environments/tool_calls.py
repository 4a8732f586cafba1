"""STUB"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class BrokenCall:
    text: str
    error: str
    id: str


@dataclass(frozen=True)
class ParsedAction:
    content: str
    calls: Sequence[ToolCall | BrokenCall] = ()


def hermes(text: str) -> ParsedAction:
    calls = []
    for n, m in enumerate(re.finditer(r"<tool_call>(.*?)(</tool_call>|$)", text, re.S)):
        try:
            v = json.loads(m.group(1))
            calls.append(ToolCall(v["name"], v["arguments"], f"call_{n}"))
        except Exception as e:
            calls.append(BrokenCall(m.group(1), f"not valid: {e}", f"call_{n}"))
    return ParsedAction(re.sub(r"<tool_call>.*?(</tool_call>|$)", "", text, flags=re.S).strip(), calls)


TOOL_CALL_FORMATS: dict[str, Callable[[str], ParsedAction]] = {
    "hermes": hermes,
    "json": lambda t: ParsedAction(t.strip()),
}


def format_of(template: str) -> str | None:
    return "hermes" if "<tool_call>" in template else None


def parser_of(name: str) -> Callable[[str], ParsedAction]:
    return TOOL_CALL_FORMATS[name]
