"""Encoding of prompts, which are text or chat messages, into token ids."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rltrain.base.errors import ConfigError, one_line
from rltrain.data.chat_templates import ChatTemplates, TemplateError
from rltrain.data.control_tokens import ControlTokenError, ControlTokens
from rltrain.data.prompt_images import ImageInfo, ImagePlaceholders, in_parts
from rltrain.data.token_bound import TokenBound
from rltrain.settings.typed import require

SpecialTokens = Literal["text", "refuse", "allow"]
ROW_HELP = 'give each row text or a list of messages such as [{"role": "user", "content": "..."}] as its prompt'
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ALLOW = "set data.special_tokens=allow to encode the names of control tokens as control tokens"


@dataclass(frozen=True)
class Overlong:
    """The number of tokens of a prompt or answer that is too long.

    Attributes:
        tokens: number of tokens in the text, or a lower bound on the number of tokens if `exact` is false.
        exact: whether `tokens` is the exact number of tokens in the text and not only a lower bound.
    """

    tokens: int
    exact: bool


class PromptEncoder:
    """Encodes prompts with a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        special_tokens: what happens to prompts that contain the name of a control token, such as `<|im_end|>`. "text"
            encodes the control token's name as ordinary text, "refuse" raises an error, and "allow" encodes the name as
            the control token.
        templates: renders chat messages with the tokenizer's chat template.
        placeholders: replaces the placeholder tokens of images; None if the model takes no images.

    Attributes:
        spelling: number of prompts so far in which the name of a control token was encoded as ordinary text.
        first_spelling: location of the first prompt that contains the name of a control token, and the name of this
            token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: SpecialTokens,
        templates: ChatTemplates,
        placeholders: ImagePlaceholders | None = None,
    ) -> None:
        self.tokenizer, self.special_tokens, self._templates = tokenizer, special_tokens, templates
        self.placeholders = placeholders
        self.spelling, self.first_spelling = 0, ("", "")
        self._control, self._bound = ControlTokens(tokenizer), TokenBound(tokenizer)
        self._after = _tokens_added_after(tokenizer)

    def encode(
        self,
        prompts: Mapping[int, Any],
        place: Callable[[int], str],
        max_length: int,
        images: Mapping[int, Sequence[ImageInfo]] = {},
    ) -> Iterator[tuple[int, list[int] | Overlong]]:
        """Yield the row number and the token ids of each prompt, in the order of `prompts`. Prompts that are too long
        are never truncated. A prompt with images has one placeholder token for each image.

        Args:
            prompts: maps each row number to its prompt, which is text or chat messages as in the data.
            place: function that returns, for a row number, the location of that row for error messages.
            max_length: maximum number of tokens in a prompt, including the tokens of its images. For a prompt with more
                than `max_length` tokens, an `Overlong` is yielded instead of token ids.
            images: maps the row number of each prompt with images to its images.

        Raises:
            ConfigError: a row cannot be encoded. The message of the ConfigError is one line and names the row.
        """
        for row, prompt in prompts.items():
            _require_prompt(prompt, self.tokenizer, place(row), parts=self.placeholders is not None)
        spelled, texts = self._spelled(prompts, place), {}
        found: dict[int, list[int] | Overlong] = {}
        for row, text in self._texts(prompts, place):
            if (least := self._bound.least(text)) > max_length:
                found[row] = Overlong(least, exact=False)
            else:
                texts[row] = text
        ordinary = {row: text for row, text in texts.items() if row not in spelled}
        for chat in (False, True):
            batch = {row: text for row, text in ordinary.items() if isinstance(prompts[row], list) == chat}
            # Chat templates write special tokens themselves, so the tokenizer must add none to rendered chats.
            found |= self._encoded(batch, add_special_tokens=not chat)
        for row in spelled.keys() & texts.keys():
            found[row] = self._as_text(prompts[row], texts[row], f"{place(row)}: the prompt contains {spelled[row]}")
        for row, prompt in prompts.items():
            yield row, self._finished(found[row], prompt, place(row), max_length, images.get(row, ()))

    def _spelled(self, prompts: Mapping[int, Any], place: Callable[[int], str]) -> dict[int, str]:
        """Return a dict that maps the row number of each prompt to the first control-token name in the prompt.

        `_spelled` leaves out prompts without control-token names. If `special_tokens` is "allow", `_spelled` returns an
        empty dict.

        Raises:
            ConfigError: a prompt contains the name of a control token, and `special_tokens` is "refuse".
        """
        if self.special_tokens == "allow":
            return {}
        names = {row: self._control.first_in(prompt) for row, prompt in prompts.items()}
        spelled = {row: name for row, name in names.items() if name is not None}
        for row, name in spelled.items():
            require(
                self.special_tokens == "text",
                f"{place(row)}: the prompt contains the name of the control token {name}, which "
                "data.special_tokens=refuse forbids; change the prompt, set data.special_tokens=text to encode the "
                f"name as text, or {_ALLOW}",
            )
            self.first_spelling = self.first_spelling if self.spelling else (place(row), name)
            self.spelling += 1
        return spelled

    def _texts(self, prompts: Mapping[int, Any], place: Callable[[int], str]) -> Iterator[tuple[int, str]]:
        """Yield the row number and the text of each prompt.

        Chat messages are converted to text with the chat template.
        """
        chats = {row: self._rendered(prompt) for row, prompt in prompts.items() if isinstance(prompt, list)}
        rendered = self._templates.render(self.tokenizer, list(chats.values()), add_generation_prompt=True)
        for row, prompt in prompts.items():
            try:
                text = next(rendered) if row in chats else prompt
            except TemplateError as error:
                raise ConfigError(f"{place(list(chats)[error.chat])}: {error}") from error
            _require_parts(chats.get(row, prompt), text, place(row))
            yield row, unicode(text, place(row))

    def _rendered(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return chat messages in the form that the model's chat template reads.

        The chat template of a model that takes images reads the content of each message as a list of parts.
        """
        return chat if self.placeholders is None else in_parts(chat)

    def _encoded(self, texts: Mapping[int, str], *, add_special_tokens: bool) -> dict[int, list[int]]:
        if not texts:
            return {}
        # Truncation is switched off explicitly, because a saved tokenizer may have truncation enabled.
        batch = self.tokenizer(
            list(texts.values()),
            add_special_tokens=add_special_tokens,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        return dict(zip(texts, batch["input_ids"], strict=True))

    def _as_text(self, prompt: Any, text: str, what: str) -> list[int]:
        """Encode a prompt so that control-token names in the prompt stay ordinary text."""

        def write(prompt: Any) -> str:
            return next(self._templates.render(self.tokenizer, [self._rendered(prompt)], add_generation_prompt=True))

        try:
            if isinstance(prompt, str):
                return self._control.encode(prompt, str, written=text, add_special_tokens=True)
            return self._control.encode(prompt, write, written=text, add_special_tokens=False)
        except (ControlTokenError, TemplateError) as error:
            raise ConfigError(
                f"{what}, the name of a control token, and this name cannot be encoded as text ({error}); change the "
                f"prompt, or {_ALLOW}"
            ) from error

    def _finished(
        self, ids: list[int] | Overlong, prompt: Any, place: str, max_length: int, images: Sequence[ImageInfo]
    ) -> list[int] | Overlong:
        if isinstance(ids, Overlong):
            return ids
        ids = ids[: len(ids) - self._after] if isinstance(prompt, str) else ids
        require(bool(ids), f"{place}: the prompt has no tokens; {ROW_HELP}")
        ids = one_bos(ids, self.tokenizer.bos_token_id)
        length = len(ids)
        if self.placeholders is not None:
            places = self.placeholders.places(ids)
            require(
                places == len(images),
                f"{place}: the prompt has {len(images)} images, but the chat template wrote {places} placeholders for "
                "images; use a chat template that writes one for each part {'type': 'image'}",
            )
            length = self.placeholders.length(ids, images)
        return Overlong(length, exact=True) if length > max_length else ids


def unicode(text: str, place: str, what: str = "the prompt") -> str:
    """Return a text unchanged, or raise ConfigError if the text contains an unpaired surrogate (half of a UTF-16 pair).

    JSON strings can contain unpaired surrogates, but no tokenizer accepts unpaired surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: {what} is not valid Unicode ({error.reason}); remove the invalid character"
        ) from None
    return text


def one_bos(ids: list[int], bos: int | None) -> list[int]:
    """Remove all but one of the beginning-of-sequence (BOS) tokens at the start of a prompt's token ids.

    A prompt starts with several BOS tokens if the prompt's text starts with a BOS token and the tokenizer adds another
    BOS token.
    """
    extra = 0
    while bos is not None and ids[extra : extra + 2] == [bos, bos]:
        extra += 1
    return ids[extra:]


def _require_parts(prompt: Any, text: str, place: str) -> None:
    """Raise ConfigError if a chat template has left out the text of a message that is a list of parts."""
    for message in prompt if isinstance(prompt, list) else ():
        for part in message["content"] if isinstance(message["content"], list) else ():
            words = str(part.get("text", "")).strip()
            require(
                words in text,
                f"{place}: the chat template leaves out the text {one_line(repr(words), 60)} of a message; use a chat "
                "template that writes the text of each part of a message",
            )


def _require_prompt(prompt: Any, tokenizer: Any, place: str, *, parts: bool) -> None:
    require(prompt is not None, f"{place}: no prompt; {ROW_HELP}")
    require(not isinstance(prompt, str | list) or bool(prompt), f"{place}: the prompt is empty; {ROW_HELP}")
    if isinstance(prompt, str):
        return
    good = isinstance(prompt, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt)
    require(good, f"{place}: the prompt is neither text nor chat messages; {ROW_HELP}")
    for message in prompt:
        content = message.get("content")
        if parts and isinstance(content, list) and content:
            continue  # `separated` has checked the parts.
        wrong = "a list of parts" if isinstance(content, list) else repr(content)
        require(
            isinstance(content, str),
            f"{place}: the content of the message with role {message['role']!r} is {wrong}; write the content as one "
            "text",
        )
    template = tokenizer.chat_template
    require(
        bool(template),
        f"{place}: the prompt has chat messages, but the model's tokenizer has no chat template; use text prompts or a "
        "chat model",
    )
    # Most chat templates write any role into the prompt, so a misspelt role would not be noticed.
    for role in {message["role"] for message in prompt}.difference(_ROLES):
        require(
            f"'{role}'" in str(template) or f'"{role}"' in str(template),
            f"{place}: the role {role!r} of a chat message is unknown; use {', '.join(_ROLES)}, or a role that the "
            "model's chat template names",
        )


def _tokens_added_after(tokenizer: Any) -> int:
    """Return the number of tokens that the tokenizer appends to a text.

    `PromptEncoder` removes the tokens that the tokenizer appends, because a model would not continue a prompt that ends
    with an end token.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    before = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), None)
    return 0 if before is None else len(full) - before - len(plain)
