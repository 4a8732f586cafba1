"""Requests and responses of two OpenAI-compatible HTTP APIs: chat completions and responses.

Both APIs are converted to and from the same two classes, `ModelRequest` and `ModelAnswer`. The JSON objects follow the
public API reference of OpenAI, platform.openai.com/docs/api-reference.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.environments.contract import valid_unicode

Message = dict[str, Any]
Event = dict[str, Any]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_CHAT_ID, _RESPONSE_ID = "chatcmpl-", "resp_"  # Prefixes of the ids of responses.
_TEXT_PARTS = ("text", "input_text", "output_text")


class ApiError(Exception):
    """Raised if a request cannot be answered.

    Args:
        message: Text for the program that made the request.
        status: HTTP status of the response.
        code: Machine-readable name of the error.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> Mapping[str, Any]:
        """Return the JSON object of the error."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "code": self.code, "param": None}}


@dataclass(frozen=True)
class ModelRequest:
    """A request for the model's next message.

    Attributes:
        messages: The whole conversation as chat messages. Contents are text, and the arguments of calls are objects.
        tools: Schemas of the tools, as `transformers.utils.get_json_schema` returns them.
        max_tokens: Maximum number of tokens of the answer; None for no limit.
        model: Name of the model, which the response repeats.
        stream: Whether the response is a stream of events.
        usage: Whether a stream of chat completions ends with the number of tokens.
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
        message: The answer as a chat message. The arguments of calls are objects.
        cut: Whether the answer was cut at the maximum number of tokens.
        prompt_tokens: Number of tokens before the answer.
        completion_tokens: Number of sampled tokens.
        created: Seconds since 1970.
    """

    id: str
    message: Message
    cut: bool
    prompt_tokens: int
    completion_tokens: int
    created: int

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Tool calls of the answer."""
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return calls


def plain_id(id: Any) -> str:
    """Return the `ModelAnswer.id` of a response, without the prefix that the API gives to the id."""
    return str(id).removeprefix(_CHAT_ID).removeprefix(_RESPONSE_ID)


def chat_request(body: Mapping[str, Any]) -> ModelRequest:
    """Read a request of `POST /v1/chat/completions`.

    Raises:
        ApiError: the request is malformed, or asks for something that conversations in training do not support.
    """
    _check_options(body)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list with at least one message")
    return ModelRequest(
        messages=[_message(one) for one in given],
        tools=_tools(body, list(body.get("tools") or [])),
        max_tokens=_max_tokens(body, "max_completion_tokens", "max_tokens"),
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        text_only=body.get("tool_choice") == "none",
    )


def chat_response(request: ModelRequest, answer: ModelAnswer) -> Mapping[str, Any]:
    """Return the response of `POST /v1/chat/completions`."""
    message = {"role": "assistant", "content": answer.message["content"] or None, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [_written_call(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer), "logprobs": None}
    head = {"id": _CHAT_ID + answer.id, "object": "chat.completion", "created": answer.created}
    return head | {"model": request.model, "choices": [choice], "usage": _chat_usage(answer)}


def chat_events(request: ModelRequest, answer: ModelAnswer) -> Iterator[Event]:
    """Yield the events of a streamed chat completion, without the final `[DONE]`."""
    head = {"id": _CHAT_ID + answer.id, "object": "chat.completion.chunk", "created": answer.created}
    head |= {"model": request.model}

    def event(delta: Mapping[str, Any], finish_reason: str | None = None) -> Event:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}]}

    yield event({"role": "assistant", "content": ""})
    if answer.message["content"]:
        yield event({"content": answer.message["content"]})
    for number, call in enumerate(answer.calls):
        yield event({"tool_calls": [{"index": number, **_written_call(call)}]})
    yield event({}, _finish_reason(answer))
    if request.usage:
        yield head | {"choices": [], "usage": _chat_usage(answer)}


def responses_request(body: Mapping[str, Any], previous: Sequence[Message] = ()) -> ModelRequest:
    """Read a request of `POST /v1/responses`.

    Args:
        body: The JSON object of the request.
        previous: The conversation up to the response that `previous_response_id` names.

    Raises:
        ApiError: the request is malformed, or asks for something that conversations in training do not support.
    """
    _check_options(body)
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError("input must be a text or a list with at least one item")
    messages = list(previous)
    if body.get("instructions"):
        messages = [{"role": "system", "content": str(body["instructions"])}, *_without_system(messages)]
    for item in given:
        _add_item(messages, item)
    nested = [{"type": one.get("type"), "function": _without_type(one)} for one in body.get("tools") or []]
    return ModelRequest(
        messages=messages,
        tools=_tools(body, nested),
        max_tokens=_max_tokens(body, "max_output_tokens"),
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        text_only=body.get("tool_choice") == "none",
    )


def responses_response(request: ModelRequest, answer: ModelAnswer, *, status: str = "") -> Mapping[str, Any]:
    """Return the response of `POST /v1/responses`."""
    status = status or ("incomplete" if answer.cut else "completed")
    return {
        "id": _RESPONSE_ID + answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": [] if status == "in_progress" else _items(answer),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "top_p": None,
        "usage": None if status == "in_progress" else _responses_usage(answer),
    }


def responses_events(request: ModelRequest, answer: ModelAnswer) -> Iterator[Event]:
    """Yield the events of a streamed response."""
    number = 0

    def event(kind: str, /, **values: Any) -> Event:
        nonlocal number
        number += 1
        return {"type": kind, "sequence_number": number - 1, **values}

    started = responses_response(request, answer, status="in_progress")
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(_items(answer)):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            yield event("response.output_item.added", output_index=index, item=item | {"arguments": ""})
            yield event("response.function_call_arguments.delta", delta=item["arguments"], **place)
            yield event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"], **place
            )
        else:
            part = item["content"][0]
            place |= {"content_index": 0}
            yield event("response.output_item.added", output_index=index, item=item | {"content": []})
            yield event("response.content_part.added", part=part | {"text": ""}, **place)
            yield event("response.output_text.delta", delta=part["text"], logprobs=[], **place)
            yield event("response.output_text.done", text=part["text"], logprobs=[], **place)
            yield event("response.content_part.done", part=part, **place)
        yield event("response.output_item.done", output_index=index, item=item)
    ended = responses_response(request, answer)
    yield event(f"response.{ended['status']}", response=ended)


def _check_options(body: Mapping[str, Any]) -> None:
    """Raise ApiError if a request asks for something that would change which tokens are sampled or trained."""
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
        raise ApiError(f"tool_choice={body['tool_choice']!r}: the model chooses itself; use 'auto' or 'none'")
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {"type": "text"}
    if form.get("type") != "text":
        raise ApiError(f"the response format {form.get('type')!r} is not supported; use 'text'")


def _tools(body: Mapping[str, Any], tools: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or tool.get("type") != "function":
            raise ApiError("each tool must be a function with a name")
    return [{"type": "function", "function": _without_strict(tool["function"])} for tool in tools]


def _without_strict(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {key: value for key, value in function.items() if key != "strict"}
    return {"description": "", "parameters": {"type": "object", "properties": {}}, **given}


def _without_type(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in tool.items() if key != "type"}


def _max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ApiError(f"{name}={value!r}: must be a positive integer")
        return value
    return None


def _message(given: Any) -> Message:
    """Return a message of a request in the form in which conversations are recorded."""
    if not isinstance(given, Mapping) or given.get("role") not in _ROLES:
        raise ApiError(f"each message needs a role, which is one of {', '.join(_ROLES)}")
    message: Message = {"role": _ROLES[given["role"]], "content": _text(given.get("content"))}
    if given.get("tool_calls"):
        message["tool_calls"] = [_read_call(call) for call in given["tool_calls"]]
    if message["role"] == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id") or "")
    return message


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
    return _call(str(call.get("id") or ""), call["function"].get("name"), call["function"].get("arguments"))


def _call(id: str, name: Any, arguments: Any) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(valid_unicode(arguments) or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()  # Fails if an escape is an unpaired surrogate.
        except (ValueError, RecursionError):
            raise ApiError("the arguments of a tool call are not valid JSON") from None
    return {"id": id, "type": "function", "function": {"name": str(name), "arguments": arguments}}


def _add_item(messages: list[Message], item: Any) -> None:
    """Append an input item of the responses API to chat messages.

    An answer of the model may consist of several items, which become one message of the assistant.
    """
    if not isinstance(item, Mapping):
        raise ApiError("each item of input must be an object")
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        output = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        messages.append(_message(output))
    elif kind == "function_call":
        call = _call(str(item.get("call_id") or ""), item.get("name"), item.get("arguments"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}
    elif kind == "message":
        messages.append(_message(item))
    else:
        raise ApiError(f"an input item of the type {kind!r} is not supported")


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [one for number, one in enumerate(messages) if number or one["role"] != "system"]


def _written_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    written = {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {"id": call["id"], "type": "function", "function": written}


def _items(answer: ModelAnswer) -> list[dict[str, Any]]:
    """Return the output items of an answer: its text, and its tool calls."""
    status = "incomplete" if answer.cut else "completed"
    items: list[dict[str, Any]] = []
    if answer.message["content"] or not answer.calls:
        text = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
        items.append({**head, "content": [text]})
    for number, call in enumerate(answer.calls):
        written = _written_call(call)
        head = {"type": "function_call", "id": f"fc_{answer.id}_{number}", "call_id": call["id"], "status": status}
        items.append({**head, **written["function"]})
    return items


def _finish_reason(answer: ModelAnswer) -> str:
    if answer.cut:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _chat_usage(answer: ModelAnswer) -> Mapping[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _responses_usage(answer: ModelAnswer) -> Mapping[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
