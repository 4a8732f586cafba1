"""Rules that turn the rows of a data set into prompts: which columns are read, and how a row becomes a prompt.

The config key `data.prompt` names a column, or is a template such as `{question} Think step by step.`. If `data.prompt`
is not set, the names of the data's columns decide what becomes the prompt. The first of the columns `prompt`,
`messages` and `conversations` that exists in the data becomes the prompt. If the data has no column `prompt`,
`messages` or `conversations`, the prompt is the column `question`, `problem` or `instruction`, and the data must have
exactly one of these three columns.

- The column `prompt` holds text or chat messages, which are used unchanged.
- The columns `messages` and `conversations` hold chat messages. If the assistant wrote the last message, the prompt
  does not include the last message.
- The columns `question`, `problem` and `instruction` hold text. If the column `instruction` becomes the prompt, a row's
  value in the column `input` is appended to the instruction.

Text in the column `prompt` is used as the complete prompt, even for a chat model. Text from a column other than
`prompt`, or from a template, becomes a user message if the tokenizer has a chat template. The config key `data.chat`
can forbid chat messages, or turn all text into user messages.

Reward functions get the value of each data column as an argument with the column's name. If prompts are made from chat
messages in a column other than `prompt`, reward functions get the assistant's last message as the argument
`completion`. If the data has no column `answer`, reward functions get the column `solution` or `output` as the argument
`answer`. If the data has a column `completion`, the argument `completion` is the value of this column and not the
assistant's last message.

`rltrain.data.prompt_images` describes how rows give images to models that take images.
"""

import difflib
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from rltrain.base.errors import ConfigError, one_line
from rltrain.data.prompt_images import IMAGE_COLUMNS, separated
from rltrain.data.row_error import RowError
from rltrain.settings.typed import require

Chat = Literal["auto", "always", "never"]
Row = Mapping[str, Any]
Reader = Callable[[Row], Any]
PROMPT = "prompt"
CONVERSATIONS = ("messages", "conversations")
QUESTIONS = ("question", "problem", "instruction")
INSTRUCTION, INPUT = "instruction", "input"
ANSWER, ANSWERS = "answer", ("solution", "output")
COMPLETION = "completion"
# Maps the names of speakers, including ShareGPT's names, to the roles that chat templates know.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
BRACES = "write each column as {COLUMN}, and a brace that is text as {{ or }}"
_SHOWN = 60  # Maximum number of characters of a template that an error message shows.


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The user's values of the config keys `data.prompt`, `data.system_prompt`, `data.chat` and `data.images`."""

    prompt: str | None = None
    system_prompt: str | None = None
    chat: Chat = "auto"
    images: str | None = None


@dataclass(frozen=True)
class Derived:
    """A column that rltrain computes from other columns of the data, for use by reward functions.

    Attributes:
        source: description of the origin of the values, for messages to the user.
        value: function that returns the column's value for a row.
    """

    source: str
    value: Reader


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """The way in which the rows of one data source, such as a file, become prompts.

    Attributes:
        reads: names of the columns that are read to make the prompts.
        columns: names of the columns that reward functions get.
        source: description of what a prompt is made of (for example "column question"), for messages to the user.
        as_user: whether a text prompt becomes a user message.
        system: text of the system message that starts each chat; None for no system message.
        chat: value of the config key `data.chat`: "auto", "always" or "never".
        derived: dict that maps names to columns that rltrain computes, such as `completion`. In addition to the columns
            of the data, reward functions get the columns that rltrain computes.
        read: function that returns the prompt of a row: text or chat messages. `read` does not check the type of the
            value that it returns. `read` raises RowError if a column that the template needs has no value, or if a
            message has an unknown speaker.
        takes_images: whether the model sees the images of prompts.
        images: name of the column with the images of a row; None if the data has no such column.
    """

    reads: tuple[str, ...]
    columns: tuple[str, ...]
    source: str
    as_user: bool
    system: str | None
    chat: Chat
    derived: Mapping[str, Derived]
    read: Reader
    takes_images: bool = False
    images: str | None = None

    def shown(self, row: Row) -> tuple[Any, list[Any]]:
        """Return the finished prompt of a row, and the images that the prompt shows, in order.

        The content of a message with images is a list of parts, in which the part `{"type": "image"}` marks the place
        of an image. Text with images becomes a user message.

        Raises:
            RowError: `read`, `finished` or `separated` rejects the row. With `data.chat` "never", rows with images are
                rejected.
        """
        value = self.read(row)
        if not self.takes_images:
            return self.finished(value), []
        column = _as_list(row.get(self.images)) if self.images is not None else []
        if column and isinstance(value, str) and value and self.chat == "auto":
            value = [{"role": "user", "content": value}]
        return separated(self.finished(value), column)

    def finished(self, value: Any) -> Any:
        """Return the finished prompt (text or chat messages), given the value that `read` returned for a row.

        Raises:
            RowError: the row has chat messages although `data.chat` is "never", or both the row and the config contain
                a system message.
        """
        if isinstance(value, list) and self.chat == "never":
            raise RowError(
                "the row has chat messages, which data.chat=never forbids; use data.chat=auto or a text column"
            )
        if self.as_user and isinstance(value, str) and value:
            value = [{"role": "user", "content": value}]
        if self.system is None or not isinstance(value, list) or not value:
            return value
        if isinstance(value[0], Mapping) and value[0].get("role") == "system":
            raise RowError(
                "the chat messages begin with a system message, but data.system_prompt is set too; leave "
                "data.system_prompt out, or remove the system message from the data"
            )
        return [{"role": "system", "content": self.system}, *value]

    def values(self, row: Row) -> dict[str, Any]:
        """Return the values that reward functions get for a row, as a dict with a key for each name in `columns`.

        The value of a column that the row lacks is None.
        """
        return {name: self.derived[name].value(row) if name in self.derived else row.get(name) for name in self.columns}

    def described(self, chats: int, total: int) -> str:
        """Return a text that tells the user what the prompts are made of, and in what form the model gets them.

        Args:
            chats: number of rows that hold chat messages.
            total: number of all rows that were read from the source.
        """
        text = "a user message" if self.as_user else "text"
        kind = "chat messages" if chats == total else text if not chats else f"{text} or chat messages"
        after = " after data.system_prompt" if self.system is not None else ""
        others = [f"{name} = {derived.source}" for name, derived in self.derived.items()]
        return "; ".join([f"prompt = {self.source}, as {kind}{after}", *others])


def prompt_form(
    columns: Sequence[str],
    options: PromptOptions,
    *,
    where: str,
    has_template: bool,
    sample: Sequence[Row],
    takes_images: bool = False,
) -> PromptForm:
    """Decide how the rows of a data source become prompts.

    Args:
        columns: names of the data's columns.
        options: the user's settings for prompts.
        where: the config key and the source of the data, for the start of the error message.
        has_template: whether the tokenizer has a chat template.
        sample: some rows of the data, which show whether prompts are chat messages.
        takes_images: whether the model sees the images of prompts.

    Raises:
        ConfigError: a column that `data.prompt` or `data.images` names is missing, no column can be recognised as the
            prompt, the tokenizer lacks a chat template that the user's settings need, or `data.images` is set and the
            model takes no images.
    """
    _require_template(options, has_template)
    images = _image_column(columns, options.images, where, takes_images)
    reads, read, source = _reader(columns, options.prompt, where)
    complete = read is _whole_prompt  # By default, text from the column `prompt` does not become a user message.
    derived: dict[str, Derived] = {}
    if not complete and COMPLETION not in columns and any(isinstance(row.get(reads[0]), list) for row in sample):
        derived[COMPLETION] = Derived("the assistant's last turn", _completion_of(reads[0]))
    answer = next((name for name in ANSWERS if name in columns), None)
    if ANSWER not in columns and answer is not None:
        derived[ANSWER] = Derived(f"column {answer}", lambda row: row.get(answer))
    spoken = options.chat == "auto" and has_template and (not complete or options.system_prompt is not None)
    return PromptForm(
        reads=reads if images is None else (*reads, images),
        columns=(*(name for name in columns if name != PROMPT), *derived),
        source=source,
        as_user=options.chat == "always" or spoken,
        system=options.system_prompt,
        chat=options.chat,
        derived=derived,
        read=read,
        takes_images=takes_images,
        images=images,
    )


def _image_column(columns: Sequence[str], given: str | None, where: str, takes_images: bool) -> str | None:
    """Return the name of the column that holds the images of a row, or None if there is none."""
    if given is None:
        return next((name for name in IMAGE_COLUMNS if name in columns), None) if takes_images else None
    require(
        takes_images,
        f"data.images={given}: the model takes no images; leave data.images out, or use a model for images and text",
    )
    require_column(given, columns, f"data.images={given}", where)
    return given


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _require_template(options: PromptOptions, has_template: bool) -> None:
    given = "data.chat=always" if options.chat == "always" else "data.system_prompt"
    require(
        has_template or (options.chat != "always" and options.system_prompt is None),
        f"{given}: the model's tokenizer has no chat template; use a chat model, or write the text around the question "
        "into data.prompt, as in data.prompt='Q: {question} A:'",
    )


def _reader(columns: Sequence[str], prompt: str | None, where: str) -> tuple[tuple[str, ...], Reader, str]:
    """Return the names of the columns to read, a function that returns the prompt of a row, and a text for the user.

    The text tells the user what a prompt is made of, for example "column question".
    """
    if prompt is None:
        prompt = _recognised(columns, where)
        if prompt == INSTRUCTION and INPUT in columns:
            return (INSTRUCTION, INPUT), _instruction, f"column {INSTRUCTION}, plus column {INPUT} if not empty"
    elif "{" in prompt or "}" in prompt:
        names = tuple(dict.fromkeys(name for _, name in template_parts(prompt) if name is not None))
        for name in names:
            require_column(name, columns, f"data.prompt={shown(prompt)}", where, f"; {BRACES}")
        return names, filled(template_parts(prompt)), f'"{shown(prompt)}"'
    require_column(prompt, columns, f"data.prompt={shown(prompt)}", where)
    if prompt == PROMPT:
        return (PROMPT,), _whole_prompt, "column prompt"
    return (prompt,), _column(prompt), f"column {prompt}"


def _recognised(columns: Sequence[str], where: str) -> str:
    there = ", ".join(columns) or "none"
    for name in (PROMPT, *CONVERSATIONS):
        if name in columns:
            return name
    found = [name for name in QUESTIONS if name in columns]
    known = ", ".join((PROMPT, *CONVERSATIONS, *QUESTIONS))
    require(
        bool(found),
        f"{where}: no column is called {known}; the columns are {there}; name the column with data.prompt=COLUMN, or "
        f"write a template such as data.prompt='{{COLUMN}} Think step by step.'",
    )
    require(
        len(found) == 1,
        f"{where}: several columns could be the prompt: {', '.join(found)}; name one with data.prompt={found[0]}",
    )
    return found[0]


def require_column(name: str, columns: Sequence[str], given: str, where: str, more: str = "") -> None:
    """Raise ConfigError if the data lacks the column `name`.

    Args:
        name: name of the column that the data must have.
        columns: names of the columns that the data has.
        given: the config key and its value, for the start of the error message.
        where: the config key and the source of the data, for the error message.
        more: text for the end of the error message.
    """
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    require(
        name in columns,
        f"{given}: {where} has no column '{name}'; the columns are {', '.join(columns) or 'none'}{hint}{more}",
    )


def template_parts(template: str, *, key: str = "data.prompt", what: str = "prompt") -> list[tuple[str, str | None]]:
    """Split a template into pairs of text and column name.

    In each pair (text, column name), the text is the part of the template that lies before the column and after the
    previous column. If the template ends with text, the last pair (text, column name) has None as its column name.

    Args:
        template: the template, with columns in braces.
        key: the config key of the template, for error messages.
        what: word for the filled-in template in error messages, such as "prompt".

    Raises:
        ConfigError: a brace is unmatched, braces enclose something other than the name of a column, or the template
            names no column.
    """
    given = f"{key}={shown(template)}"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{given}: {str(error).removesuffix(' encountered in format string')}; {BRACES}") from None
    for _, name, spec, conversion in parts:
        plain = name is None or (name and not spec and not conversion and not set("{}") & set(name))
        inside = (name or "") + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        require(bool(plain), f"{given}: '{{{inside}}}' names no column; {BRACES}")
    require(
        any(name is not None for _, name, _, _ in parts),
        f"{given}: a template without a column would give the same {what} for every row; {BRACES}",
    )
    return [(text, name) for text, name, _, _ in parts]


def filled(parts: Sequence[tuple[str, str | None]], key: str = "data.prompt") -> Reader:
    """Return a function that inserts the values of a row into a template.

    The function that fills in the template raises RowError if a value is neither text nor a number.

    Args:
        parts: the template, as returned by `template_parts`.
        key: the config key of the template, for error messages.
    """

    def read(row: Row) -> str:
        return "".join(text if name is None else text + _text_of(row.get(name), name, key) for text, name in parts)

    return read


def _text_of(value: Any, name: str, key: str = "data.prompt") -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    kind = "no value" if value is None else f"a value of type {type(value).__name__}"
    raise RowError(f"{kind} in column '{name}', which {key} inserts as text; give it text or a number")


def _whole_prompt(row: Row) -> Any:
    return row.get(PROMPT)


def _column(name: str) -> Reader:
    def read(row: Row) -> Any:
        value = row.get(name)
        if value is None:
            raise RowError(f"no prompt in column '{name}'; give each row text or a list of messages in that column")
        return _before_answer(_messages(value)) if isinstance(value, list) else value

    return read


def _instruction(row: Row) -> Any:
    instruction, more = row.get(INSTRUCTION), row.get(INPUT)
    if not more:
        return instruction
    return f"{_text_of(instruction, INSTRUCTION)}\n\n{_text_of(more, INPUT)}"


def _messages(value: list[Any]) -> list[Any]:
    """Return chat messages as dicts with `role` and `content`.

    Chat messages in ShareGPT's form, with `from` and `value`, are converted.
    """
    return [_message(one) if isinstance(one, Mapping) and "from" in one and "role" not in one else one for one in value]


def _message(one: Row) -> dict[str, Any]:
    role = ROLES.get(one["from"]) if isinstance(one["from"], str) else None
    if role is None:
        raise RowError(
            f"a message is from {one_line(repr(one['from']), _SHOWN)}, but must be from one of {', '.join(ROLES)}; "
            f"write messages as {{'role': ..., 'content': ...}}"
        )
    return {"role": role, "content": one.get("value")}


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _before_answer(messages: list[Any]) -> list[Any]:
    return messages[:-1] if messages and _is_answer(messages[-1]) else messages


def _completion_of(name: str) -> Reader:
    def completion(row: Row) -> Any:
        value = row.get(name)
        messages = _messages(value) if isinstance(value, list) else []
        return messages[-1].get("content") if messages and _is_answer(messages[-1]) else None

    return completion


def shown(text: str) -> str:
    """Return a text on one line, shortened for an error message."""
    return one_line(text, _SHOWN)
