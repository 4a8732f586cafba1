"""Loading of prompts from files or built-in tasks, and the shuffled, resumable order in which they are used.

Prompts are loaded as token ids and data columns. Any error in the data raises a one-line `ConfigError` during loading,
before any worker starts. This module does not import torch. Callers pass in the tokenizer.
"""

import difflib
import json
import random
import re
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from rltrain.base.errors import ConfigError
from rltrain.base.storage import local_path
from rltrain.data.chat_templates import ChatTemplates
from rltrain.data.control_tokens import ControlTokens
from rltrain.data.prompt_encoding import ROW_HELP, Overlong, PromptEncoder, SpecialTokens, unicode
from rltrain.data.tokenizer_round_trip import loss
from rltrain.settings.typed import require

BUILTIN = "builtin:"
BUILTIN_TRAIN_ROWS = 8192
BUILTIN_VAL_ROWS = 512
RESERVED_COLUMNS = ("response", "finish_reason")  # reward functions get values under these names from the sample
_BATCH = 1024  # prompts per call of the tokenizer
_ROUND_TRIPS = 64  # number of prompts that are encoded, decoded and compared with the original
_ENDINGS = (".jsonl", ".json", ".parquet")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON escape of a surrogate, paired or not


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: position in its `PromptSet`.
        text: the prompt as reward functions get it. A text prompt is the text in the data, without control tokens if
            `data.special_tokens` allows them. A chat is the output of the chat template, without control tokens.
        ids: the exact token ids that the engine receives.
        columns: the values of all other columns of the row; None for a missing value.
        messages: the chat messages; None if the prompt is text.
    """

    index: int
    text: str
    ids: list[int]
    columns: dict[str, Any]
    messages: list[dict[str, str]] | None = None


class PromptSet(Sequence[Prompt]):
    """The checked and tokenized prompts of one source. `Prompt` objects are created on access.

    Attributes:
        source: the source of the prompts, as written in the config.
        columns: names of the data's columns besides `prompt`.
        filtered: number of prompts left out because they are too long.
        notes: one-line messages for the user about the prompts.
    """

    def __init__(self, source: str, rows: "_Rows", tokenizer: Any, *, special_tokens: SpecialTokens = "text") -> None:
        self.source = source
        self.columns = rows.columns
        self.filtered = 0
        self.notes: list[str] = []
        self._rows, self._tokenizer = rows, tokenizer
        allowed = special_tokens == "allow"
        self._left_out = tuple(token for token in tokenizer.all_special_tokens if token) if allowed else ()
        # Flat arrays, because lists of Python ints would take ten times the memory.
        self._kept, self._ids, self._ends = array("q"), array("i"), array("q", [0])

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # resolves a negative index and raises IndexError
        ids = self._ids[self._ends[index] : self._ends[index + 1]].tolist()
        row = self._rows.row(self._kept[index])
        text, chat = row["prompt"], row["prompt"] if isinstance(row["prompt"], list) else None
        if not isinstance(text, str) or any(token in text for token in self._left_out):
            text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Prompt(index, text, ids, {name: row.get(name) for name in self.columns}, chat)

    def fingerprint(self) -> int:
        """Return a checksum of the prompts' token ids, their order, and the values of the other columns."""
        crc = zlib.crc32(self._ends, zlib.crc32(self._ids))
        for row in map(self._rows.row, self._kept if self.columns else ()):
            crc = zlib.crc32(repr([row.get(name) for name in self.columns]).encode(), crc)
        return crc

    def rows(self, count: int) -> list[int]:
        """Return the row numbers in the source of the first `count` prompts."""
        return self._kept[:count].tolist()

    def largest_id(self) -> int:
        """Return the largest token id in any prompt."""
        return max(self._ids)

    def append(self, row: int, ids: Sequence[int]) -> None:
        """Add the prompt of row number `row` of the source, with its token ids."""
        self._kept.append(row)
        self._ids.extend(ids)
        self._ends.append(len(self._ids))


def load_prompts(
    source: str,
    tokenizer: Any,
    *,
    split: Literal["train", "val"],
    seed: int,
    max_prompt_length: int,
    overlong: Literal["refuse", "filter"],
    special_tokens: SpecialTokens = "text",
    lossy_tokenizer: Literal["refuse", "allow"] = "refuse",
    limit: int | None = None,
) -> PromptSet:
    """Read, check and tokenize the prompts of a built-in task or a file.

    Args:
        source: `builtin:NAME`, or a path that ends in .jsonl, .json or .parquet.
        tokenizer: a Hugging Face tokenizer.
        split: the config key under `data` that names the source. Built-in tasks have different prompts in each split.
        seed: random seed for the prompts of a built-in task.
        max_prompt_length: maximum number of tokens in a prompt.
        overlong: treatment of longer prompts. "refuse" raises an error, and "filter" leaves them out and counts them
            in `PromptSet.filtered`.
        special_tokens: treatment of text that spells a control token. "text" encodes it as ordinary text, "refuse"
            raises an error, and "allow" encodes it as the control token.
        lossy_tokenizer: whether the tokenizer may lose parts of the first prompts. See
            `rltrain.data.tokenizer_round_trip`.
        limit: maximum number of prompts. The first prompts that are not too long are kept.

    Raises:
        ConfigError: the data is invalid. The message is one line with the file, the row, the error and its fix.
    """
    where = f"data.{split}={source}"
    rows = _builtin_rows(source, where, split, seed, limit) if source.startswith(BUILTIN) else _file_rows(source, where)
    require(len(rows) > 0, f"{where}: holds no rows; give it at least one prompt")
    for name in RESERVED_COLUMNS:
        require(name not in rows.columns, f"{where}: column '{name}' is what the sample itself is called; rename it")
    prompts = PromptSet(source, rows, tokenizer, special_tokens=special_tokens)
    too_long: dict[int, Overlong] = {}
    with ChatTemplates() as templates:
        encoder = PromptEncoder(tokenizer, special_tokens=special_tokens, templates=templates)
        for start in range(0, len(rows), _BATCH):
            batch = dict(enumerate(rows.prompts(start, start + _BATCH), start))
            for row, ids in encoder.encode(batch, rows.place, max_prompt_length):
                if limit is not None and len(prompts) == limit:
                    break
                if isinstance(ids, Overlong):
                    too_long[row] = ids
                else:
                    prompts.append(row, ids)
            if limit is not None and len(prompts) == limit:
                break
    if too_long and overlong == "refuse":
        raise _overlong_error(rows, too_long, max_prompt_length)
    require(len(prompts) > 0, _nothing_left(where, too_long, max_prompt_length))
    if lossy_tokenizer == "refuse":
        _require_round_trips(rows, prompts.rows(_ROUND_TRIPS), tokenizer)
    prompts.filtered = len(too_long)
    prompts.notes = _notes(where, prompts, encoder, max_prompt_length)
    return prompts


class PromptOrder:
    """The order in which prompts are used. Its state can be saved and loaded.

    Each epoch uses every index once, in a new permutation.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        """Order the indices 0..size-1. Without `shuffle`, the indices ascend in every epoch."""
        assert size > 0, "an order needs at least one prompt"
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._drawn = 0
        self._permutation: tuple[int, Sequence[int]] = (-1, ())  # (epoch, indices in the order of that epoch)

    def next(self, count: int) -> list[int]:
        """Return the next `count` indices, which may span several epochs."""
        taken = [self.at(position) for position in range(self._drawn, self._drawn + count)]
        self._drawn += count
        return taken

    def at(self, position: int) -> int:
        """Return the index at a position counted over all epochs, whether or not `next` has returned it yet."""
        return self._of_epoch(position // self._size)[position % self._size]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values for `load_state_dict`."""
        return {"size": self._size, "seed": self._seed, "shuffle": self._shuffle, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ConfigError: the state comes from an order with another size, seed or shuffle setting.
        """
        for name, value in self.state_dict().items():
            require(
                name == "drawn" or state[name] == value,
                f"{name}={value}: the checkpoint's prompts were ordered with {name}={state[name]}, so they cannot be "
                "continued in their order; use the data and seed of the checkpoint, or start a new run",
            )
        self._drawn = state["drawn"]

    def _of_epoch(self, epoch: int) -> Sequence[int]:
        if self._permutation[0] != epoch:
            indices = list(range(self._size))
            if self._shuffle:
                random.Random(f"{self._seed}/prompt order/{epoch}").shuffle(indices)
            self._permutation = (epoch, indices)
        return self._permutation[1]


@dataclass(frozen=True)
class _Rows:
    """Rows of a source, in memory as dicts or as an Arrow table. `place(i)` returns the location of row i."""

    content: Any
    columns: tuple[str, ...]
    place: Callable[[int], str]

    @classmethod
    def of_dicts(cls, rows: list[dict[str, Any]], place: Callable[[int], str]) -> "_Rows":
        names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
        return cls(rows, tuple(names), place)

    def __len__(self) -> int:
        return len(self.content)

    def row(self, index: int) -> dict[str, Any]:
        row: dict[str, Any]
        row = self.content[index] if isinstance(self.content, list) else self.content.slice(index, 1).to_pylist()[0]
        return row

    def prompts(self, start: int, stop: int) -> list[Any]:
        if isinstance(self.content, list):
            return [row.get("prompt") for row in self.content[start:stop]]
        found: list[Any] = self.content.column("prompt").slice(start, stop - start).to_pylist()
        return found


def _builtin_rows(source: str, where: str, split: str, seed: int, limit: int | None) -> _Rows:
    from rltrain.tasks import TASKS

    name = source.removeprefix(BUILTIN)
    require(name in TASKS, f"{where}: unknown built-in task; there are {', '.join(BUILTIN + task for task in TASKS)}")
    count = limit or (BUILTIN_TRAIN_ROWS if split == "train" else BUILTIN_VAL_ROWS)
    return _Rows.of_dicts(TASKS[name].prompts(split, seed, count), lambda i: f"{where}, row {i + 1}")


def _file_rows(source: str, where: str) -> _Rows:
    path = local_path(source, where)
    require(path.suffix in _ENDINGS, f"{where}: unknown kind of file; it must end in {', '.join(_ENDINGS)}")
    require(path.exists(), _missing_file(path, where))
    require(path.is_file(), f"{where}: is a folder; name one file in it, ending in {', '.join(_ENDINGS)}")
    if path.suffix == ".parquet":
        return _parquet_rows(path, where)
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # UTF-8 byte-order mark
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}); check its permissions") from None
    is_array = path.suffix == ".json" and content.lstrip().startswith(b"[")
    return _array_rows(content, where) if is_array else _line_rows(content, where)


def _missing_file(path: Path, where: str) -> str:
    if not path.parent.is_dir():
        return f"{where}: no such file, nor its folder {path.parent}; check the path (it starts at {Path.cwd()})"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else f"check the path (it starts at {Path.cwd()})"
    return f"{where}: no such file; {hint}"


def _line_rows(content: bytes, where: str) -> _Rows:
    rows, lines = [], array("q")
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            rows.append(_object(line, f"{where}:{number}"))
            lines.append(number)
    return _Rows.of_dicts(rows, lambda i: f"{where}:{lines[i]}")


def _object(line: bytes, place: str) -> dict[str, Any]:
    value = _json(line, place)
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {type(value).__name__} where an object was expected; {ROW_HELP}")
    if _SURROGATE.search(line):
        unicode(json.dumps(value, ensure_ascii=False), place, "the row")
    return value


def _json(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # ValueError: invalid JSON, or a number with thousands of digits
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{place}: not valid JSON ({reason}); put one object on each line of a .jsonl file") from None


def _array_rows(content: bytes, where: str) -> _Rows:
    def place(index: int) -> str:
        return f"{where}, row {index + 1}"

    suspect = _SURROGATE.search(content)
    for index, row in enumerate(rows := _json(content, where)):
        if not isinstance(row, dict):
            raise ConfigError(f"{place(index)}: {type(row).__name__} where an object was expected; {ROW_HELP}")
        if suspect:
            unicode(json.dumps(row, ensure_ascii=False), place(index), "the row")
    return _Rows.of_dicts(rows, place)


def _parquet_rows(path: Path, where: str) -> _Rows:
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
        names = table.column_names
    except Exception as error:  # pyarrow raises many exception types for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(f"{where}: not a readable parquet file ({reason}); write it again") from None
    require("prompt" in names, f"{where}: no column 'prompt' among {', '.join(names) or 'none'}; {ROW_HELP}")
    twice = [name for name in names if names.count(name) > 1]
    require(not twice, f"{where}: several columns are called '{''.join(twice[:1])}'; rename all but one of them")
    for name in names:
        _check_values(table.column(name), name, where)
    return _Rows(table, tuple(name for name in names if name != "prompt"), lambda i: f"{where}, row {i + 1}")


def _check_values(column: Any, name: str, where: str) -> None:
    """Raise ConfigError if a column of an Arrow table has a value that Python cannot represent.

    Without this check, the error would occur only when the value is used.
    """
    if _is_safe(column.type):
        return
    for start in range(0, len(column), _BATCH):
        piece = column.slice(start, _BATCH)
        try:
            piece.to_pylist()
        except Exception:
            for row in range(len(piece)):
                _check_value(piece.slice(row, 1), f"{where}, row {start + row + 1}, column '{name}'")


def _check_value(cell: Any, place: str) -> None:
    try:
        cell.to_pylist()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place}: text that is not valid UTF-8 ({error.reason}); write it as UTF-8, or as binary"
        ) from None
    except Exception:  # e.g. nanoseconds, a date after the year 9999, an unknown time zone, two fields with one name
        raise ConfigError(
            f"{place}: a value of type {cell.type} that Python cannot hold; write it as text, or a time in whole "
            "microseconds between the years 1 and 9999, without a zone or in UTC"
        ) from None


def _is_safe(kind: Any) -> bool:
    """Return whether Python can represent every value of an Arrow type, so that no value needs a check."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_safe(kind.value_type)
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(numeric or types.is_boolean(kind) or types.is_null(kind) or types.is_binary(kind))


def _require_round_trips(rows: _Rows, kept: Sequence[int], tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer loses a part of these rows' prompts."""
    control = ControlTokens(tokenizer)
    prompts = [(row, rows.row(row)["prompt"]) for row in kept]
    texts = [
        (row, text)
        for row, prompt in prompts
        for text in ([prompt] if isinstance(prompt, str) else [message["content"] for message in prompt])
        if not control.spells_added(text)  # added tokens may absorb white space
    ]
    if lost := loss([text for _, text in texts], tokenizer):
        number, difference = lost
        raise ConfigError(
            f"{rows.place(texts[number][0])}: the tokenizer loses a part of the prompt: {difference}; save the "
            f"tokenizer again with the class that made it (it loads as {type(tokenizer).__name__}), change the prompt, "
            "or accept the loss with data.lossy_tokenizer=allow"
        )


def _notes(where: str, prompts: PromptSet, encoder: PromptEncoder, limit: int) -> list[str]:
    """Return messages for the user about prompts that were left out, or whose control tokens became text."""
    notes = []
    if prompts.filtered:
        notes.append(
            f"{where}: prompts left out as longer than rollout.max_prompt_length={limit}: {prompts.filtered:,}"
        )
    if encoder.spelling:
        place, name = encoder.first_spelling
        notes.append(
            f"{where}: prompts that spell control tokens, which are encoded as text: {encoder.spelling:,}, the first "
            f"with {name} in {place}; data.special_tokens=allow makes tokens of them"
        )
    return notes


def _overlong_error(rows: _Rows, too_long: dict[int, Overlong], limit: int) -> ConfigError:
    row, first = next(iter(too_long.items()))
    most = max(found.tokens for found in too_long.values())
    others = f" ({len(too_long)} prompts are, up to {most} tokens)" if len(too_long) > 1 else ""
    return ConfigError(
        f"{rows.place(row)}: the prompt has {'' if first.exact else 'at least '}{first.tokens} tokens, longer than "
        f"rollout.max_prompt_length={limit}{others}; raise rollout.max_prompt_length, or leave such prompts out with "
        "data.overlong_prompts=filter"
    )


def _nothing_left(where: str, too_long: dict[int, Overlong], limit: int) -> str:
    shortest = min((found.tokens for found in too_long.values()), default=0)
    return (
        f"{where}: no prompt is left, all {len(too_long)} are longer than rollout.max_prompt_length={limit}; raise it "
        f"to at least {shortest}"
    )
