"""Search for stop strings in the text of answers, which is the same for all engines.

vLLM has an option `stop` of its own, which is not used. With one search for all engines, an answer of the same tokens
has the same end and the same text under every engine, and vLLM needs no tokenizer, which could decode in another way.
"""

from collections.abc import Sequence
from typing import Any

MARGIN = 8  # tokens before the longest stop string that are decoded too, because decoders may change the first ones
INCOMPLETE = "\ufffd"  # what decoders write for a part of a character


def text_before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it, or the whole text if it has none."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class StopStrings:
    """The stop strings of a run, and the tokenizer with which they are searched for.

    An answer ends with the first token after which its text contains a stop string. The text of an answer is that of
    its sampled tokens without special tokens. The search gets all tokens of an answer each time, so it finds a stop
    string of which one part was sampled before a weight sync, and the other part after it.

    Args:
        stops: The stop strings, of which none is empty.
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Any) -> None:
        self.stops, self.tokenizer = list(stops), tokenizer
        self.last_characters = {stop[-1] for stop in stops} | {INCOMPLETE}
        # Every token that adds text adds at least one byte of it.
        self.window = max(len(stop.encode()) for stop in stops) + MARGIN
        self.texts: dict[int, str] = {}  # text of single tokens

    def end(self, ids: Sequence[int]) -> bool:
        """Return whether the last token of an answer completes a stop string.

        Args:
            ids: Token ids of the answer so far. No earlier token has completed a stop string.
        """
        if not self.may_end(ids[-1]):
            return False
        return self._found(self._tail(ids)) and self._found(ids)

    def may_end(self, token: int) -> bool:
        """Return False if a token can complete no stop string, whatever precedes it.

        A token that ends a stop string has the string's last character, or a part of it. Decoders drop spaces at the
        start of a text, so a space need not be seen in the text of a single token.
        """
        return " " in self.last_characters or not self.last_characters.isdisjoint(self._text(token))

    def _text(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = self._decoded([token])
        return self.texts[token]

    def _tail(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the last tokens, of which as many add text as the longest stop string has bytes, and a margin."""
        missing = self.window
        for start in range(len(ids) - 1, -1, -1):
            missing -= self._text(ids[start]) != ""
            if not missing:
                return ids[start:]
        return ids

    def _found(self, ids: Sequence[int]) -> bool:
        text = self._decoded(ids)
        return any(stop in text for stop in self.stops)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def stop_strings(stops: Sequence[str], path: str) -> StopStrings | None:
    """Return the search for stop strings with the tokenizer of a model directory, or None without stop strings."""
    if not stops:
        return None
    from transformers import AutoTokenizer  # a heavy import, which runs without stop strings need not wait for

    return StopStrings(stops, AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))
