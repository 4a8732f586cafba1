"""Requests and responses of OpenAI's Responses API."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rltrain.environments.openai_api import (
    RESPONSE_ID,
    ApiError,
    Event,
    Message,
    ModelAnswer,
    ModelRequest,
    check_options,
    max_tokens_of,
    recorded_call,
    recorded_message,
    tools_of,
    written_call,
)


def responses_request(body: Mapping[str, Any], previous: Sequence[Message] = ()) -> ModelRequest:
    """Read a request of `POST /v1/responses`.

    Args:
        body: The JSON object in the body of the HTTP request.
        previous: Messages of the earlier conversation, up to and including the response with the id
            `previous_response_id`.

    Raises:
        ApiError: the request is malformed, or asks for something that conversations in training do not support.
    """
    check_options(body)
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
        tools=tools_of(nested),
        max_tokens=max_tokens_of(body, "max_output_tokens"),
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        text_only=body.get("tool_choice") == "none",
    )


def responses_response(request: ModelRequest, answer: ModelAnswer, *, status: str = "") -> Mapping[str, Any]:
    """Return the response of `POST /v1/responses`."""
    status = status or ("incomplete" if answer.cut else "completed")
    return {
        "id": RESPONSE_ID + answer.id,
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
    """Yield the events of a streamed response of the Responses API."""
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


def _add_item(messages: list[Message], item: Any) -> None:
    """Append an input item of the Responses API to chat messages.

    If an answer of the model consists of several input items, the items become one message of the assistant.
    """
    if not isinstance(item, Mapping):
        raise ApiError("each item of input must be an object")
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        output = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        messages.append(recorded_message(output))
    elif kind == "function_call":
        call = recorded_call(str(item.get("call_id") or ""), item.get("name"), item.get("arguments"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}
    elif kind == "message":
        messages.append(recorded_message(item))
    else:
        raise ApiError(f"an input item of the type {kind!r} is not supported")


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [one for number, one in enumerate(messages) if number or one["role"] != "system"]


def _items(answer: ModelAnswer) -> list[dict[str, Any]]:
    """Return the output items of an answer: its text, and its tool calls."""
    status = "incomplete" if answer.cut else "completed"
    items: list[dict[str, Any]] = []
    if answer.message["content"] or not answer.calls:
        text = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
        items.append({**head, "content": [text]})
    for number, call in enumerate(answer.calls):
        written = written_call(call)
        head = {"type": "function_call", "id": f"fc_{answer.id}_{number}", "call_id": call["id"], "status": status}
        items.append({**head, **written["function"]})
    return items


def _responses_usage(answer: ModelAnswer) -> Mapping[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _without_type(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in tool.items() if key != "type"}
