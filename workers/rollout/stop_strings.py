"""Search for stop strings in answers, in the same way for all engines.

The rollout engines do not use vLLM's own option `stop`. Because all engines use the same search, the end and the text
of an answer depend only on the answer's tokens and not on the engine. Without the option `stop`, vLLM needs no
tokenizer. A tokenizer in vLLM might decode tokens differently than the tokenizer of `StopStrings`.
"""

from collections.abc import Sequence
from typing import Any

# Only the last tokens of an answer are decoded: the tokens that can form a stop string, and the MARGIN tokens before
# them, because decoders may change the first characters of a decoded text.
MARGIN = 8
INCOMPLETE = "\ufffd"  # Character that decoders write for an incomplete UTF-8 sequence.


def text_before(text: str, stops: Sequence[str]) -> str:
    """Return the part of the text before the first stop string, or the whole text if no stop string occurs."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class StopStrings:
    """Object that searches answers for the stop strings of a run, with the tokenizer of the model.

    An answer ends with the first token after which the answer's text contains a stop string. The text of an answer is
    decoded from its sampled tokens without special tokens. Each search receives all tokens of the answer, so a stop
    string is found even if its tokens were sampled partly before and partly after a weight sync.

    Args:
        stops: The stop strings, each of which must not be empty.
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Any) -> None:
        self.stops, self.tokenizer = list(stops), tokenizer
        self.last_characters = {stop[-1] for stop in stops} | {INCOMPLETE}
        # Each token that adds text adds at least one byte, so at most n tokens with text form a stop string of n bytes.
        self.window = max(len(stop.encode()) for stop in stops) + MARGIN
        self.texts: dict[int, str] = {}  # Maps each token id to the text of the token when it is decoded alone.

    def end(self, ids: Sequence[int]) -> bool:
        """Return whether the last token of an answer completes a stop string.

        Args:
            ids: Token ids of the answer so far. The caller ensures that no earlier token of the answer has completed a
                stop string.
        """
        if not self.may_end(ids[-1]):
            return False
        return self._found(self._tail(ids)) and self._found(ids)

    def may_end(self, token: int) -> bool:
        """Return False if a token cannot complete a stop string, whatever tokens precede it; otherwise return True.

        A token that completes a stop string contains the string's last character, or a part of this character. If the
        last character of a stop string is a space, `may_end` always returns True, because a decoder drops the space at
        the start of a token that is decoded alone.
        """
        return " " in self.last_characters or not self.last_characters.isdisjoint(self._text(token))

    def _text(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = self._decoded([token])
        return self.texts[token]

    def _tail(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the last tokens of an answer, enough to contain any stop string that the last token completes.

        `_tail` returns the shortest end of the answer that has `window` tokens whose text is not empty. `window` is
        the number of bytes in the longest stop string plus `MARGIN`. If fewer than `window` tokens of the answer have a
        text that is not empty, all tokens of the answer are returned.
        """
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
    """Return a `StopStrings` object with the tokenizer of the model directory `path`, or None if `stops` is empty."""
    if not stops:
        return None
    from transformers import AutoTokenizer  # Importing transformers is slow, and is needed only for stop strings.

    return StopStrings(stops, AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))
