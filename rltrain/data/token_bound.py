"""A lower bound on the number of tokens in a text, computed without tokenizing the text.

The lower bound is computed by counting characters, because tokenizing megabytes of text takes minutes.
"""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

SHORT = 100_000  # For texts of at most 100,000 characters, no bound is computed, because tokenizing such texts is fast.
# Names of pre-tokenizers that keep every character.
_LOSSLESS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
# Names of pre-tokenizers that drop only white space.
_LOSES_SPACE = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
# Names of pre-tokenizers that keep every character unless their `behavior` is "Removed".
_SPLITS = ("Split", "Punctuation")


@dataclass(frozen=True)
class _Counting:
    """How the units (characters or bytes) of a text are counted, and how many units one token can cover.

    Attributes:
        longest: largest number of units (characters or bytes) that one token can cover.
        units: function that returns the number of units (characters or bytes) that a character adds to a text's length.
        normalize: function that applies the tokenizer's normalizer to a text.
    """

    longest: int
    units: Callable[[str], int]
    normalize: Callable[[str], str]


class TokenBound:
    """Computes a lower bound on the number of tokens in a text.

    A token covers a piece of the normalized text, and no piece is longer than the longest vocabulary entry. A text of n
    characters has at least n / L tokens if the longest vocabulary entry has L characters. The lower bound must never
    exceed the true number of tokens, so `TokenBound` does not count the following parts of a text:

    - A character that is not in the vocabulary is not counted, because the tokenizer may drop such a character or merge
      several such characters into one unknown token.
    - White space is not counted if any part of the tokenizer drops white space.
    - Beginning-of-sequence (BOS) tokens at the start of the text are not counted, because the prompt encoder keeps only
      one BOS token.

    The lower bound is 0 if one token can cover any text (word-level and WordPiece tokenizers), or if the type of the
    tokenizer's pre-tokenizer is not known to this module.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def least(self, text: str) -> int:
        """Return a lower bound on the number of tokens in a text.

        The lower bound is 0 if the text has at most `SHORT` characters, or if no positive bound is known for the
        tokenizer.
        """
        counting = self._counting if len(text) > SHORT else None
        if counting is None:
            return 0
        if bos := self._tokenizer.bos_token:
            text = text[re.match(rf"(?:\s*{re.escape(bos)})*", text).end() :]  # type: ignore[union-attr]
        counts = Counter(counting.normalize(text))
        return math.ceil(sum(number * counting.units(one) for one, number in counts.items()) / counting.longest)

    @functools.cached_property
    def _counting(self) -> _Counting | None:
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        try:
            spec = json.loads(backend.to_str()) if backend is not None else {}
        except Exception:  # A tokenizer with a component written in Python cannot be serialized.
            return None
        splitters, model = _flat(spec.get("pre_tokenizer"), "pretokenizers"), spec.get("model", {})
        if model.get("type") not in ("BPE", "Unigram") or not all(map(_keeps_all_but_space, splitters)):
            return None
        kinds, added = {part["type"] for part in splitters}, spec["added_tokens"]
        in_bytes = "ByteLevel" in kinds
        normalize = backend.normalizer.normalize_str if backend.normalizer is not None else str
        names = [name for token in added for name in (token["content"], normalize(token["content"]))]
        vocab = backend.get_vocab(with_added_tokens=False)
        longest = max([len(name) for name in vocab] + [len(name.encode()) if in_bytes else len(name) for name in names])
        strips = not kinds.isdisjoint(_LOSES_SPACE) or any(token["lstrip"] or token["rstrip"] for token in added)
        fallback = bool(model.get("byte_fallback"))
        return _Counting(longest, functools.partial(_units, vocab, in_bytes, fallback, strips), normalize)


def _flat(part: Any, inner: str) -> list[dict[str, Any]]:
    """Return a flat list of the components in one part of a tokenizer, such as its pre-tokenizer, even if the part
    contains nested sequences. Return an empty list if `part` is None, for example if a tokenizer has no pre-tokenizer.
    """
    if part is None:
        return []
    return [found for one in part[inner] for found in _flat(one, inner)] if part["type"] == "Sequence" else [part]


def _keeps_all_but_space(part: dict[str, Any]) -> bool:
    kind = part["type"]
    return kind in _LOSSLESS or kind in _LOSES_SPACE or (kind in _SPLITS and part.get("behavior") != "Removed")


def _units(vocab: Collection[str], in_bytes: bool, fallback: bool, strips: bool, character: str) -> int:
    """Return the number of units (characters or bytes) that one character adds to the length of a text.

    The number of units is 0 for a character that the tokenizer may drop or may merge with other characters.
    """
    if strips and character.isspace():
        return 0
    if in_bytes:
        return sum(name in vocab for name in _visible(character))
    if character in vocab:
        return 1
    return int(fallback and all(f"<0x{byte:02X}>" in vocab for byte in character.encode()))


def _visible(character: str) -> str:
    """Return the text with which byte-level tokenizers represent a character: one printable character for each byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    ((visible, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)
    return visible
