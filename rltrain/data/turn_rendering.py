"""Rendering of conversations with several turns, without decoding and re-encoding sampled token ids.

The token ids of a context grow only at the end: the prompt's ids are followed by the ids that the policy sampled, the
ids of an *observation*, the next sampled ids, and so on. The text of an observation is everything that the chat
template writes between two answers of the assistant, except for text that the policy has already sampled. An
observation has three parts: the text that the template writes at the end of the previous answer (without tokens that
the policy has already sampled), the tool results or user messages that follow the answer, and the text that opens the
next answer.

To find the text of an observation, a short conversation is rendered: a user's message, a placeholder for the sampled
answer (the *anchor*), and the messages that follow the answer. The anchor is an assistant's message that contains only
a fixed word (`TurnRenderer.mark`), or only tool calls with the word `TurnRenderer.mark` as their argument. The text of
the observation is everything that the chat template writes after the content of the placeholder answer, and only the
text of the observation is tokenized. If the observation starts with tool results, the placeholder answer contains tool
calls, because some chat templates refuse tool results without tool calls. At the start of a run,
`rltrain.data.turn_probe` compares conversations that are built turn by turn with the template's rendering of the whole
conversation.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rltrain.data.chat_templates import ChatTemplates, TemplateError
from rltrain.data.control_tokens import ControlTokenError, ControlTokens
from rltrain.data.prompt_encoding import one_bos

Message = Mapping[str, Any]

_USER = {"role": "user", "content": "a"}
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}")
_SURROGATES = re.compile("[\ud800-\udfff]")  # Matches unpaired surrogates, which are not valid Unicode.
# Matches the private-use Unicode characters that `ControlTokens` writes in place of the names of control tokens.
_PRIVATE = re.compile("[\U000f0000-\U000fffff]")
_ANCHORS = 1024  # Maximum number of `Anchor` objects in the cache.


@dataclass(frozen=True)
class Anchor:
    """A placeholder message of the assistant, which replaces the sampled answer while the next observation is rendered.

    Attributes:
        message: the placeholder message of the assistant.
        marks: how often the word `TurnRenderer.mark` occurs in the rendered message.
        markup: text that the template writes between the last occurrence of the word `TurnRenderer.mark` and the end
            of the last tool call, such as closing brackets; "" if the message has no tool calls.
        closing: text that the template writes after the answer if no other message follows.
    """

    message: Message
    marks: int
    markup: str
    closing: str


class TurnRenderer:
    """Renders and tokenizes prompts and observations with a tokenizer's chat template.

    The rendering takes place in a separate process, which starts with the first rendering and ends with `close`.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: JSON schemas of the tools, in the form that `get_json_schema` of transformers returns.
        stop_ids: ids of the tokens at which the engine ends an answer.
        templates: object that renders messages; by default a new `ChatTemplates`.

    Attributes:
        tokenizer, tools, stop_ids: the constructor's arguments with the same names.
        special_ids: `stop_ids`, and the ids of all control tokens except the unknown token.
        mark: a word that no tool's schema contains. The template renders a message with this word in the place of a
            sampled answer, so that the position of the answer can be found in the rendered text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop_ids: Collection[int],
        templates: ChatTemplates | None = None,
    ) -> None:
        self.tokenizer, self.tools, self.stop_ids = tokenizer, tuple(tools), frozenset(stop_ids)
        self._templates = templates or ChatTemplates()
        self._control = ControlTokens(tokenizer)
        names = [name for name in self._control.names if name != tokenizer.unk_token]
        self.special_ids = frozenset(tokenizer.convert_tokens_to_ids(names)) | self.stop_ids
        self.mark = "QZXV"
        while self.mark in json.dumps(self.tools):
            self.mark += "QZ"
        self._anchors: dict[tuple[tuple[str, str], ...], Anchor] = {}

    def __enter__(self) -> "TurnRenderer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the rendering process."""
        self._templates.close()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "TurnRenderer":
        """Return a renderer for the tools `tools` that shares the rendering process of this renderer."""
        return TurnRenderer(self.tokenizer, tools=tools, stop_ids=self.stop_ids, templates=self._templates)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, including the text that opens the assistant's answer.

        The template is applied once, with the tools, and the ids start with at most one beginning-of-sequence token.
        The names of control tokens in the messages and in the tools are encoded as ordinary text.

        Raises:
            TemplateError: the template refuses the messages, or the messages cannot be encoded.
        """

        def write(value: Mapping[str, Any]) -> str:
            return self.render(value["messages"], opened=True, tools=value["tools"])

        ids = self._encoded({"messages": self._usable(messages), "tools": self.tools}, write)
        return one_bos(ids, self.tokenizer.bos_token_id)

    def observation_ids(self, messages: Sequence[Message], action_ids: Sequence[int]) -> list[int]:
        """Return the token ids of the text between a sampled answer and the assistant's next answer.

        The first ids of an observation are the tokens that the template writes at the end of the sampled answer,
        without tokens that the policy has already sampled. If the answer was cut off, the observation starts with the
        template's end token. If the policy sampled the template's end token, the observation starts with the text after
        the end token, such as a newline. If the policy ended the answer with a token of `stop_ids` other than the
        template's end token, the sampled token replaces the template's end token. If the template has no end token, an
        answer ends with the control token that opens the next message. If the policy has already sampled the control
        token that opens the next message, the observation does not repeat this token. If the policy has sampled the
        opening token of the wrong role, for example of a user's message before a tool result, the observation contains
        the opening token of the right role.

        Args:
            messages: the messages that follow the sampled answer: results of tools, or messages of a user. Tool results
                at the start of `messages` belong to the tool calls in the sampled answer.
            action_ids: token ids of the sampled answer; only the last id affects the result.

        Raises:
            TemplateError: the template refuses the messages, or the messages cannot be encoded.
            ValueError: there are no messages, or a message has the role "assistant".
        """
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("an observation must have at least one message, and no message of the assistant")
        ids = self._after_mark(self._usable(messages))
        if not action_ids or action_ids[-1] not in self.stop_ids:
            return ids
        first = next((at for at, id in enumerate(ids) if id in self.special_ids), None)
        if first is None:
            return ids
        closed = self.end_id is not None and ids[first] in self.stop_ids
        opened = ids[first] == action_ids[-1] and not self.decoded(ids[:first]).strip()
        return ids[first + 1 :] if closed or opened else ids

    def action_text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids, with the markup of tool calls and without the token that ended the answer."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self.decoded(ids[: len(ids) - ended])

    def probe(self, roles: Collection[str] = ("tool", "user")) -> str | None:
        """Compare conversations that are built turn by turn with the template's rendering of the whole conversations.

        Return one line that describes the first difference between a conversation and its rendering, or None if all
        conversations agree with their renderings.

        Args:
            roles: roles of the messages that follow an answer of the assistant.
        """
        from rltrain.data.turn_probe import fault

        return fault(self, roles)

    @functools.cached_property
    def end_id(self) -> int | None:
        """Id of the control token with which the template ends an answer; None if the template writes no such token."""
        ids = self.encoded(self.answer_anchor.closing)
        return next((id for id in ids if id in self.special_ids), None)

    @functools.cached_property
    def _mark_ids(self) -> list[int]:
        return self.encoded(self.mark)

    @functools.cached_property
    def answer_anchor(self) -> Anchor:
        """Placeholder message of the assistant, without tool calls, that replaces a sampled answer."""
        message = {"role": "assistant", "content": self.mark}
        _, mark, closing = self.render([_USER, message], opened=False).rpartition(self.mark)
        if not mark:
            raise TemplateError("the chat template does not write the assistant's messages; use another template")
        return Anchor(message, 1, "", closing)

    def anchor(self, messages: Sequence[Message]) -> Anchor:
        """Return a placeholder (anchor) for the sampled answer that comes before the given messages.

        The placeholder contains tool calls if `messages` starts with tool results and the chat template can render tool
        calls.
        """
        results = list(takewhile(lambda message: message["role"] == "tool", messages))
        if not results:
            return self.answer_anchor
        calls = tuple(_call_of(number, result) for number, result in enumerate(results))
        if calls not in self._anchors:
            if len(self._anchors) >= _ANCHORS:
                self._anchors.clear()
            self._anchors[calls] = self._call_anchor(calls)
        return self._anchors[calls]

    def render(
        self, messages: Sequence[Message], *, opened: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return the text that the chat template writes for a conversation.

        Args:
            messages: the conversation.
            opened: whether the rendered conversation ends with the text that opens the assistant's next answer.
            tools: schemas of the tools; None for the tools of this renderer.
        """
        given = self.tools if tools is None else tools
        chats = [list(messages)]
        return next(self._templates.render(self.tokenizer, chats, add_generation_prompt=opened, tools=given))

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a text; the name of a control token is encoded as the control token itself."""
        batch = self.tokenizer(text, add_special_tokens=False, truncation=False, padding=False, verbose=False)
        ids: list[int] = batch["input_ids"]
        return ids

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; each control token is written as its name."""
        text: str = self.tokenizer.decode(
            list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text

    def _usable(self, messages: Sequence[Message]) -> Any:
        """Return the messages without characters that cannot be encoded as token ids.

        U+FFFD replaces unpaired surrogates. U+FFFD replaces private-use Unicode characters only if the messages contain
        the name of a control token, because `ControlTokens` uses these characters as placeholders.
        """
        messages = _replaced(messages, _SURROGATES)
        return messages if self._control.first_in(messages) is None else _replaced(messages, _PRIVATE)

    def _after_mark(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of all tokens that the template writes after an answer's content, including the end token."""
        # The word `mark` is encoded in front of the observation, because some tokenizers encode the start of a text
        # differently from the rest of the text.
        lead = self._mark_ids
        ids = self._encoded(messages, lambda messages: self.mark + self._difference(messages))
        if ids[: len(lead)] != lead:
            raise TemplateError(
                "the tokenizer merges the end of an answer and the template's text after the answer into one token"
            )
        return ids[len(lead) :]

    def _difference(self, messages: Sequence[Message]) -> str:
        anchor = self.anchor(messages)
        text = self.render([_USER, anchor.message, *messages], opened=True)
        after = text.split(self.mark, anchor.marks)[-1]
        if text.count(self.mark) < anchor.marks or not after.startswith(anchor.markup):
            raise TemplateError("the chat template writes an answer differently if other messages follow it")
        return after[len(anchor.markup) :]

    def _call_anchor(self, calls: Sequence[tuple[str, str]]) -> Anchor:
        """Return an anchor (placeholder message for a sampled answer) with tool calls.

        `_call_messages` yields the same tool calls in several forms, and the anchor has the first form that the chat
        template accepts. Most templates expect the arguments of a tool call as an object, and some templates expect the
        JSON text of the object. Some templates refuse several tool calls in one message but accept several tool
        results, so `_call_messages` yields first messages with all tool calls, and then messages with only the first
        tool call.
        """
        refusal = None
        for message in _call_messages(calls, self.mark):
            try:
                text = self.render([_USER, message], opened=False)
            except TemplateError as error:
                refusal = refusal or error
                continue
            # Each tool call of `message` contains the word `mark`. If the rendered text does not contain the word, the
            # chat template has left out the tool calls.
            if self.mark not in text:
                return self.answer_anchor
            markup, closing = self._ended(text.rpartition(self.mark)[2])
            return Anchor(message, text.count(self.mark), markup, closing)
        raise refusal or TemplateError("the chat template refuses tool calls")

    def _ended(self, tail: str) -> tuple[str, str]:
        """Split `tail` into the text that ends a tool call and the text that ends the assistant's answer.

        `tail` is the text that the chat template writes after the value of the last tool call's argument.
        """
        usual = self.answer_anchor.closing
        if tail.endswith(usual):
            return tail[: len(tail) - len(usual)], usual
        names = self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids & self.special_ids))
        starts = [tail.index(name) for name in names if name in tail]
        if not starts:
            raise TemplateError("the chat template ends tool calls with a token at which the engine does not stop")
        return tail[: min(starts)], tail[min(starts) :]

    def _encoded(self, value: Any, write: Callable[[Any], str]) -> list[int]:
        text = write(value)
        name = self._control.first_in(value)
        if name is None:
            return self.encoded(text)
        try:
            return self._control.encode(value, write, written=text, add_special_tokens=False)
        except ControlTokenError as error:
            raise TemplateError(
                f"the messages contain {name}, the name of a control token, and this name cannot be encoded as text "
                f"({error})"
            ) from error


def _call_of(number: int, result: Message) -> tuple[str, str]:
    """Return the name and the id of the tool call to which a tool result belongs."""
    name, id = result.get("name"), result.get("tool_call_id")
    plain = isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None
    return str(name) if plain else "tool", id if isinstance(id, str) else f"call{number:05d}"


def _call_messages(calls: Sequence[tuple[str, str]], mark: str) -> Iterator[Message]:
    """Yield assistant messages with tool calls, in the forms that different chat templates accept."""
    for chosen in [calls, calls[:1]] if len(calls) > 1 else [calls]:
        for arguments in ({"value": mark}, json.dumps({"value": mark})):
            made = [
                {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}
                for name, id in chosen
            ]
            yield {"role": "assistant", "content": "", "tool_calls": made}


def _replaced(value: Any, unusable: re.Pattern[str]) -> Any:
    """Return the messages with U+FFFD in place of each character that the pattern `unusable` matches."""
    if isinstance(value, str):
        return unusable.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {_replaced(key, unusable): _replaced(part, unusable) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(part, unusable) for part in value]
    return value
