"""Tokenizes supervised answers: the answers in the training data that the supervised loss trains on.

The config key `data.sft_response` names the column with the answers, or is a template of columns, for example
`{solution} #### {answer}`. A row has no supervised answer if the row lacks a value for any column that
`data.sft_response` names.

The token ids of a supervised answer are ids that the model itself could sample after the prompt. A supervised answer is
tokenized separately from its prompt, just as a sampled answer is decoded separately from its prompt. Like a sampled
answer, a supervised answer ends with an end token, unless its text ends with a stop string. If the prompt consists of
chat messages, the end token of the answer is the token with which the chat template ends the assistant's messages.
"""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from rltrain.base.errors import ConfigError
from rltrain.data.chat_templates import ChatTemplates, TemplateError
from rltrain.data.control_tokens import ControlTokenError, ControlTokens
from rltrain.data.prompt_encoding import Overlong, SpecialTokens
from rltrain.data.prompt_form import BRACES, PromptForm, Row, require_column, shown, template_parts
from rltrain.data.prompt_images import in_parts
from rltrain.data.row_error import RowError
from rltrain.data.rows import Rows
from rltrain.data.token_bound import TokenBound
from rltrain.data.tokenizer_round_trip import loss
from rltrain.settings.typed import require

_BATCH = 1024  # Maximum number of answers that are tokenized in one call.
_ROUND_TRIPS = 64  # Number of answers whose token ids are decoded and compared with the original text.
_PROBE = "QZXV"  # Text of a test message of the assistant, chosen so that no chat template contains the text.


@dataclass(frozen=True, kw_only=True)
class SupervisedOptions:
    """The settings that determine the supervised answers of a data set.

    Attributes:
        response: value of `data.sft_response`, the name of a column or a template with columns in braces.
        max_length: maximum number of tokens in an answer, including the end token.
        end_ids: ids of the tokens that end an answer of the model.
        stop: strings that end an answer of the model.
        overlong: what happens to answers with more than `max_length` tokens. With `overlong`="refuse", an answer that
            is too long raises an error. With `overlong`="filter", each answer that is too long is left out, but its
            prompt is kept.
    """

    response: str
    max_length: int
    end_ids: Sequence[int]
    stop: Sequence[str] = ()
    overlong: Literal["refuse", "filter"] = "refuse"


@dataclass
class SupervisedAnswers:
    """The token ids of the supervised answers of a prompt set.

    Attributes:
        source: description of what an answer is made of (for example "column solution"), for messages to the user.
        count: number of prompts that have a supervised answer.
        filtered: number of answers that were left out because they are too long.
        spelling: number of answers in which the name of a control token was encoded as ordinary text.
    """

    source: str
    count: int = 0
    filtered: int = 0
    spelling: int = 0
    # Token ids are kept in flat arrays, because lists of Python ints would take ten times the memory.
    _ids: "array[int]" = field(default_factory=lambda: array("i"))
    _ends: "array[int]" = field(default_factory=lambda: array("q", [0]))

    def append(self, ids: Sequence[int]) -> None:
        """Store the supervised answer of the next prompt of the prompt set.

        If the prompt has no supervised answer, the caller passes empty `ids`.
        """
        self._ids.extend(ids)
        self._ends.append(len(self._ids))
        self.count += bool(ids)

    def ids(self, index: int) -> list[int] | None:
        """Return the token ids of the answer to a prompt of the prompt set; None if the prompt has no answer."""
        return self._ids[self._ends[index] : self._ends[index + 1]].tolist() or None

    @property
    def tokens(self) -> int:
        """Number of tokens in all answers together."""
        return len(self._ids)

    @property
    def arrays(self) -> tuple[bytes, bytes]:
        """The concatenated token ids of all answers, and the end position of each answer in these ids, as bytes for a
        checksum.
        """
        return self._ids.tobytes(), self._ends.tobytes()

    def largest_id(self) -> int:
        """Return the largest token id in any answer."""
        return max(self._ids)

    def described(self, prompts: int) -> str:
        """Return a description for the user: how many of the `prompts` prompts have an answer, and how many tokens all
        answers have together.
        """
        return f"{self.source} has answers to {self.count:,} of {prompts:,} prompts, {self.tokens:,} tokens"

    def notes(self, where: str, limit: int) -> list[str]:
        """Return messages for the user about answers that were left out or that contain names of control tokens."""
        notes = []
        if self.filtered:
            notes.append(
                f"{where}: supervised answers left out because they are longer than rollout.max_response_length="
                f"{limit}: {self.filtered:,}"
            )
        if self.spelling:
            notes.append(
                f"{where}: supervised answers that contain names of control tokens: {self.spelling:,}; the names are "
                "encoded as text, or with data.special_tokens=allow as control tokens"
            )
        return notes


class AnswerForm:
    """Reads the answers for the supervised loss from the rows of one data source.

    Args:
        response: source of the answers: the name of a column, or a template with columns in braces.
        columns: names of the columns of the data source.
        form: the way in which data rows become prompts. A `PromptForm` can compute columns that the data lacks, such as
            `completion`.
        where: the config key and the source of the data, for error messages.

    Raises:
        ConfigError: a column that `response` names is missing, or the template `response` is malformed.
    """

    def __init__(self, response: str, columns: Sequence[str], form: PromptForm, *, where: str) -> None:
        self._derived = form.derived
        is_template = "{" in response or "}" in response
        key = "data.sft_response"
        self._parts = template_parts(response, key=key, what="answer") if is_template else [("", response)]
        for _, name in self._parts:
            if name is not None:
                more = f"; {BRACES}" if is_template else ""
                require_column(name, (*columns, *form.derived), f"{key}={shown(response)}", where, more)
        self.source = f'"{shown(response)}"' if is_template else f"column {response}"

    def read(self, row: Row) -> str | None:
        """Return the text of a row's supervised answer; None if the row has no answer.

        Raises:
            RowError: a value in one of the columns of the answer is neither text nor a number.
        """
        texts: list[str] = []
        for before, name in self._parts:
            value = "" if name is None else self._text(row, name)
            if value is None:
                return None
            texts += before, value
        return "".join(texts) or None

    def _text(self, row: Row, name: str) -> str | None:
        value = self._derived[name].value(row) if name in self._derived else row.get(name)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
            value = value[0].get("content")  # TRL's data sets hold an answer as a list with the assistant's message.
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            return None
        if isinstance(value, str):
            return value
        if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
            return str(value)
        raise RowError(
            f"column '{name}', which data.sft_response reads as an answer, has a value of type {type(value).__name__}; "
            "write the answer as text, a number or a list with one message, or leave the value out"
        )


class AnswerEncoder:
    """Encodes supervised answers with a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        options: length limit, end tokens and stop strings of answers.
        special_tokens: what happens to answers that contain the name of a control token, as in `PromptEncoder`.
        templates: object that renders a chat, to find the end token of the assistant's messages.
        parts: whether the chat template gets the content of a message as a list of parts.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: SupervisedOptions,
        *,
        special_tokens: SpecialTokens,
        templates: ChatTemplates,
        parts: bool = False,
    ) -> None:
        self._parts = parts
        self._tokenizer, self._options, self._special_tokens = tokenizer, options, special_tokens
        self._control, self._bound = ControlTokens(tokenizer), TokenBound(tokenizer)
        own = tokenizer.eos_token_id
        self._end_of_text: int = own if own in options.end_ids else options.end_ids[0]
        self._end_of_chat = self._chat_end(templates)

    def spells_control_token(self, text: str) -> str | None:
        """Return the first control-token name in `text` that is encoded as ordinary text; None if no name is found."""
        return None if self._special_tokens == "allow" else self._control.first_in(text)

    def encode(
        self, texts: Mapping[int, str], chats: Mapping[int, bool], place: Callable[[int], str]
    ) -> dict[int, list[int] | Overlong]:
        """Return for each row number the token ids of the answer, or an `Overlong` if the answer is too long.

        Args:
            texts: maps each row number to the text of the row's answer.
            chats: maps each row number to True if the row's prompt consists of chat messages, and to False if the
                prompt is text.
            place: function that returns, for a row number, the location of that row for error messages.

        Raises:
            ConfigError: an answer cannot be encoded. The message of the ConfigError is one line and names the row.
        """
        limit, found, ordinary = self._options.max_length, dict[int, list[int] | Overlong](), dict[int, str]()
        for row, text in texts.items():
            if (least := self._bound.least(text)) > limit:
                found[row] = Overlong(least, exact=False)
            elif name := self.spells_control_token(text):
                found[row] = self._as_text(text, name, place(row))
            else:
                ordinary[row] = text
        found |= self._encoded(ordinary)
        return {row: self._ended(found[row], text, place(row), chat=chats[row]) for row, text in texts.items()}

    def _encoded(self, texts: Mapping[int, str]) -> dict[int, list[int]]:
        if not texts:
            return {}
        batch = self._tokenizer(
            list(texts.values()),
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        return dict(zip(texts, batch["input_ids"], strict=True))

    def _as_text(self, text: str, name: str, place: str) -> list[int]:
        """Encode an answer so that the names of control tokens stay ordinary text."""
        what = f"{place}: the supervised answer contains {name}, the name of a control token"
        allow = "set data.special_tokens=allow to encode the names of control tokens as control tokens"
        require(
            self._special_tokens == "text",
            f"{what}, which data.special_tokens=refuse forbids; change the answer, set data.special_tokens=text to "
            f"encode the name as text, or {allow}",
        )
        try:
            return self._control.encode(text, str, written=text, add_special_tokens=False)
        except ControlTokenError as error:
            raise ConfigError(
                f"{what}, and cannot be encoded as text ({error}); change the answer, or {allow}"
            ) from error

    def _ended(self, ids: list[int] | Overlong, text: str, place: str, *, chat: bool) -> list[int] | Overlong:
        """Return the token ids of an answer, followed by its end token, or an `Overlong` if the answer is too long.

        An answer that ends with a stop string gets no end token, because sampling would stop at the stop string.
        """
        if isinstance(ids, Overlong):
            return ids
        ends = {stop: text.find(stop) + len(stop) for stop in self._options.stop if stop in text}
        early = next((stop for stop, end in ends.items() if end < len(text)), None)
        require(
            early is None,
            f"{place}: the supervised answer contains the stop string {early!r} (rollout.stop) before its end, but a "
            "sampled answer would end at this string; remove the rest of the answer, or leave the string out of "
            "rollout.stop",
        )
        ids = ids if ends else [*ids, self._end_of_chat if chat else self._end_of_text]
        return Overlong(len(ids), exact=True) if len(ids) > self._options.max_length else ids

    def _chat_end(self, templates: ChatTemplates) -> int:
        """Return the id of the end token that the chat template writes after an assistant's message.

        If the template writes no end token after an assistant's message, return the end token that follows answers to
        text prompts.
        """
        if not self._tokenizer.chat_template:
            return self._end_of_text
        chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        if self._parts:
            chat = in_parts(chat)
        try:
            (text,) = templates.render(self._tokenizer, [chat], add_generation_prompt=False)
        except TemplateError:
            return self._end_of_text
        _, probe, after = text.rpartition(_PROBE)
        ids: list[int] = self._tokenizer(after, add_special_tokens=False)["input_ids"] if probe else []
        return next((id for id in ids if id in self._options.end_ids), self._end_of_text)


def load_answers(
    rows: Rows,
    kept: Sequence[int],
    form: PromptForm,
    tokenizer: Any,
    options: SupervisedOptions,
    *,
    where: str,
    special_tokens: SpecialTokens,
    lossy_tokenizer: Literal["refuse", "allow"],
) -> SupervisedAnswers:
    """Read, check and tokenize the supervised answers of the rows that became prompts.

    Args:
        rows: all rows that were read from the data source.
        kept: row numbers of the rows that became prompts, in the order of the prompts.
        form: the way in which data rows become prompts.
        tokenizer: a Hugging Face tokenizer.
        options: which columns hold the answers, and how answers end.
        where: the config key and the source of the data, for error messages.
        special_tokens, lossy_tokenizer: have the same meaning as in `rltrain.data.prompts.load_prompts`.

    Raises:
        ConfigError: a column that `options` names is missing, an answer is invalid, or no row has an answer. The
            message of the ConfigError is one line that gives the invalid value, the rule that the value breaks, and the
            fix.
    """
    answers = AnswerForm(options.response, rows.columns, form, where=where)
    found = SupervisedAnswers(answers.source)
    longest: dict[int, Overlong] = {}
    checked: list[tuple[int, str]] = []
    with ChatTemplates() as templates:
        encoder = AnswerEncoder(
            tokenizer, options, special_tokens=special_tokens, templates=templates, parts=form.takes_images
        )
    for start in range(0, len(kept), _BATCH):
        numbers = kept[start : start + _BATCH]
        texts, chats = _texts(rows, numbers, form, answers)
        encoded = encoder.encode(texts, chats, rows.place)
        for row in numbers:
            ids = encoded.get(row, [])
            found.append([] if isinstance(ids, Overlong) else ids)
        longest |= {row: ids for row, ids in encoded.items() if isinstance(ids, Overlong)}
        found.spelling += sum(encoder.spells_control_token(text) is not None for text in texts.values())
        checked += list(texts.items())[: _ROUND_TRIPS - len(checked)]
    if longest and options.overlong == "refuse":
        raise _overlong_error(rows, longest, options.max_length)
    found.filtered = len(longest)
    require(found.count > 0, _nothing_left(options, answers, where, longest))
    if lossy_tokenizer == "refuse":
        _require_round_trips(rows, checked, tokenizer)
    return found


def _texts(
    rows: Rows, numbers: Sequence[int], form: PromptForm, answers: AnswerForm
) -> tuple[dict[int, str], dict[int, bool]]:
    """Return the text of each row's supervised answer, and whether each row's prompt consists of chat messages.

    The first returned dict maps a row number to the text of the row's answer. The second returned dict maps a row
    number to True if the row's prompt consists of chat messages, and to False if the prompt is text. `_texts` leaves
    out rows without a supervised answer.
    """
    texts, chats = {}, {}
    for number in numbers:
        row = rows.row(number)
        try:
            text = answers.read(row)
        except RowError as error:
            raise ConfigError(f"{rows.place(number)}: {error}") from None
        if text is not None:
            texts[number], chats[number] = text, isinstance(form.shown(row)[0], list)
    return texts, chats


def _require_round_trips(rows: Rows, answers: Sequence[tuple[int, str]], tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer loses a part of one of the answers."""
    control = ControlTokens(tokenizer)
    # Text with names of added tokens is not checked, because tokenizers may drop white space next to added tokens.
    plain = [(row, text) for row, text in answers if not control.spells_added(text)]
    if lost := loss([text for _, text in plain], tokenizer):
        number, difference = lost
        raise ConfigError(
            f"{rows.place(plain[number][0])}: the tokenizer loses a part of the supervised answer: {difference}; save "
            "the tokenizer again with the class that made it, change the answer, or accept the loss with "
            "data.lossy_tokenizer=allow"
        )


def _overlong_error(rows: Rows, too_long: Mapping[int, Overlong], limit: int) -> ConfigError:
    row, first = next(iter(too_long.items()))
    most = max(found.tokens for found in too_long.values())
    others = f" ({len(too_long)} answers are too long, with up to {most} tokens)" if len(too_long) > 1 else ""
    return ConfigError(
        f"{rows.place(row)}: the supervised answer has {'' if first.exact else 'at least '}{first.tokens} tokens, "
        f"longer than rollout.max_response_length={limit}{others}; raise rollout.max_response_length, or leave such "
        "answers out with data.overlong_prompts=filter"
    )


def _nothing_left(options: SupervisedOptions, answers: AnswerForm, where: str, too_long: Mapping[int, Overlong]) -> str:
    given = f"data.sft_response={shown(options.response)}"
    if too_long:
        return (
            f"{given}: no supervised answer is left, all {len(too_long)} are longer than "
            f"rollout.max_response_length={options.max_length}; raise rollout.max_response_length"
        )
    return (
        f"{given}: no row of {where} has an answer in {answers.source}; name a column that holds answers, or set "
        "algorithm.sft_coef=0 and data.sft_response=null"
    )
