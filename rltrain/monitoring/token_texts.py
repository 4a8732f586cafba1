"""The text of each token of a vocabulary, and the file `tokens.parquet` that stores the texts in a run's output folder.

With the file `tokens.parquet`, the token ids in the tables of samples can be turned into text without the tokenizer.
"""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TOKENS = "tokens.parquet"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def write_token_texts(tokenizer: Any, output_dir: Path) -> Path:
    """Write the table `tokens.parquet` with id, text and special-token flag of all tokens, and return the file's path.

    Args:
        tokenizer: the policy's tokenizer, from the library transformers.
        output_dir: output folder of the run; must exist.
    """
    texts, special = token_texts(tokenizer), special_ids(tokenizer)
    ids = list(range(len(texts)))
    table = pa.table({"id": ids, "text": texts, "special": [number in special for number in ids]})
    pq.write_table(table, output_dir / TOKENS)
    return output_dir / TOKENS


def read_token_texts(path: Path) -> tuple[list[str], set[int]]:
    """Read the texts of all tokens, and the ids of the special tokens, from a file `tokens.parquet`.

    Returns:
        A pair: the list of token texts, indexed by token id, and the set of the ids of special tokens.
    """
    table = pq.read_table(path)
    flags = table["special"].to_pylist()
    return table["text"].to_pylist(), {number for number, flag in enumerate(flags) if flag}


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokenizer's special tokens, such as the end-of-sequence token."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}


def token_texts(tokenizer: Any) -> list[str]:
    r"""Return a list of the texts of all tokens, indexed by token id.

    If a token begins with a space, the text of the token includes the space. Bytes of an incomplete UTF-8 character are
    written as `\xNN`. An id N that the vocabulary does not contain has the text `<id N>`.
    """
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    if "ByteLevel" in decoder:
        bytes_of = {character: byte for byte, character in enumerate(_byte_characters())}
        found = [_from_byte_level(piece, bytes_of) for piece in pieces]
    elif "WordPiece" in decoder:
        found = [piece and (piece[2:] if piece.startswith("##") else f" {piece}") for piece in pieces]
    else:
        found = [piece and _from_sentence_piece(piece) for piece in pieces]
    return [f"<id {number}>" if text is None else text for number, text in enumerate(found)]


def _byte_characters() -> str:
    """Return the 256 characters by which byte-level tokenizers represent the bytes 0 to 255.

    A byte that is the code of a visible Latin-1 character is represented by that character, and each other byte by a
    character from U+0100 upwards.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in visible else next(others)) for byte in range(256))


def _from_byte_level(piece: str | None, bytes_of: dict[str, int]) -> str | None:
    if piece is None or not all(character in bytes_of for character in piece):
        return piece  # The text of a token that was added to the vocabulary is not byte-level encoded.
    return _text(bytes(bytes_of[character] for character in piece))


def _from_sentence_piece(piece: str) -> str:
    if byte := _BYTE.fullmatch(piece):
        return _text(bytes([int(byte[1], 16)]))
    return piece.replace("▁", " ")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
