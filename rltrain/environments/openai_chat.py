"""Requests and responses of OpenAI's API for chat completions."""

from collections.abc import Iterator, Mapping
from typing import Any

from rltrain.environments.openai_api import (
    CHAT_ID,
    ApiError,
    Event,
    ModelAnswer,
    ModelRequest,
    check_options,
    max_tokens_of,
    recorded_message,
    tools_of,
    written_call,
)


def chat_request(body: Mapping[str, Any]) -> ModelRequest:
    """Read a request of `POST /v1/chat/completions`.

    Raises:
        ApiError: the request is malformed, or asks for something that conversations in training do not support.
    """
    check_options(body)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list with at least one message")
    return ModelRequest(
        messages=[recorded_message(one) for one in given],
        tools=tools_of(list(body.get("tools") or [])),
        max_tokens=max_tokens_of(body, "max_completion_tokens", "max_tokens"),
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        text_only=body.get("tool_choice") == "none",
    )


def chat_response(request: ModelRequest, answer: ModelAnswer) -> Mapping[str, Any]:
    """Return the response of `POST /v1/chat/completions`."""
    message = {"role": "assistant", "content": answer.message["content"] or None, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [written_call(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer), "logprobs": None}
    head = {"id": CHAT_ID + answer.id, "object": "chat.completion", "created": answer.created}
    return head | {"model": request.model, "choices": [choice], "usage": _chat_usage(answer)}


def chat_events(request: ModelRequest, answer: ModelAnswer) -> Iterator[Event]:
    """Yield the events of a streamed chat completion, without the final `[DONE]`."""
    head = {"id": CHAT_ID + answer.id, "object": "chat.completion.chunk", "created": answer.created}
    head |= {"model": request.model}

    def event(delta: Mapping[str, Any], finish_reason: str | None = None) -> Event:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}]}

    yield event({"role": "assistant", "content": ""})
    if answer.message["content"]:
        yield event({"content": answer.message["content"]})
    for number, call in enumerate(answer.calls):
        yield event({"tool_calls": [{"index": number, **written_call(call)}]})
    yield event({}, _finish_reason(answer))
    if request.usage:
        yield head | {"choices": [], "usage": _chat_usage(answer)}


def _finish_reason(answer: ModelAnswer) -> str:
    if answer.cut:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _chat_usage(answer: ModelAnswer) -> Mapping[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
