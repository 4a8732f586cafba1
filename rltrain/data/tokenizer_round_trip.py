"""Detection of tokenizers that lose text: each text is encoded, decoded and compared with the original."""

import unicodedata
from collections.abc import Iterable
from typing import Any

_LONGEST = 10_000  # Only the first 10,000 characters of each text are compared.
_SHOWN = 24  # Number of characters that a message shows on each side of a difference between two texts.


def loss(texts: Iterable[str], tokenizer: Any) -> tuple[int, str] | None:
    """Return the index of the first text that the tokenizer damages, and a description of the damage.

    The following differences between a text and its decoded form do not count as damage: case, accents, the Unicode
    form of characters, the amount of white space, and changes by the tokenizer's own normalizer. A tokenizer damages a
    text in any of the following cases:

    - In the decoded text, characters other than white space are missing, or differ by more than case, accents or
      Unicode form.
    - In the decoded text, white space between two letters or digits is missing.
    - No decoded text has white space between words, although at least one original text has.

    Args:
        texts: the texts to check, which must not contain names of added tokens.
        tokenizer: the Hugging Face tokenizer to check.

    Returns:
        A pair (index of the damaged text, description of the damage), or None if the tokenizer damages no text.
    """
    # Index of the first text whose decoded text has lost all white space between words, and a description of this
    # damage.
    gone: tuple[int, str] | None = None
    kept = False  # True if at least one decoded text has white space between words.
    for number, text in enumerate(text[:_LONGEST] for text in texts):
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if back == text:
            kept = kept or bool(_gaps(_plain(text))[1])
            continue
        found, ends = _gaps(_plain(back))
        originals = [_gaps(_plain(form)) for form in (text, _normalized(text, tokenizer))]
        same = [gaps for characters, gaps in originals if characters == found]
        if not same or any(at not in ends and found[at - 1 : at + 1].isalnum() for at in same[0]):
            return number, _difference(text, back)
        if ends:
            kept = True
        elif originals[0][1] and gone is None:
            gone = number, _difference(text, back)
    return None if kept else gone


def _plain(text: str) -> str:
    """Return the case-folded text in Unicode form NFKD without accents, with a space for each "▁" of SentencePiece."""
    decomposed = unicodedata.normalize("NFKD", text.replace("▁", " ")).casefold()
    return "".join(character for character in decomposed if unicodedata.category(character) != "Mn")


def _gaps(text: str) -> tuple[str, set[int]]:
    """Return the text without white space, and the positions in the shortened text at which white space was removed.

    No positions are returned for white space at the start and at the end of the text.
    """
    words = text.split()
    ends = [0]
    for word in words:
        ends.append(ends[-1] + len(word))
    return "".join(words), set(ends[1:-1])


def _normalized(text: str, tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return text if backend is None or backend.normalizer is None else backend.normalizer.normalize_str(text)


def _difference(text: str, back: str) -> str:
    """Describe the first difference between two texts, together with the text around the difference. White space at the
    start and at the end of the texts is ignored.
    """
    text, back = text.strip(), back.strip()
    at = 0
    while at < min(len(text), len(back)) and text[at] == back[at]:
        at += 1
    start = max(0, at - _SHOWN)
    return f"{_around(text, start, at)} comes back as {_around(back, start, at)}"


def _around(text: str, start: int, at: int) -> str:
    more = "..." if len(text) > at + _SHOWN else ""
    return repr(("..." if start else "") + text[start : at + _SHOWN] + more)
