"""Encoding of prompts in which the name of a control token, such as `<|im_end|>`, is treated as ordinary text.

A tokenizer encodes the name of a control token as the control token itself wherever the name occurs, even in a user's
text. Without special handling, a chat message that contains the name of a control token could end its own turn of the
chat or open another turn. If the data contains no control-token name, the tokenizer is used unchanged. If the data
contains a control-token name, encoding has three steps:

1. Before the chat template is applied, placeholders (private-use Unicode characters) replace the control-token names in
   the data. Every control-token name in the template's output then comes from the template itself.
2. In a copy of the tokenizer, each control token is renamed to a string of private-use characters. In the output of the
   chat template, each control-token name is replaced by the private-use name of the same token, and each placeholder by
   the control-token name from the data. The copy of the tokenizer recognizes control tokens only by their private-use
   names, and encodes the control-token names from the data as ordinary text.
3. The token ids are checked in two ways. First, the original tokenizer and the copy with renamed control tokens both
   encode the template's output with placeholders, and must return the same token ids. Second, the token ids of the
   template's output must contain the same sequence of control tokens with placeholders as with the control-token names
   from the data. A `ControlTokenError` is raised if a check of the token ids fails.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Names such as <|user|> count as control tokens even if the tokenizer does not flag them as special.
_BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
# Unicode characters for private use serve as placeholders, and as names of control tokens in the copy of the tokenizer.
_PRIVATE = re.compile("[\U000f0000-\U000fffff]")
_STAND_INS = 0xF0000
_NAME = "\U000ffff0{}\U000ffff1"
_NAMED = re.compile(_NAME.format(r"(\d+)"))


class ControlTokenError(ValueError):
    """Raised if the control-token names in a text cannot be encoded as ordinary text.

    The message of a `ControlTokenError` says why the text cannot be encoded.
    """


@dataclass(frozen=True)
class _Marked:
    """A text from the data, in which placeholders (private-use characters) replace the names of control tokens.

    Attributes:
        text: the text from the data, with placeholders. Each placeholder is one private-use character.
        spelled: maps each placeholder to the control-token name that the placeholder replaces.
    """

    text: str
    spelled: Mapping[str, str]

    def restored(self) -> str:
        """Return the text with the original control-token names instead of the placeholders."""
        return self.text.translate({ord(mark): name for mark, name in self.spelled.items()})


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and added tokens of the form `<|...|>`.

    An added token that is neither special nor of the form `<|...|>`, such as `<think>`, is not a control token. The
    text `<think>` in a prompt is encoded as the added token `<think>`.

    Attributes:
        names: names of the control tokens, such as `<|im_end|>`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.content}
        flagged = {name for name, token in self._added.items() if token.special or _BARS.fullmatch(name)}
        names = flagged | {name for name in tokenizer.all_special_tokens if name}
        # With split_special_tokens, the tokenizer never turns text into a control token.
        self.names: Sequence[str] = [] if tokenizer.split_special_tokens else sorted(names)
        self._found, self._any_added = _pattern(self.names), _pattern([*self.names, *self._added])
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        # The unknown token does not count as a control token, because ordinary text can be encoded as the unknown
        # token.
        unknown = {tokenizer.unk_token, getattr(model, "unk_token", None)}
        self._control_ids = {tokenizer.convert_tokens_to_ids(name) for name in self.names if name not in unknown}
        self._normalize, self._normalized = self._normalizer()

    def first_in(self, value: Any) -> str | None:
        """Return the first control-token name that occurs in a text, or in any string of a message; None if no
        control-token name occurs.
        """
        text = "\0".join(_texts(value))
        if found := self._found.search(text):
            return found[0]
        return self._first_normalized(text)

    def spells_added(self, text: str) -> bool:
        """Return whether a text contains the name of any added token or control token."""
        return self._any_added.search(text) is not None

    def encode(self, value: Any, write: Callable[[Any], str], *, written: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt, with the control-token names in the data encoded as ordinary text.

        Args:
            value: the prompt from the data: a string, or dicts and lists that contain strings.
            write: function that converts `value` to the text to encode, e.g. with a chat template. Control-token names
                in the text that do not come from `value`, but from the chat template, are encoded as control tokens.
            written: the text that `write(value)` returned.
            add_special_tokens: whether the tokenizer adds its own special tokens around the text.

        Raises:
            ControlTokenError: the control-token names in the data cannot be encoded as ordinary text.
        """
        value, spelled = self._marked(value)
        marked = _Marked(write(value), spelled)
        if marked.restored() != written:
            raise ControlTokenError("the chat template renders control-token names differently from other text")
        return self._ids_of(marked, add_special_tokens=add_special_tokens)

    def _marked(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Replace the control-token names in a string, dict or list with placeholders (private-use characters).

        Returns:
            The string, dict or list with placeholders, and a map from each placeholder to the control-token name that
            the placeholder replaces.
        """
        text = "\0".join(_texts(value))
        if _PRIVATE.search(text):
            raise ControlTokenError("the text also contains private-use characters (U+F0000 or above)")
        names = sorted({found[0] for found in self._found.finditer(text)})
        marks = {name: chr(_STAND_INS + number) for number, name in enumerate(names)}
        marked = _mapped(value, lambda text: self._found.sub(lambda found: marks[found[0]], text))
        if name := self._first_normalized("\0".join(_texts(marked))):
            raise ControlTokenError(f"the tokenizer's normalization turns other text into the name {name}")
        return marked, {mark: name for name, mark in marks.items()}

    def _ids_of(self, marked: _Marked, *, add_special_tokens: bool) -> list[int]:
        ordinary = self._tokenizer(
            marked.text, add_special_tokens=add_special_tokens, truncation=False, padding=False, verbose=False
        )["input_ids"]
        named = _Marked(self._any_added.sub(self._renamed, marked.text), marked.spelled)
        encode = functools.partial(self._encode_named, add_special_tokens=add_special_tokens)
        if encode(named.text) != ordinary:
            raise ControlTokenError("the token ids of the text around the control-token name would change")
        ids = encode(named.restored())
        if self._control(ids) != self._control(ordinary):
            raise ControlTokenError("the tokenizer's vocabulary also contains the control-token name as ordinary text")
        return ids

    def _encode_named(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text in which each control token is written as a name made of private-use characters."""
        if self._tokenizer.is_fast:
            tokenizer, ids = self._copy
            found = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return [ids.get(id, id) for id in found]
        found = []
        # `_NAMED.split` returns ordinary text and indices of control tokens alternately, starting and ending with text.
        for number, piece in enumerate(_NAMED.split(text)):
            if number % 2:
                found.append(self._tokenizer.convert_tokens_to_ids(self.names[int(piece)]))
            elif piece:
                found += self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return self._tokenizer.build_inputs_with_special_tokens(found) if add_special_tokens else found

    @functools.cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """A copy of the tokenizer in which control tokens have private-use characters as names, and a map from the ids
        of control tokens in the copy to their original ids.
        """
        from tokenizers import AddedToken, Tokenizer

        try:
            spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        except Exception as error:  # A tokenizer with a component written in Python cannot be serialized.
            raise ControlTokenError(f"the tokenizer cannot be copied ({error})") from None
        for token in spec["added_tokens"]:
            token["special"] = token["content"] in self.names
        made = Tokenizer.from_str(json.dumps(spec | {"truncation": None, "padding": None}))
        for number, name in enumerate(self.names):
            like = self._added.get(name, AddedToken(name, normalized=False))
            flags = {flag: getattr(like, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            made.add_tokens([AddedToken(_NAME.format(number), special=False, **flags)])
        # With `encode_special_tokens`, the copied tokenizer encodes the names of special tokens as ordinary text.
        made.encode_special_tokens = True
        known = self._tokenizer.convert_tokens_to_ids(self.names)
        own: Any = made.token_to_id
        return made, {own(_NAME.format(number)): id for number, id in enumerate(known)}

    def _renamed(self, found: re.Match[str]) -> str:
        return _NAME.format(self.names.index(found[0])) if found[0] in self.names else found[0]

    def _control(self, ids: Iterable[int]) -> list[int]:
        return [id for id in ids if id in self._control_ids]

    def _normalizer(self) -> tuple[Callable[[str], str] | None, re.Pattern[str]]:
        """Return the tokenizer's normalizer, and a pattern that matches the normalized names of control tokens.

        The pattern contains the names of only those control tokens that the tokenizer searches for in normalized text.
        If the tokenizer searches for no control token in normalized text, `_normalizer` returns None in place of the
        tokenizer's normalizer.
        """
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
    """Return a pattern that matches any of the given names and, like a tokenizer, prefers longer names to shorter
    names.

    If `names` is empty, `_pattern` returns a pattern that matches nothing.
    """
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
