"""Checks that a conversation whose token ids are built turn by turn agrees with the chat template's rendering of the
whole conversation.

The function `fault` builds synthetic conversations turn by turn, as in a rollout, and compares each of them with the
chat template's rendering of the whole conversation:

- The conversation built turn by turn and the template's rendering have the same control tokens in the same order. For
  example, a conversation built turn by turn must not contain a second beginning-of-sequence token or a repeated system
  prompt that the template would not write, and must not lack an end token that the template would write.
- Between two control tokens, the conversation built turn by turn and the template's rendering have the same token ids.
  An answer of the assistant must have the same text in the conversation built turn by turn and in the template's
  rendering, but the answer's token ids are allowed to differ. The white space around an answer, which the policy
  samples, is allowed to differ between the conversation built turn by turn and the template's rendering. Thoughts
  (`<think>...</think>`) in the conversation built turn by turn are allowed to differ from those in the template's
  rendering, because some templates remove thoughts from earlier answers.
- The conversation built turn by turn ends where the template would write the assistant's next answer.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rltrain.data.chat_templates import TemplateError
from rltrain.data.prompt_encoding import one_bos

if TYPE_CHECKING:
    from rltrain.data.turn_rendering import Message, TurnRenderer

_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*|\s*<think>\s*$", re.DOTALL)
_OPENED = re.compile(r"<think>\s*$")
_START: "Message" = {"role": "user", "content": "ask 12"}
_TAIL = 40  # Number of characters at the end of a context that are compared with the template's rendering.
_WAY_OUT = "use another template (chat_template in the tokenizer's files)"


class _FaultError(ValueError):
    """Raised if a conversation that is built turn by turn cannot agree with the template's rendering."""


@dataclass(frozen=True)
class _Turn:
    """An answer of the assistant and the messages after it.

    Attributes:
        messages: the messages that follow the assistant's answer.
        thought: text of the thought (`<think>...</think>`) before the assistant's answer.
        cut: whether the assistant's answer was cut off before the policy sampled an end token.
    """

    messages: "Sequence[Message]"
    thought: str = ""
    cut: bool = False


def fault(renderer: "TurnRenderer", roles: Collection[str]) -> str | None:
    """Compare conversations that are built turn by turn with the chat template's rendering of the whole conversations.

    Return one line that describes the first difference between a conversation built turn by turn and the template's
    rendering, or None if there is no difference.

    Args:
        renderer: the renderer to check, which builds conversations turn by turn.
        roles: roles of the messages that follow an answer of the assistant.
    """
    if not renderer.tokenizer.chat_template:
        return "the tokenizer has no chat template; use a chat model"
    try:
        _require_tools(renderer)
        _require_open(renderer, [_START], renderer.render([_START], opened=True))
        for what, turns in _conversations(roles):
            try:
                _check(renderer, turns)
            except (_FaultError, TemplateError) as error:
                return (
                    "a conversation built turn by turn would differ from the chat template's rendering if "
                    f"{what}: {error}"
                )
    except (_FaultError, TemplateError) as error:
        return f"a conversation built turn by turn would differ from the chat template's rendering: {error}"
    return None


def _conversations(roles: Collection[str]) -> Iterator[tuple[str, list[_Turn]]]:
    user = [{"role": "user", "content": "then 34"}]
    results = [
        {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": f"found {number}"}
        for number, name in enumerate(("alpha", "beta"))
    ]
    thought = "<think>\nthinking 56\n</think>\n\n"
    if "user" in roles:
        yield "a user's message follows an answer", [_Turn(user)]
        yield "a user's message follows an answer that was cut off", [_Turn(user, cut=True)]
        yield "a user's message follows each of three answers", [_Turn(user)] * 3
        yield "a user's message follows an answer with thoughts", [_Turn(user, thought), _Turn(user, thought)]
    if "tool" in roles:
        yield "a tool result follows an answer with one tool call", [_Turn(results[:1])]
        yield "the results of two tool calls follow one answer", [_Turn(results)]
        yield "a tool result follows each of three answers", [_Turn(results[:1])] * 3
        yield "a tool result follows an answer with thoughts", [_Turn(results[:1], thought)] * 2
        yield "a tool result follows an answer that was cut off", [_Turn(results[:1]), _Turn(results[:1], cut=True)]
    if {"user", "tool"} <= {*roles}:
        yield "tool results and user messages follow answers", [_Turn(results), _Turn(user), _Turn(results[:1])]


def _require_tools(renderer: "TurnRenderer") -> None:
    names = [tool.get("function", tool).get("name") for tool in renderer.tools]
    text = renderer.render([_START], opened=True)
    missing = [str(name) for name in names if name not in text]
    if missing:
        raise _FaultError(f"the chat template does not show the tool {missing[0]} to the model; {_WAY_OUT}")


def _check(renderer: "TurnRenderer", turns: Sequence[_Turn]) -> None:
    chat, answers = [_START], list[str]()
    row = renderer.prompt_ids(chat)
    for number, turn in enumerate(turns):
        message, text = _answer(renderer, turn, number)
        action = renderer.encoded(_thought(renderer, turn) + text)
        action += [] if turn.cut else _sampled_end(renderer, turn.messages)
        row += action + renderer.observation_ids(turn.messages, action)
        chat += [message, *turn.messages]
        answers += [renderer.decoded(ids).strip() for _, ids in _pieces(renderer, renderer.encoded(text)) if ids]
    whole = renderer.render(chat, opened=True)
    _require_contents(chat, whole)
    _require_same(renderer, row, one_bos(renderer.encoded(whole), renderer.tokenizer.bos_token_id), answers)
    _require_open(renderer, chat, whole)


def _answer(renderer: "TurnRenderer", turn: _Turn, number: int) -> "tuple[Message, str]":
    """Return the assistant's message of a turn, and the text of the message without its thought."""
    anchor = renderer.anchor(turn.messages)
    if "tool_calls" not in anchor.message:
        text = f"{renderer.mark} {number}"
        return {"role": "assistant", "content": turn.thought + text}, text
    opened = _THOUGHT.sub("", renderer.render([_START], opened=True))
    closed = _THOUGHT.sub("", renderer.render([_START, anchor.message], opened=False))
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, closed, strict=False)))
    text = closed[start : len(closed) - len(anchor.closing)].strip()
    return {**anchor.message, "content": turn.thought}, text


def _thought(renderer: "TurnRenderer", turn: _Turn) -> str:
    """Return the thought that is sampled in a turn, without `<think>` if the prompt already ends with `<think>`."""
    if not _OPENED.search(renderer.render([_START], opened=True)):
        return turn.thought
    return turn.thought.removeprefix("<think>") or "\n</think>\n\n"


def _sampled_end(renderer: "TurnRenderer", messages: "Sequence[Message]") -> list[int]:
    """Return a list with the id of the control token with which the policy ends an answer.

    The policy ends an answer with the template's end token. If the template has no end token, the policy ends an answer
    with the control token that opens the next message. If the template writes no control tokens, return an empty list.

    Raises:
        _FaultError: the engine does not stop at the control token that ends an answer.
    """
    ids = renderer.observation_ids(messages, [])
    first = next((id for id in ids if id in renderer.special_ids), None)
    if first is None:
        return []
    if first not in renderer.stop_ids:
        name = renderer.tokenizer.convert_ids_to_tokens(first)
        raise _FaultError(
            f"the chat template ends an answer with {name}, at which the engine does not stop; add its id {first} to "
            "eos_token_id of the model's generation_config.json, or " + _WAY_OUT
        )
    return [first]


def _require_contents(chat: "Sequence[Message]", whole: str) -> None:
    for message in chat:
        if message["role"] != "assistant" and whole.count(message["content"]) < chat.count(message):
            raise _FaultError(f"the chat template leaves out messages of the role {message['role']}; {_WAY_OUT}")


def _require_same(renderer: "TurnRenderer", row: Sequence[int], whole: Sequence[int], answers: Sequence[str]) -> None:
    """Raise _FaultError unless a conversation that was built turn by turn agrees with the template's rendering.

    Thoughts, and white space around answers, may differ between the conversation and the rendering.

    Args:
        renderer: the checked renderer, which has built the conversation turn by turn.
        row: token ids of the conversation that was built turn by turn.
        whole: token ids of the chat template's rendering of the whole conversation.
        answers: texts of the assistant's answers. An answer that contains control tokens is split at these tokens.
    """
    ours, theirs = _pieces(renderer, row), _pieces(renderer, whole)
    for (special, ids), (their_special, their_ids) in zip(ours, theirs, strict=False):
        if special != their_special:
            raise _FaultError(
                f"the built conversation contains the control token {_name(renderer, special)} where the template "
                f"writes {_name(renderer, their_special)}; {_WAY_OUT}"
            )
        text, their_text = renderer.decoded(ids), renderer.decoded(their_ids)
        if ids != their_ids and not _same(text, their_text, answers):
            raise _FaultError(
                f"the built conversation contains {text[-80:]!r} where the template writes {their_text[-80:]!r}; "
                f"{_WAY_OUT}"
            )
    if len(ours) != len(theirs):
        raise _FaultError(
            f"the built conversation has {len(ours) - 1} control tokens, but the template writes {len(theirs) - 1}"
        )


def _same(text: str, their_text: str, answers: Sequence[str]) -> bool:
    ours, theirs = _compared(text, answers), _compared(their_text, answers)
    if _THOUGHT.search(text):  # A template that removes a thought can keep the white space after the thought.
        return ours.strip() == theirs.strip()
    return ours == theirs


def _compared(text: str, answers: Sequence[str]) -> str:
    """Return a text without thoughts, and without the white space around the answers that the text contains.

    The white space after an answer is removed only at the end of the text.
    """
    text = _THOUGHT.sub("", text)
    for answer in answers:
        text = re.sub(rf"\s*{re.escape(answer)}(?:\s*$)?", lambda found: found[0].strip(), text)
    return text


def _pieces(renderer: "TurnRenderer", ids: Sequence[int]) -> list[tuple[int | None, list[int]]]:
    """Split `ids` into pairs (id of a control token, list of the ids up to the next control token).

    The first pair is (None, list of the ids before the first control token).
    """
    pieces: list[tuple[int | None, list[int]]] = [(None, [])]
    special = renderer.special_ids - {*renderer.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])}
    for id in ids:
        if id in special:
            pieces.append((id, []))
        else:
            pieces[-1][1].append(id)
    return pieces


def _require_open(renderer: "TurnRenderer", chat: "Sequence[Message]", whole: str) -> None:
    """Raise an error if the template writes anything but thoughts between a context and the assistant's next answer."""
    answer: Any = {"role": "assistant", "content": renderer.mark}
    following = renderer.render([*chat, answer], opened=False)
    context = _THOUGHT.sub("", whole).rstrip()[-_TAIL:]
    before = _THOUGHT.sub("", following.rpartition(renderer.mark)[0]).rstrip()
    if not before.endswith(context):
        raise _FaultError(
            f"the chat template does not open the assistant's next answer: with add_generation_prompt=true its text "
            f"ends with {context!r}, but it writes a finished answer after {before[-_TAIL:]!r}; {_WAY_OUT}"
        )


def _name(renderer: "TurnRenderer", id: int | None) -> str:
    return "no token" if id is None else str(renderer.tokenizer.convert_ids_to_tokens(id))
