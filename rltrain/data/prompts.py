"""Loading of prompts: the rows of a source are read, checked and tokenized.

Loaded prompts consist of token ids and data columns. An error in the prompt data raises a `ConfigError` with a one-line
message while the prompts are loaded, before any worker starts. The functions of this module get the tokenizer as an
argument, so that importing the module does not import torch.
"""

import itertools
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from rltrain.base.errors import ConfigError
from rltrain.data.chat_templates import ChatTemplates
from rltrain.data.control_tokens import ControlTokens
from rltrain.data.prompt_encoding import Overlong, PromptEncoder, SpecialTokens
from rltrain.data.prompt_form import PromptForm, PromptOptions, prompt_form
from rltrain.data.prompt_images import (
    IMAGE_COLUMNS,
    ImageInfo,
    ImagePlaceholders,
    PromptImages,
    image_info,
    image_number,
    read_image,
    texts_of,
)
from rltrain.data.row_error import RowError
from rltrain.data.row_sources import Split, load_rows, source_folder
from rltrain.data.rows import Rows
from rltrain.data.supervised_answers import SupervisedAnswers, SupervisedOptions, load_answers
from rltrain.data.tokenizer_round_trip import loss
from rltrain.settings.typed import require

# Names that no data column may have, because reward functions get other values under these names, such as the scored
# answer.
RESERVED_COLUMNS = ("response", "finish_reason", "prompt_messages", "response_ids")
_BATCH = 1024  # Maximum number of prompts that are tokenized in one call.
_ROUND_TRIPS = 64  # Number of prompts whose token ids are decoded and compared with the original text.


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set, with the prompt's token ids and the column values of the row from which the prompt was
    made.

    Attributes:
        index: position of the prompt in its `PromptSet`.
        text: the prompt in the form that reward functions get. For chat messages, `text` is the output of the chat
            template without control tokens. For a text prompt, `text` is the text in the data; control tokens are
            removed from the text if control tokens are allowed in prompts.
        ids: the exact token ids that the engine receives.
        columns: maps the name of each column that reward functions get to the value in that column of the prompt's data
            row; a missing value is None.
        messages: the chat messages; None if the prompt is text.
        supervised_ids: token ids of the supervised answer, which the supervised loss trains on; None if the prompt has
            no supervised answer.
        images: images that the prompt shows; None if it shows none.
    """

    index: int
    text: str
    ids: list[int]
    columns: dict[str, Any]
    messages: list[dict[str, Any]] | None = None
    supervised_ids: list[int] | None = None
    images: PromptImages | None = None

    @property
    def chat(self) -> Sequence[Mapping[str, Any]]:
        """The prompt as chat messages. A text prompt becomes a single user message."""
        return self.messages or [{"role": "user", "content": self.text}]


class PromptSet(Sequence[Prompt]):
    """The checked and tokenized prompts of one source.

    A new `Prompt` object is created each time an item of the set is read.

    Attributes:
        source: the source of the prompts, as written in the config.
        where: text that names the config key and the source of the prompts in error messages.
        columns: names of the data columns that reward functions get.
        filtered: number of prompts that were left out because they are too long.
        notes: one-line messages for the user about the prompts.
        own_splits: whether the same source gives different rows for training and for evaluation.
        described: one-line description, for the user, of the source of the prompts and of how the source's rows became
            prompts.
        supervised: the supervised answers to the prompts; None if the run has no supervised loss.
        folder: folder to which the paths of images are relative.
    """

    def __init__(
        self,
        source: str,
        rows: Rows,
        form: PromptForm,
        tokenizer: Any,
        *,
        special_tokens: SpecialTokens = "text",
        placeholders: ImagePlaceholders | None = None,
        folder: Path = Path(),
    ) -> None:
        self.source, self.where, self.own_splits, self.described = source, source, rows.own_splits, ""
        self.columns = form.columns
        self.filtered = 0
        self.supervised: SupervisedAnswers | None = None
        self.notes: list[str] = []
        self._rows, self._form, self._tokenizer = rows, form, tokenizer
        self._placeholders, self.folder = placeholders, folder
        allowed = special_tokens == "allow"
        self._left_out = tuple(token for token in tokenizer.all_special_tokens if token) if allowed else ()
        # Token ids are kept in flat arrays, because lists of Python ints would take ten times the memory.
        self._kept, self._ids, self._ends = array("q"), array("i"), array("q", [0])
        # Number, width and height of each image of all prompts, and the end of each prompt's images.
        self._images, self._image_ends = array("q"), array("q", [0])

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        # Indexing a `range` object converts a negative index to a positive index, and raises IndexError for an index
        # out of range.
        index = range(len(self))[index]
        ids, images = self._short_ids(index), None
        row = self._rows.row(self._kept[index])
        text, values = self._form.shown(row)
        chat = text if isinstance(text, list) else None
        if values:
            ids, images = self._with_images(index, ids, values)
        if not isinstance(text, str) or any(token in text for token in self._left_out):
            text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        supervised = None if self.supervised is None else self.supervised.ids(index)
        return Prompt(index, text, ids, self._form.values(row), chat, supervised, images)

    def _infos(self, index: int) -> list[ImageInfo]:
        """Return the numbers and sizes of the images of a prompt."""
        flat = self._images[self._image_ends[index] : self._image_ends[index + 1]]
        return [ImageInfo(*flat[at : at + 3]) for at in range(0, len(flat), 3)]

    def _with_images(self, index: int, short_ids: list[int], values: Sequence[Any]) -> tuple[list[int], PromptImages]:
        """Return a prompt's token ids, including the tokens of its images, and the prompt's images.

        The images' files are read again. If a file has changed since the run began, ConfigError is raised.
        """
        assert self._placeholders is not None, "only models that take images have prompts with images"
        known, place = self._infos(index), self._rows.place(self._kept[index])
        try:
            files = tuple(read_image(value, self.folder) for value in values)
            found = [image_number(file) for file in files]
        except RowError as error:
            raise ConfigError(f"{place}: {error}") from None
        require(
            found == [image.number for image in known],
            f"{place}: an image has changed since the run began; restore the image",
        )
        ids, numbers = self._placeholders.replaced(short_ids, known)
        numbered = tuple((image.number, file) for image, file in zip(known, files, strict=True))
        return ids, PromptImages(numbered, short_ids, numbers)

    @property
    def shows_images(self) -> bool:
        """Whether a prompt shows an image."""
        return bool(self._images)

    def fingerprint(self) -> int:
        """Return a checksum of the prompts. The checksum covers the token ids and the order of the prompts, the column
        values that reward functions get, and the supervised answers.
        """
        crc = zlib.crc32(self._ends, zlib.crc32(self._ids))
        crc = zlib.crc32(self._images, crc) if self._images else crc
        for values in () if self.supervised is None else self.supervised.arrays:
            crc = zlib.crc32(values, crc)
        for row in map(self._rows.row, self._kept if self.columns else ()):
            crc = zlib.crc32(repr([*self._form.values(row).values()]).encode(), crc)
        return crc

    def rows(self, count: int) -> list[int]:
        """Return, for each of the first `count` prompts, the index of the source row from which the prompt was made."""
        return self._kept[:count].tolist()

    def values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a pair for each prompt: the location of the prompt's row (a text for error messages), and a dict of the
        row's column values that reward functions get.
        """
        for row in self._kept:
            yield self._rows.place(row), self._form.values(self._rows.row(row))

    def null_columns(self) -> set[str]:
        """Return those of the data columns in `columns` that are null for every prompt."""
        found = set(self.columns)
        for _, values in self.values():
            found = {name for name in found if values[name] is None}
            if not found:
                break
        return found

    def token_counts(self) -> list[int]:
        """Return the number of token ids of each prompt."""
        short = [end - start for start, end in itertools.pairwise(self._ends)]
        if self._placeholders is None or not self._images:
            return short
        return [self._placeholders.length(self._short_ids(i), self._infos(i)) for i in range(len(short))]

    def largest_id(self) -> int:
        """Return the largest token id in any prompt or supervised answer."""
        of_images = 0 if self._placeholders is None else self._placeholders.largest()
        return max(max(self._ids), of_images, 0 if self.supervised is None else self.supervised.largest_id())

    def append(self, row: int, ids: Sequence[int], images: Sequence[ImageInfo] = ()) -> None:
        """Add a prompt, given as token ids, that was made from row number `row` of the source.

        `ids` has one placeholder token for each of the prompt's images.
        """
        self._kept.append(row)
        self._ids.extend(ids)
        self._ends.append(len(self._ids))
        self._images.extend(itertools.chain.from_iterable(images))
        self._image_ends.append(len(self._images))

    def _short_ids(self, index: int) -> list[int]:
        return self._ids[self._ends[index] : self._ends[index + 1]].tolist()


def load_prompts(
    source: str,
    tokenizer: Any,
    *,
    split: Split,
    key: str = "",
    seed: int,
    max_prompt_length: int,
    overlong: Literal["refuse", "filter"],
    options: PromptOptions = PromptOptions(),  # noqa: B008 (the default object is immutable)
    special_tokens: SpecialTokens = "text",
    lossy_tokenizer: Literal["refuse", "allow"] = "refuse",
    limit: int | None = None,
    supervised: SupervisedOptions | None = None,
    placeholders: ImagePlaceholders | None = None,
) -> PromptSet:
    """Read, check and tokenize the prompts of a source.

    Args:
        source: a built-in task, a file, a folder, a function or a data set on the Hugging Face hub, written as
            `rltrain.data.row_sources` describes.
        tokenizer: a Hugging Face tokenizer.
        split: `train` for training prompts, or `val` for evaluation prompts. Built-in tasks have different prompts for
            training and for evaluation.
        key: the config key under `data` that names the source, for error messages. If `key` is "", error messages name
            the config key `data.train` or `data.val`, according to `split`.
        seed: random seed for the prompts of a built-in task, and for a user's function with a parameter `seed`.
        max_prompt_length: maximum number of tokens in a prompt.
        overlong: what happens to prompts with more than `max_prompt_length` tokens. With `overlong`="refuse", a prompt
            that is too long raises an error. With `overlong`="filter", each prompt that is too long is left out and
            counted in `PromptSet.filtered`.
        options: the user's settings for prompts: which columns become the prompt, and whether a chat template is
            applied.
        special_tokens: what happens to prompts that contain the name of a control token, such as `<|im_end|>`. The
            value "text" encodes a control token's name as ordinary text, "refuse" raises an error, and "allow" encodes
            the name as the control token.
        lossy_tokenizer: what happens if the tokenizer loses a part of a prompt. "refuse" raises an error if the
            tokenizer loses a part of one of the first `_ROUND_TRIPS` prompts, and "allow" accepts the tokenizer.
        limit: maximum number of prompts to load. If the source has more than `limit` prompts, the first `limit` prompts
            that are not too long are kept.
        supervised: settings of the supervised answers to the prompts; None if no supervised answers are needed.
        placeholders: replaces the placeholder tokens of images in prompts; None if the model takes no images.

    Raises:
        ConfigError: the prompt data is invalid. The message of the ConfigError is one line that names the file, the
            row, the problem and its fix.
    """
    where = f"data.{key or split}={source}"
    rows = load_rows(source, where, split=split, seed=seed, limit=limit)
    form = _form(rows, options, where, tokenizer, takes_images=placeholders is not None)
    prompts = PromptSet(
        source,
        rows,
        form,
        tokenizer,
        special_tokens=special_tokens,
        placeholders=placeholders,
        folder=source_folder(source, where),
    )
    with ChatTemplates() as templates:
        encoder = PromptEncoder(
            tokenizer, special_tokens=special_tokens, templates=templates, placeholders=placeholders
        )
        too_long, chats = _encode(rows, form, prompts, encoder, max_prompt_length, limit)
    if too_long and overlong == "refuse":
        raise _overlong_error(rows, too_long, max_prompt_length)
    require(len(prompts) > 0, _nothing_left(where, too_long, max_prompt_length))
    if lossy_tokenizer == "refuse":
        _require_round_trips(rows, form, prompts.rows(_ROUND_TRIPS), tokenizer)
    prompts.where, prompts.filtered = where, len(too_long)
    prompts.notes = _notes(where, prompts, encoder, max_prompt_length)
    prompts.described = (
        f"{len(rows):,} row{'s' * (len(rows) > 1)} of {source}; {form.described(chats, len(prompts) + len(too_long))}"
    )
    if supervised is not None:
        prompts.supervised = load_answers(
            rows,
            prompts.rows(len(prompts)),
            form,
            tokenizer,
            supervised,
            where=where,
            special_tokens=special_tokens,
            lossy_tokenizer=lossy_tokenizer,
        )
        prompts.notes += prompts.supervised.notes(where, supervised.max_length)
    return prompts


def _form(rows: Rows, options: PromptOptions, where: str, tokenizer: Any, *, takes_images: bool) -> PromptForm:
    """Decide which columns become the prompt. Raise ConfigError if no column can, or if a name is reserved."""
    for name in RESERVED_COLUMNS:
        require(
            name not in rows.columns,
            f"{where}: column '{name}' has a name that is reserved for a part of the scored sample; rename the column",
        )
    return prompt_form(
        rows.columns,
        options,
        where=where,
        has_template=bool(tokenizer.chat_template),
        sample=rows.read(0, _BATCH, rows.columns),
        takes_images=takes_images,
    )


def _encode(
    rows: Rows, form: PromptForm, prompts: PromptSet, encoder: PromptEncoder, max_length: int, limit: int | None
) -> tuple[dict[int, Overlong], int]:
    """Encode the rows and append the prompts to the prompt set, until the set holds `limit` prompts.

    Returns:
        Two values: a dict that holds the length of each overlong prompt, with row numbers as keys, and the number of
        rows that hold chat messages.
    """
    too_long: dict[int, Overlong] = {}
    chats = 0
    for start in range(0, len(rows), _BATCH):
        batch, of_chat, images = _prompts(rows, form, start, prompts.folder)
        for row, ids in encoder.encode(batch, rows.place, max_length, images):
            if limit is not None and len(prompts) == limit:
                return too_long, chats
            chats += row in of_chat
            if isinstance(ids, Overlong):
                too_long[row] = ids
            else:
                prompts.append(row, ids, images.get(row, ()))
    return too_long, chats


def _prompts(
    rows: Rows, form: PromptForm, start: int, folder: Path
) -> tuple[dict[int, Any], set[int], dict[int, list[ImageInfo]]]:
    """Read the batch of rows that begins at row number `start`.

    Returns:
        Three values: a dict that maps the number of each row to the row's prompt, the set of the numbers of rows that
        hold chat messages, and a dict that maps the number of each row with images to its images.
    """
    found, chats, images = dict[int, Any](), set[int](), dict[int, list[ImageInfo]]()
    for index, row in zip(itertools.count(start), rows.read(start, start + _BATCH, form.reads), strict=False):
        try:
            found[index], values = form.shown(row)
            if values:
                images[index] = [image_info(read_image(value, folder)) for value in values]
        except RowError as error:
            raise ConfigError(f"{rows.place(index)}: {error}") from None
        if isinstance(row.get(form.reads[0]), list):
            chats.add(index)
    return found, chats, images


def _require_round_trips(rows: Rows, form: PromptForm, kept: Sequence[int], tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer loses a part of the prompt of any row whose number is in `kept`."""
    control = ControlTokens(tokenizer)
    prompts = [(row, form.shown(rows.row(row))[0]) for row in kept]
    texts = [
        (row, text)
        for row, prompt in prompts
        for text in texts_of(prompt)
        # Text with names of added tokens is not checked, because tokenizers may drop white space next to added tokens.
        if not control.spells_added(text)
    ]
    if lost := loss([text for _, text in texts], tokenizer):
        number, difference = lost
        raise ConfigError(
            f"{rows.place(texts[number][0])}: the tokenizer loses a part of the prompt: {difference}; save the "
            f"tokenizer again with the class that made it (it loads as {type(tokenizer).__name__}), change the prompt, "
            "or accept the loss with data.lossy_tokenizer=allow"
        )


def _notes(where: str, prompts: PromptSet, encoder: PromptEncoder, limit: int) -> list[str]:
    """Return messages for the user about prompts that were left out, and about control-token names that were encoded as
    text.
    """
    notes = []
    unseen = [name for name in IMAGE_COLUMNS if name in prompts.columns] if encoder.placeholders is None else []
    if unseen:
        notes.append(f"{where}: the model takes no images, so it does not see the column {unseen[0]}")
    if prompts.filtered:
        notes.append(
            f"{where}: prompts left out because they are longer than rollout.max_prompt_length={limit}: "
            f"{prompts.filtered:,}"
        )
    if encoder.spelling:
        place, name = encoder.first_spelling
        notes.append(
            f"{where}: prompts that contain names of control tokens: {encoder.spelling:,} (the first: {name} in "
            f"{place}); the names are encoded as text, or with data.special_tokens=allow as control tokens"
        )
    return notes


def _overlong_error(rows: Rows, too_long: dict[int, Overlong], limit: int) -> ConfigError:
    row, first = next(iter(too_long.items()))
    most = max(found.tokens for found in too_long.values())
    others = f" ({len(too_long)} prompts are too long, with up to {most} tokens)" if len(too_long) > 1 else ""
    return ConfigError(
        f"{rows.place(row)}: the prompt has {'' if first.exact else 'at least '}{first.tokens} tokens, longer than "
        f"rollout.max_prompt_length={limit}{others}; raise rollout.max_prompt_length, or leave such prompts out with "
        "data.overlong_prompts=filter"
    )


def _nothing_left(where: str, too_long: dict[int, Overlong], limit: int) -> str:
    shortest = min((found.tokens for found in too_long.values()), default=0)
    return (
        f"{where}: no prompt is left, all {len(too_long)} are longer than rollout.max_prompt_length={limit}; raise "
        f"rollout.max_prompt_length to at least {shortest}"
    )
