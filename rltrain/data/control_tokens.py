"""Encoding of text that spells a control token, such as `<|im_end|>`: in the data it stays text.

A tokenizer makes a control token of its name wherever the name stands, so a message could end its own turn or open
another one. Where the data spells no control token, the tokenizer is used as it is. Otherwise:

1. Stand-ins (private-use characters) replace the names in the data before the chat template is applied. All names in
   the template's output are then its own.
2. A copy of the tokenizer has private names for its control tokens, and none of their usual names. The names in the
   output are replaced by private ones, the stand-ins by what the data has, and the copy encodes the result.
3. The copy must give the tokenizer's own ids for the text with the stand-ins, and the same control tokens for the
   result. If it does not, the text is refused.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # <|user|>: a control token by its form, whether it is flagged or not
_PRIVATE = re.compile("[\U000f0000-\U000fffff]")  # code points of no script: stand-ins, and names in the copy
_STAND_INS = 0xF0000
_NAME = "\U000ffff0{}\U000ffff1"
_NAMED = re.compile(_NAME.format(r"(\d+)"))


class ControlTokenError(ValueError):
    """A text that spells a control token cannot be encoded as text; the message says why."""


@dataclass(frozen=True)
class _Marked:
    """A text with stand-ins where the data spells control tokens.

    Attributes:
        text: the text, each stand-in one character.
        spelled: what the data has in the place of each stand-in.
    """

    text: str
    spelled: Mapping[str, str]

    def restored(self) -> str:
        """Return the text as the data has it."""
        return self.text.translate({ord(mark): name for mark, name in self.spelled.items()})


class ControlTokens:
    """The control tokens of a tokenizer: those that it flags as special, and others of the form `<|...|>`.

    Other added tokens, such as `<think>`, are vocabulary: text that spells one becomes one.

    Attributes:
        names: their texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.content}
        flagged = {name for name, token in self._added.items() if token.special or _BARS.fullmatch(name)}
        names = flagged | {name for name in tokenizer.all_special_tokens if name}
        # A tokenizer that is set to split its special tokens makes none of any text.
        self.names: Sequence[str] = [] if tokenizer.split_special_tokens else sorted(names)
        self._found, self._any_added = _pattern(self.names), _pattern([*self.names, *self._added])
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        unknown = {tokenizer.unk_token, getattr(model, "unk_token", None)}  # any text may hold what it stands for
        self._control_ids = {tokenizer.convert_tokens_to_ids(name) for name in self.names if name not in unknown}
        self._normalize, self._normalized = self._normalizer()

    def first_in(self, value: Any) -> str | None:
        """Return the first control token that a text, or a text anywhere in a message, spells; None: there is none."""
        text = "\0".join(_texts(value))
        if found := self._found.search(text):
            return found[0]
        return self._first_normalized(text)

    def spells_added(self, text: str) -> bool:
        """Whether a text spells any added token, control token or not."""
        return self._any_added.search(text) is not None

    def encode(self, value: Any, write: Callable[[Any], str], *, written: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of what is written of a value in which data spells control tokens; there they are text.

        Args:
            value: what the data has: a string, or dicts and lists with strings in them.
            write: makes the text of such a value; the control tokens that it adds are tokens.
            written: `write(value)`.
            add_special_tokens: whether the tokenizer adds its own around the text.

        Raises:
            ControlTokenError: there are no such ids.
        """
        value, spelled = self._marked(value)
        marked = _Marked(write(value), spelled)
        if marked.restored() != written:
            raise ControlTokenError("the chat template writes other text for it than for other characters")
        return self._ids_of(marked, add_special_tokens=add_special_tokens)

    def _marked(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Put stand-ins for control tokens into a value; returns it, and what the data has in the place of each."""
        text = "\0".join(_texts(value))
        if _PRIVATE.search(text):
            raise ControlTokenError("the text also has characters of private use, U+F0000 or beyond")
        names = sorted({found[0] for found in self._found.finditer(text)})
        marks = {name: chr(_STAND_INS + number) for number, name in enumerate(names)}
        marked = _mapped(value, lambda text: self._found.sub(lambda found: marks[found[0]], text))
        if name := self._first_normalized("\0".join(_texts(marked))):
            raise ControlTokenError(f"the tokenizer's normalisation makes {name} of other text")
        return marked, {mark: name for name, mark in marks.items()}

    def _ids_of(self, marked: _Marked, *, add_special_tokens: bool) -> list[int]:
        ordinary = self._tokenizer(
            marked.text, add_special_tokens=add_special_tokens, truncation=False, padding=False, verbose=False
        )["input_ids"]
        named = _Marked(self._any_added.sub(self._renamed, marked.text), marked.spelled)
        encode = functools.partial(self._encode_named, add_special_tokens=add_special_tokens)
        if encode(named.text) != ordinary:
            raise ControlTokenError("the tokenizer reads the text around it in a way that cannot be kept")
        ids = encode(named.restored())
        if self._control(ids) != self._control(ordinary):
            raise ControlTokenError("the tokenizer's vocabulary holds it as a word as well")
        return ids

    def _encode_named(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text that has its control tokens under their names in the copy."""
        if self._tokenizer.is_fast:
            tokenizer, ids = self._copy
            found = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return [ids.get(id, id) for id in found]
        found = []
        for number, piece in enumerate(_NAMED.split(text)):  # text, number, text, number, ..., text
            if number % 2:
                found.append(self._tokenizer.convert_tokens_to_ids(self.names[int(piece)]))
            elif piece:
                found += self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return self._tokenizer.build_inputs_with_special_tokens(found) if add_special_tokens else found

    @functools.cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer with other names for its control tokens, and the id of each such name's control token."""
        from tokenizers import AddedToken, Tokenizer

        try:
            spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        except Exception as error:  # parts in Python have no such form
            raise ControlTokenError(f"the tokenizer cannot be copied ({error})") from None
        for token in spec["added_tokens"]:
            token["special"] = token["content"] in self.names
        made = Tokenizer.from_str(json.dumps(spec | {"truncation": None, "padding": None}))
        for number, name in enumerate(self.names):
            like = self._added.get(name, AddedToken(name, normalized=False))
            flags = {flag: getattr(like, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            made.add_tokens([AddedToken(_NAME.format(number), special=False, **flags)])
        made.encode_special_tokens = True  # the names of special tokens are text
        known = self._tokenizer.convert_tokens_to_ids(self.names)
        own: Any = made.token_to_id
        return made, {own(_NAME.format(number)): id for number, id in enumerate(known)}

    def _renamed(self, found: re.Match[str]) -> str:
        return _NAME.format(self.names.index(found[0])) if found[0] in self.names else found[0]

    def _control(self, ids: Iterable[int]) -> list[int]:
        return [id for id in ids if id in self._control_ids]

    def _normalizer(self) -> tuple[Callable[[str], str] | None, re.Pattern[str]]:
        """The normalisation after which some control tokens are looked for, if any are, and a pattern of those."""
        own: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        normalize = own.normalizer.normalize_str if own is not None and own.normalizer is not None else None
        late = [name for name in self.names if name in self._added and self._added[name].normalized]
        if normalize is None or not late:
            return None, _pattern([])
        return normalize, _pattern([normalize(name) for name in late])

    def _first_normalized(self, text: str) -> str | None:
        found = self._normalize and self._normalized.search(self._normalize(text))
        return found[0] if found else None


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Match any of these texts, the longest first, as tokenizers do; nothing where there are none."""
    ordered = sorted({*names}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else "(?!)")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(part, change) for part in value]
    return value
