"""Prompts: files or built-in tasks -> token ids and columns, and a shuffled order that can be resumed.

Whatever is wrong with the data is a `ConfigError` of one line, raised while loading, before any worker starts. Nothing
here imports torch; the tokenizer is passed in.
"""

import difflib
import json
import random
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from rltrain.errors import ConfigError
from rltrain.typed import require

BUILTIN = "builtin:"
BUILTIN_TRAIN_ROWS = 8192
BUILTIN_VAL_ROWS = 512
RESERVED_COLUMNS = ("response", "finish_reason")  # reward functions get these from the sample itself
_BATCH = 1024  # prompts that go to the tokenizer in one call
_ENDINGS = (".jsonl", ".json", ".parquet")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # in JSON: half a pair, or one of two halves
_ROW_HELP = 'give each row text or a list of messages such as [{"role": "user", "content": "..."}] under prompt'


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: position in its `PromptSet`.
        text: the prompt without special tokens, as reward functions get it.
        ids: the exact token ids that the engine is sent.
        columns: every other column of its row; None where the row has no value.
        messages: the chat that was put through the chat template; None where the prompt is text.
    """

    index: int
    text: str
    ids: list[int]
    columns: dict[str, Any]
    messages: list[dict[str, str]] | None = None


class PromptSet(Sequence[Prompt]):
    """The prompts of one source, already checked and tokenised; `Prompt`s are made as they are asked for.

    Attributes:
        source: what was loaded, as the config says it.
        columns: names of the data's columns besides `prompt`.
        filtered: number of prompts left out because they are too long.
    """

    def __init__(self, source: str, rows: "_Rows", tokenizer: Any) -> None:
        self.source = source
        self.columns = rows.columns
        self.filtered = 0
        self._rows, self._tokenizer = rows, tokenizer
        self._special = tuple(token for token in tokenizer.all_special_tokens if token)
        # Ids lie flat: lists of Python ints would take ten times the memory.
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
        index = range(len(self))[index]  # negative indices, IndexError
        ids = self._ids[self._ends[index] : self._ends[index + 1]].tolist()
        row = self._rows.row(self._kept[index])
        text, chat = row["prompt"], row["prompt"] if isinstance(row["prompt"], list) else None
        if not isinstance(text, str) or any(token in text for token in self._special):
            text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Prompt(index, text, ids, {name: row.get(name) for name in self.columns}, chat)

    def fingerprint(self) -> int:
        """A number that differs for other prompts, another order of them, or other values of the further columns."""
        crc = zlib.crc32(self._ends, zlib.crc32(self._ids))
        for row in map(self._rows.row, self._kept if self.columns else ()):
            crc = zlib.crc32(repr([row.get(name) for name in self.columns]).encode(), crc)
        return crc

    def append(self, row: int, ids: Sequence[int]) -> None:
        """Keep row number `row` of the source, with its token ids."""
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
    limit: int | None = None,
) -> PromptSet:
    """Read, check and tokenise the prompts of a built-in task or a file.

    Args:
        source: `builtin:NAME`, or a path that ends in .jsonl, .json or .parquet.
        tokenizer: a Hugging Face tokenizer.
        split: which config key names the source; built-in tasks hold different prompts in each.
        seed: draws the prompts of a built-in task.
        max_prompt_length: in tokens.
        overlong: what happens to longer prompts: an error, or left out and counted in `filtered`.
        limit: keep at most so many, the first that fit.

    Raises:
        ConfigError: one line: which file and row, what is wrong, and the way out.
    """
    where = f"data.{split}={source}"
    rows = _builtin_rows(source, where, split, seed, limit) if source.startswith(BUILTIN) else _file_rows(source, where)
    require(len(rows) > 0, f"{where}: holds no rows; give it at least one prompt")
    for name in RESERVED_COLUMNS:
        require(name not in rows.columns, f"{where}: column '{name}' is what the sample itself is called; rename it")
    prompts = PromptSet(source, rows, tokenizer)
    too_long: list[tuple[int, int]] = []  # (row, tokens)
    for row, ids in _tokenised(rows, tokenizer):
        if len(ids) > max_prompt_length:
            too_long.append((row, len(ids)))
        elif limit is None or len(prompts) < limit:
            prompts.append(row, ids)
        if limit is not None and len(prompts) == limit:
            break
    if too_long and overlong == "refuse":
        raise _overlong_error(rows, too_long, max_prompt_length)
    prompts.filtered = len(too_long)
    require(len(prompts) > 0, _nothing_left(where, too_long, max_prompt_length))
    return prompts


class PromptOrder:
    """The order in which prompts are used: each index once per epoch, a fresh permutation per epoch, resumable."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        """Order indices 0..size-1; without `shuffle` every epoch counts up."""
        assert size > 0, "an order needs at least one prompt"
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._drawn = 0
        self._permutation: tuple[int, Sequence[int]] = (-1, ())  # (its epoch, indices)

    @property
    def epoch(self) -> int:
        """How often all prompts have been used."""
        return self._drawn // self._size

    def next(self, count: int) -> list[int]:
        """Return the next `count` indices, across the edges of epochs where need be."""
        taken = [self.at(position) for position in range(self._drawn, self._drawn + count)]
        self._drawn += count
        return taken

    def at(self, position: int) -> int:
        """Return the index at a position of the whole order, drawn or not."""
        return self._of_epoch(position // self._size)[position % self._size]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that `load_state_dict` continues from."""
        return {"size": self._size, "seed": self._seed, "shuffle": self._shuffle, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ConfigError: the state is of an order over other prompts.
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
    """Rows of a source, in memory as dicts or as an Arrow table; `place(i)` says where row i stands."""

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
        if isinstance(self.content, list):
            return self.content[index]
        return self.content.slice(index, 1).to_pylist()[0]

    def prompts(self, start: int, stop: int) -> list[Any]:
        if isinstance(self.content, list):
            return [row.get("prompt") for row in self.content[start:stop]]
        return self.content.column("prompt").slice(start, stop - start).to_pylist()


def _builtin_rows(source: str, where: str, split: str, seed: int, limit: int | None) -> _Rows:
    from rltrain.tasks import TASKS

    name = source.removeprefix(BUILTIN)
    require(name in TASKS, f"{where}: unknown built-in task; there are {', '.join(BUILTIN + task for task in TASKS)}")
    count = limit or (BUILTIN_TRAIN_ROWS if split == "train" else BUILTIN_VAL_ROWS)
    return _Rows.of_dicts(TASKS[name].prompts(split, seed, count), lambda i: f"{where}, row {i + 1}")


def _file_rows(source: str, where: str) -> _Rows:
    path = Path(source).expanduser()
    require(path.suffix in _ENDINGS, f"{where}: unknown kind of file; it must end in {', '.join(_ENDINGS)}")
    require(path.exists(), _missing_file(path, where))
    require(path.is_file(), f"{where}: is a folder; name one file in it, ending in {', '.join(_ENDINGS)}")
    if path.suffix == ".parquet":
        return _parquet_rows(path, where)
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte-order mark
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
        raise ConfigError(f"{place}: {type(value).__name__} where an object was expected; {_ROW_HELP}")
    if _SURROGATE.search(line):
        _unicode(json.dumps(value, ensure_ascii=False), place, "the row")
    return value


def _json(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or a number of thousands of digits
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{place}: not valid JSON ({reason}); put one object on each line of a .jsonl file") from None


def _array_rows(content: bytes, where: str) -> _Rows:
    def place(index: int) -> str:
        return f"{where}, row {index + 1}"

    suspect = _SURROGATE.search(content)
    for index, row in enumerate(rows := _json(content, where)):
        if not isinstance(row, dict):
            raise ConfigError(f"{place(index)}: {type(row).__name__} where an object was expected; {_ROW_HELP}")
        if suspect:
            _unicode(json.dumps(row, ensure_ascii=False), place(index), "the row")
    return _Rows.of_dicts(rows, place)


def _parquet_rows(path: Path, where: str) -> _Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{where}: not a readable parquet file ({reason}); write it again") from None
    names = table.column_names
    require("prompt" in names, f"{where}: no column 'prompt' among {', '.join(names) or 'none'}; {_ROW_HELP}")
    return _Rows(table, tuple(name for name in names if name != "prompt"), lambda i: f"{where}, row {i + 1}")


def _tokenised(rows: _Rows, tokenizer: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield (row number, ids) of every prompt, tokenised in batches."""
    after = _tokens_added_after(tokenizer)
    for start in range(0, len(rows), _BATCH):
        prompts = rows.prompts(start, start + _BATCH)
        texts: dict[bool, dict[int, str]] = {False: {}, True: {}}  # by whether they are chats
        for row, prompt in enumerate(prompts, start=start):
            texts[isinstance(prompt, list)][row] = _rendered(prompt, tokenizer, rows.place(row))
        ids = {row: batch[: len(batch) - after] for row, batch in _encoded(texts[False], tokenizer, special=True)}
        ids |= dict(_encoded(texts[True], tokenizer, special=False))  # the template has written its own
        for row in sorted(ids):
            require(bool(ids[row]), f"{rows.place(row)}: the prompt has no tokens; {_ROW_HELP}")
            yield row, one_bos(ids[row], tokenizer.bos_token_id)


def _rendered(prompt: Any, tokenizer: Any, place: str) -> str:
    """Return the text to tokenise: the prompt itself, or its messages put through the chat template once."""
    require(prompt is not None, f"{place}: no prompt; {_ROW_HELP}")
    require(not isinstance(prompt, str | list) or bool(prompt), f"{place}: the prompt is empty; {_ROW_HELP}")
    if isinstance(prompt, str):
        return _unicode(prompt, place)
    good = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    require(good, f"{place}: the prompt is neither text nor chat messages; {_ROW_HELP}")
    require(
        bool(tokenizer.chat_template),
        f"{place}: chat messages, but the model's tokenizer has no chat template; use text prompts or a chat model",
    )
    try:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise whatever they like, on roles they do not know for one
        reason = " ".join(str(error).split())
        raise ConfigError(f"{place}: the chat template refuses these messages ({reason}); change them") from error
    return _unicode(text, place)


def _unicode(text: str, place: str, what: str = "the prompt") -> str:
    """Refuse half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: {what} is not valid Unicode ({error.reason}); remove that character") from None
    return text


def _encoded(texts: dict[int, str], tokenizer: Any, *, special: bool) -> Iterator[tuple[int, list[int]]]:
    if texts:
        # A saved tokenizer may have truncation switched on: say no (E10).
        batch = tokenizer(
            list(texts.values()),
            add_special_tokens=special,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        yield from zip(texts, batch["input_ids"], strict=True)


def _tokens_added_after(tokenizer: Any) -> int:
    """Count the tokens that the tokenizer puts behind a text: a prompt that ends in an end token is already over."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    before = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), None)
    return 0 if before is None else len(full) - before - len(plain)


def one_bos(ids: list[int], bos: int | None) -> list[int]:
    """Leave one of several begin tokens: text that starts with one, and a tokenizer that adds it (E9)."""
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def _overlong_error(rows: _Rows, too_long: list[tuple[int, int]], limit: int) -> ConfigError:
    row, length = too_long[0]
    others = f" ({len(too_long)} prompts are, up to {max(n for _, n in too_long)} tokens)" if len(too_long) > 1 else ""
    return ConfigError(
        f"{rows.place(row)}: the prompt has {length} tokens, longer than rollout.max_prompt_length={limit}{others}; "
        "raise rollout.max_prompt_length, or leave such prompts out with data.overlong_prompts=filter"
    )


def _nothing_left(where: str, too_long: list[tuple[int, int]], limit: int) -> str:
    shortest = min((length for _, length in too_long), default=0)
    return (
        f"{where}: no prompt is left, all {len(too_long)} are longer than rollout.max_prompt_length={limit}; raise it "
        f"to at least {shortest}"
    )
