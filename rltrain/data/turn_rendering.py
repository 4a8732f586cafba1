"""Token ids of the messages that a conversation adds between two actions of the policy.

Sampled tokens are never decoded and encoded again. Instead, the token ids of a conversation grow at the end only: the
ids of the new messages are appended to the ids that the policy has sampled. The text of the new messages is the
difference that the chat template makes. A conversation of two messages, a question and an answer, is rendered with the
new messages behind it. The text after the answer's end token then consists of what the template writes between an end
token and the next message, of the new messages, and of the opening of the next answer.

The method `TurnRenderer.probe` compares conversations that are built in this way with the template's own rendering of
the whole conversation.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.data.chat_templates import ChatTemplates, TemplateError
from rltrain.data.control_tokens import ControlTokenError, ControlTokens
from rltrain.data.prompt_encoding import one_bos

Message = Mapping[str, Any]
_ANCHOR = "rltrain anchor"  # Text of the answer behind which new messages are rendered.
_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)  # Templates may leave out the thoughts of earlier answers.


class TurnError(ValueError):
    """Raised if messages cannot be added to a conversation. The message of a `TurnError` is one line."""


class TurnRenderer:
    """Renders the messages of a conversation as token ids.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: schemas of the tools that the template shows to the model.
        stop_ids: ids of the tokens that end an action.
    """

    def __init__(self, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]], stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._tools, self._stop_ids = tokenizer, list(tools), set(stop_ids)
        self._templates, self._control = ChatTemplates(), ControlTokens(tokenizer)
        self._stops = {tokenizer.convert_ids_to_tokens(one): one for one in stop_ids}

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt, which end with the opening of the first action.

        Raises:
            TemplateError: the template refuses the messages.
            TurnError: the prompt contains the name of a control token and cannot be encoded as text.
        """

        def write(messages: Any) -> str:
            return self._rendered(messages, opened=True)

        return one_bos(self._encoded(list(messages), write), self._tokenizer.bos_token_id)

    def observation_ids(self, messages: Sequence[Message], action_ids: Sequence[int]) -> list[int]:
        """Return the token ids to append after an action: the rest of the action's message, the new messages, and the
        opening of the next action.

        Args:
            messages: the messages since the action.
            action_ids: token ids that the policy sampled. If they do not end with an end token, for instance because
                the action was cut off, the returned ids begin with the end token.

        Raises:
            TemplateError: the template refuses the messages.
            TurnError: the place of the messages in the template's output cannot be found, or the messages cannot be
                encoded.
        """
        ended = action_ids[-1] if action_ids and action_ids[-1] in self._stop_ids else None

        def write(messages: Any) -> str:
            return self._after_action(messages, ended)

        return self._encoded(list(messages), write)

    def action_text(self, action_ids: Sequence[int]) -> str:
        """Return the text of an action with the marks of its tool calls, and without the end token."""
        ids = list(action_ids)
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def probe(self) -> str | None:
        """Compare conversations that grow message by message with the template's rendering of the whole conversation.

        Returns:
            One line that says why messages cannot be appended exactly, or None if they can.
        """
        try:
            if self._tools and self._rendered([_user("a")], opened=True) == self._rendered(
                [_user("a")], opened=True, tools=False
            ):
                return "the template does not show tools to the model"
            for conversation in self._conversations():
                if difference := self._difference(conversation):
                    return difference
        except (TemplateError, TurnError) as error:
            return str(error)
        return None

    def _conversations(self) -> list[list[list[Message]]]:
        """Return conversations for `probe`. Each is a list that alternates between new messages and one action."""
        conversations = [[[_user("a b")], [_answer("c d")], [_user("e  f\n")], [_answer("g")], [_user("h")]]]
        if self._tools:
            one, two = [_call(0)], [_call(0), _call(1)]
            results = [_result(0, "1 2"), _result(1, "x\ny")]
            conversations += [
                [[_user("a")], [_answer("", one)], results[:1], [_answer("b")], [_user("c")]],
                [[_user("a")], [_answer("t", two)], results, [_answer("", one)], results[:1], [_answer("d")]],
            ]
        return conversations

    def _difference(self, conversation: Sequence[Sequence[Message]]) -> str | None:
        """Build the ids of a conversation turn by turn, and return how they differ from the whole, or None."""
        messages: list[Message] = []
        ids: list[int] = []
        action: list[int] = []
        for number, new in enumerate(conversation):
            if number % 2:
                following = conversation[number + 1] if number + 1 < len(conversation) else [_user("z")]
                action = self._action_ids(messages, new[0], following)
                ids += action
            else:
                ids += self.observation_ids(new, action) if number else self.prompt_ids(new)
            messages += new
        opened = len(conversation) % 2 == 1
        expected = self._tokenizer(self._rendered(messages, opened=opened), add_special_tokens=False)["input_ids"]
        if not opened:  # After an end token, a template may write a line break, which belongs to the next message.
            ids += self.observation_ids([_user("z")], action)
            messages.append(_user("z"))
            expected = self._tokenizer(self._rendered(messages, opened=True), add_special_tokens=False)["input_ids"]
        expected = one_bos(expected, self._tokenizer.bos_token_id)
        names = set(self._tokenizer.convert_tokens_to_ids(list(self._control.names)))
        if [one for one in ids if one in names] != [one for one in expected if one in names]:
            return "a conversation that grows message by message has other control tokens than the whole conversation"
        if self._plain(ids) != self._plain(expected):
            return "the template writes earlier messages differently when a message is added"
        return None

    def _action_ids(self, messages: Sequence[Message], action: Message, following: Sequence[Message]) -> list[int]:
        """Return ids that the policy could sample for an action: the template's own text up to the end token."""
        before = self._rendered(messages, opened=True)
        whole = self._rendered([*messages, action, *following], opened=False)
        text = whole[len(before) :] if whole.startswith(before) else self._behind(whole, before)
        found = self._first_stop(text)
        if found is None:
            raise TurnError("the template ends an answer with none of the model's end tokens")
        ids: list[int] = self._tokenizer(text[: found[1]], add_special_tokens=False)["input_ids"]
        return ids

    def _behind(self, whole: str, before: str) -> str:
        """Return the part of a rendered conversation behind its longest common start with `before`."""
        common = 0
        while common < min(len(whole), len(before)) and whole[common] == before[common]:
            common += 1
        return whole[common:]

    def _plain(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return _THOUGHTS.sub("", text)

    def _after_action(self, messages: Sequence[Message], ended: int | None) -> str:
        """Return the text to append after an action that ended with the token `ended`; None if it has no end token."""
        anchored = self._anchored(messages)
        behind = self._rendered([*anchored, *messages], opened=True)
        at = behind.rindex(_ANCHOR) if _ANCHOR in behind else -1
        if at < 0:
            raise TurnError("the template leaves out the text of an answer")
        behind = behind[at + len(_ANCHOR) :]
        found = self._first_stop(behind)
        if found is None:
            raise TurnError("the template ends an answer with none of the model's end tokens")
        start, end = found
        if ended is None:
            return behind[start:]
        if ended == self._stops[behind[start:end]]:
            return behind[end:]
        # If the end token of the template opens the next message, an action that ended with another token, such as the
        # opening of another role, still needs the opening of the message that follows.
        alone = self._rendered(anchored, opened=False)
        opens_next = behind[start:end] not in alone[alone.rindex(_ANCHOR) :]
        return behind[start:] if opens_next else behind[end:]

    def _anchored(self, messages: Sequence[Message]) -> list[Message]:
        """Return a question and an answer, with the calls that the results in `messages` answer."""
        results = [message for message in messages if message["role"] == "tool"]
        calls = [
            {
                "id": message.get("tool_call_id") or f"call{number:05d}",
                "type": "function",
                "function": {"name": message.get("name") or "tool", "arguments": {"anchor": _ANCHOR}},
            }
            for number, message in enumerate(results)
        ]
        return [_user("a"), _answer(_ANCHOR, calls)]

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """Return the start and the end of the first end token in a text, or None if there is no end token."""
        found = [(at, at + len(name)) for name in self._stops if (at := text.find(name)) >= 0]
        return min(found, default=None)

    def _rendered(self, messages: Sequence[Message], *, opened: bool, tools: bool = True) -> str:
        chosen = self._tools if tools else []
        return next(
            self._templates.render(self._tokenizer, [list(messages)], add_generation_prompt=opened, tools=chosen)
        )

    def _encoded(self, messages: list[Message], write: Any) -> list[int]:
        """Return the ids of the text that `write` makes of messages, with names of control tokens in them as text."""
        text = write(messages)
        if self._control.first_in(messages) is None:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return ids
        try:
            return self._control.encode(messages, write, written=text, add_special_tokens=False)
        except ControlTokenError as error:
            raise TurnError(f"a message contains the name of a control token: {error}") from error


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str, calls: Sequence[Message] = ()) -> Message:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def _call(number: int) -> Message:
    function = {"name": f"tool{number}", "arguments": {"x": number}}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05d}", "name": f"tool{number}"}
