"""How many tokens a text has at least, found by counting characters: tokenising megabytes takes minutes."""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

SHORT = 100_000  # characters of a text that is simply tokenised
# Parts that split a text and lose nothing of it, or nothing but white space; Split and Punctuation where they say so.
_LOSSLESS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_LOSES_SPACE = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
_SPLITS = ("Split", "Punctuation")


@dataclass(frozen=True)
class _Counting:
    """What to count: a token covers at most `longest` of the characters that `units` counts."""

    longest: int
    units: Callable[[str], int]
    normalize: Callable[[str], str]


class TokenBound:
    """A lower bound for the number of tokens of a text.

    Each token covers a piece of the normalised text that is at most as long as the longest entry of the vocabulary, so
    n characters have at least n / longest tokens. Not counted are characters that may have no token of their own:

    - those that are no entry of the vocabulary (the tokenizer may drop them, or make one unknown token of many),
    - white space, where a part of the tokenizer drops it,
    - begin tokens at the start, of which one is kept.

    There is no bound for tokenizers that may make one token of any text (word level, WordPiece), or that have parts
    which are not known here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def least(self, text: str) -> int:
        """Return a number of tokens that the text has at least; 0 where it is short, or nothing is known."""
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
        except Exception:  # a part in Python has no such form
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
    """The parts of a sequence of parts, or the one part there is."""
    if part is None:
        return []
    return [found for one in part[inner] for found in _flat(one, inner)] if part["type"] == "Sequence" else [part]


def _keeps_all_but_space(part: dict[str, Any]) -> bool:
    kind = part["type"]
    return kind in _LOSSLESS or kind in _LOSES_SPACE or (kind in _SPLITS and part.get("behavior") != "Removed")


def _units(vocab: Collection[str], in_bytes: bool, fallback: bool, strips: bool, character: str) -> int:
    """How many units a character counts: 0 if the tokenizer may drop it or run it together with others."""
    if strips and character.isspace():
        return 0
    if in_bytes:
        return sum(name in vocab for name in _visible(character))
    if character in vocab:
        return 1
    return int(fallback and all(f"<0x{byte:02X}>" in vocab for byte in character.encode()))


def _visible(character: str) -> str:
    """The characters that byte-level tokenizers write for the bytes of a character."""
    from tokenizers.pre_tokenizers import ByteLevel

    ((visible, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)
    return visible
