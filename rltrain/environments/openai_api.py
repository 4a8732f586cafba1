"""Code shared by the two OpenAI-compatible HTTP APIs, the API for chat completions and the Responses API.

Requests to the chat completions API and to the Responses API are converted to the class `ModelRequest`. Objects of the
class `ModelAnswer` are converted to responses of the API that received the request. The JSON objects of requests and
responses follow OpenAI's public API reference, platform.openai.com/docs/api-reference.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.environments.contract import valid_unicode

Message = dict[str, Any]
Event = dict[str, Any]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
CHAT_ID, RESPONSE_ID = "chatcmpl-", "resp_"  # Prefixes of response ids: chat completions API, Responses API.
_TEXT_PARTS = ("text", "input_text", "output_text")


class ApiError(Exception):
    """Raised if a request to the API cannot be answered.

    Args:
        message: Text for the program that made the request.
        status: HTTP status of the response.
        code: Machine-readable name of the error.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> Mapping[str, Any]:
        """Return the JSON object that describes the error in the HTTP response."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "code": self.code, "param": None}}


@dataclass(frozen=True)
class ModelRequest:
    """A request for the model's next message.

    Attributes:
        messages: The whole conversation as chat messages. The content of each message is text, and the arguments of
            tool calls are decoded JSON.
        tools: Schemas of the tools, as `transformers.utils.get_json_schema` returns them.
        max_tokens: Maximum number of tokens of the answer; None for no limit.
        model: Model name in the request, which the response repeats.
        stream: Whether the response is a stream of events.
        usage: Whether a streamed chat completion ends with an event that contains the numbers of tokens.
        text_only: Whether tool calls in the answer are returned as text (`tool_choice="none"`).
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    model: str = ""
    stream: bool = False
    usage: bool = False
    text_only: bool = False


@dataclass(frozen=True)
class ModelAnswer:
    """The model's answer to a request.

    Attributes:
        id: Identity of the answer, unique in the run.
        message: The answer as a chat message. The arguments of tool calls are decoded JSON.
        cut: Whether the answer was cut at the maximum number of tokens.
        prompt_tokens: Number of tokens in the context before the answer.
        completion_tokens: Number of sampled tokens.
        created: Time at which the answer was created, in seconds since 1970.
    """

    id: str
    message: Message
    cut: bool
    prompt_tokens: int
    completion_tokens: int
    created: int

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Return the tool calls of the answer."""
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return calls


def plain_id(id: Any) -> str:
    """Return the `ModelAnswer.id` of a response, without the prefix that the API gives to the id."""
    return str(id).removeprefix(CHAT_ID).removeprefix(RESPONSE_ID)


def check_options(body: Mapping[str, Any]) -> None:
    """Raise ApiError if the body of a request is not an object, or gives an option a value that the API refuses."""
    if not isinstance(body, Mapping):
        raise ApiError("the body of the request must be a JSON object")
    if body.get("n") not in (None, 1):
        raise ApiError(f"n={body['n']}: a request gets one answer; send several requests")
    if body.get("stop"):
        raise ApiError("stop: stop strings are not supported; leave stop out")
    if body.get("logprobs"):
        raise ApiError("logprobs: log-probabilities are not returned; leave logprobs out")
    if body.get("functions"):
        raise ApiError("functions: this older form of tools is not supported; use tools")
    if body.get("background"):
        raise ApiError("background: responses in the background are not supported; leave background out")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise ApiError(
            f"tool_choice={body['tool_choice']!r}: the model decides whether to call a tool; use 'auto' or 'none'"
        )
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {"type": "text"}
    if form.get("type") != "text":
        raise ApiError(f"the response format {form.get('type')!r} is not supported; use 'text'")


def tools_of(tools: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    """Return the schemas of a request's tools in the format of the chat completions API.

    Raises:
        ApiError: an entry of `tools` is not a function with a name.
    """
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or tool.get("type") != "function":
            raise ApiError("each tool must be a function with a name")
    return [{"type": "function", "function": _without_strict(tool["function"])} for tool in tools]


def max_tokens_of(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the value of the first key in `names` that a request sets, or None if the request sets no key in `names`.

    Raises:
        ApiError: the maximum number of tokens in the request is not a positive integer.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ApiError(f"{name}={value!r}: must be a positive integer")
        return value
    return None


def recorded_message(given: Any) -> Message:
    """Convert a message of a request to the form in which rltrain records conversations.

    Raises:
        ApiError: the message is malformed, or contains something other than text and tool calls.
    """
    if not isinstance(given, Mapping) or given.get("role") not in _ROLES:
        raise ApiError(f"each message needs a role, which is one of {', '.join(_ROLES)}")
    message: Message = {"role": _ROLES[given["role"]], "content": _text(given.get("content"))}
    if given.get("tool_calls"):
        message["tool_calls"] = [_read_call(call) for call in given["tool_calls"]]
    if message["role"] == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id") or "")
    return message


def recorded_call(id: str, name: Any, arguments: Any) -> Mapping[str, Any]:
    """Convert a tool call of a request to the form in which rltrain records conversations.

    Raises:
        ApiError: the arguments of the tool call are not valid JSON.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(valid_unicode(arguments) or "{}")
            # An unpaired surrogate (from a JSON escape such as \ud800) is not valid Unicode, so `encode` raises
            # UnicodeEncodeError, which is a ValueError.
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise ApiError("the arguments of a tool call are not valid JSON") from None
    return {"id": id, "type": "function", "function": {"name": str(name), "arguments": arguments}}


def written_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a recorded tool call to the format of the chat completions API, where the arguments are JSON text."""
    function = call["function"]
    written = {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {"id": call["id"], "type": "function", "function": written}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return valid_unicode(content)
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        if all(part.get("type") in _TEXT_PARTS for part in content):
            return valid_unicode("".join(str(part.get("text") or "") for part in content))
        raise ApiError("a message contains something other than text, which is not supported")
    raise ApiError("the content of a message must be a text or a list of text parts")


def _read_call(call: Any) -> Mapping[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ApiError("each tool call needs a function")
    return recorded_call(str(call.get("id") or ""), call["function"].get("name"), call["function"].get("arguments"))


def _without_strict(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {key: value for key, value in function.items() if key != "strict"}
    return {"description": "", "parameters": {"type": "object", "properties": {}}, **given}
