"""Prefix tree of token sequences, in which tokens at the start of several sequences occur once.

The rows of a prompt group all begin with the prompt's tokens, and each turn of a conversation begins with all tokens
of the earlier turns. A causal language model computes the same hidden states for equal beginnings. The prefix tree is
the basis for computing these hidden states only once (`workers.models.packed_forward`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rltrain.batch.jagged import offsets_of, ranges

# A common prompt is shared if it has at least SHORTEST_PROMPT tokens. Other common tokens are shared if there are at
# least LEAST of them.
SHORTEST_PROMPT, LEAST = 4, 16


@dataclass(eq=False)
class Segment:
    """A node of the prefix tree: consecutive tokens that belong to one sequence, or to several that begin alike.

    Attributes:
        first: index of the segment's first token in the concatenated sequences.
        length: number of tokens.
        depth: number of tokens of the segment's ancestors in the tree.
        parent: the segment that precedes this segment, or None if the segment starts its sequences.
        prompt: length of the prompt of the sequence with which the segment was inserted.
        children: the segments that follow this segment.
    """

    first: int
    length: int
    depth: int
    parent: "Segment | None"
    prompt: int
    children: "Siblings" = field(default_factory=lambda: Siblings())

    @property
    def end(self) -> int:
        """Return the number of tokens from the start of a sequence to the end of the segment."""
        return self.depth + self.length

    def path(self) -> list["Segment"]:
        """Return the segments from the start of a sequence to this segment."""
        above: list[Segment] = []
        segment: Segment | None = self
        while segment is not None:
            above.append(segment)
            segment = segment.parent
        return above[::-1]


class Siblings:
    """The segments with the same parent, or the segments without a parent, in order of insertion.

    The key of a segment is the bytes of its first tokens. A sequence can share the segment only if it continues with
    these tokens.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._places: dict[bytes, list[int]] = {}  # maps each key to the indices of its segments in the list
        self._sizes: set[int] = set()  # the different lengths of keys in bytes

    def put(self, place: int | None, key: bytes, segment: Segment) -> None:
        """Store a segment under a key, at the index `place`, or at the end if `place` is None."""
        if place is None:
            place = len(self._segments)
            self._segments.append(segment)
        else:
            self._segments[place] = segment
        places = self._places.setdefault(key, [])
        if place not in places:
            places.append(place)
        self._sizes.add(len(key))

    def alike(self, tokens: bytes) -> Iterator[tuple[int, Segment]]:
        """Yield (index, segment) for each key that is a prefix of `tokens`, the bytes of a sequence's next tokens."""
        for size in self._sizes:
            for place in self._places.get(tokens[:size], ()):
                yield place, self._segments[place]

    def last_first(self) -> list[Segment]:
        """Return the segments in reverse order of insertion."""
        return self._segments[::-1]


class PrefixTree:
    """The prefix tree of concatenated sequences.

    Each segment adds cost to the attention. Sequences therefore share a run of tokens only if it has at least `LEAST`
    tokens, is the rest of their prompt, is a whole segment of the tree, or is the whole rest of a sequence. A whole
    prompt is shared if it has at least `SHORTEST_PROMPT` tokens. Which tokens a sequence shares can depend on the
    sequences inserted before it. If some of those are left out, the sequence shares up to `LEAST` - 1 tokens fewer.

    Args:
        ids: (N,) int64 tokens of all sequences.
        lengths: (C,) number of tokens in each sequence.
        prompts: (C,) number of prompt tokens at the start of each sequence.

    Attributes:
        leaves: for each sequence, the segment that contains its last token; None for a sequence without tokens.
    """

    def __init__(self, ids: np.ndarray, lengths: Sequence[int], prompts: Sequence[int]) -> None:
        self._ids, self._roots = ids, Siblings()
        self.leaves: list[Segment | None] = []
        first = 0
        for length, prompt in zip(lengths, prompts, strict=True):
            self.leaves.append(self._insert(first, length, prompt))
            first += length

    def segments(self) -> Iterator[Segment]:
        """Yield all segments in depth-first order, parents before children and siblings in order of insertion."""
        waiting = self._roots.last_first()
        while waiting:
            segment = waiting.pop()
            yield segment
            waiting += segment.children.last_first()

    def _insert(self, first: int, length: int, prompt: int) -> Segment | None:
        """Insert the sequence of `length` tokens from `first` on, and return the segment that contains its end."""
        parent, siblings, depth = None, self._roots, 0
        while depth < length:
            tokens = self._ids[first + depth : first + min(length, depth + LEAST)].tobytes()
            best: tuple[int, bool] = 0, False
            place, found = None, None
            for number, segment in siblings.alike(tokens):
                shared = self._shared(segment, first + depth, length - depth, prompt - depth, depth)
                # If a sequence shares equally many tokens with two segments, the segment that it shares as a whole is
                # better, because further shared segments can follow.
                if shared and (shared, shared == segment.length) > best:
                    best, place, found = (shared, shared == segment.length), number, segment
            if found is None:
                segment = Segment(first + depth, length - depth, depth, parent, prompt)
                siblings.put(None, self._key(segment), segment)
                return segment
            if best[0] < found.length:
                found = self._divided(found, best[0])
                siblings.put(place, self._key(found), found)
            parent, siblings, depth = found, found.children, found.end
        return parent

    def _key(self, segment: Segment) -> bytes:
        """Return a segment's key: the bytes of the first tokens that a sequence must have to share the segment."""
        rest, size = segment.prompt - segment.depth, min(LEAST, segment.length)
        if rest > 0 and segment.prompt >= SHORTEST_PROMPT:
            size = min(size, rest)
        return self._ids[segment.first : segment.first + size].tobytes()

    def _shared(self, segment: Segment, first: int, length: int, prompt: int, depth: int) -> int:
        """Return how many tokens of a segment a sequence shares, or 0 if sharing is not worthwhile.

        Args:
            segment: the segment with which the sequence may go on.
            first: index of the sequence's first token that is not in the tree yet.
            length: number of tokens of the sequence from `first` on.
            prompt: number of these tokens that belong to the prompt; 0 or less if none does.
            depth: number of tokens of the sequence that are in the tree already.
        """
        most = min(segment.length, length)
        same = self._ids[segment.first : segment.first + most] == self._ids[first : first + most]
        equal = most if same.all() else int(same.argmin())
        if depth + equal < SHORTEST_PROMPT:
            return 0
        if equal == most:
            return equal
        if 0 < prompt <= equal < prompt + LEAST and depth + prompt >= SHORTEST_PROMPT:
            return prompt
        return equal if equal >= LEAST else 0

    def _divided(self, segment: Segment, tokens: int) -> Segment:
        """Divide a segment after its first `tokens` tokens, and return the new segment of these tokens.

        `segment` becomes the rest, so it is still the segment that contains the end of its sequences.
        """
        upper = Segment(segment.first, tokens, segment.depth, segment.parent, segment.prompt)
        segment.first += tokens
        segment.length -= tokens
        segment.depth += tokens
        segment.parent = upper
        upper.children.put(None, self._key(segment), segment)
        return upper


@dataclass(frozen=True)
class DistinctTokens:
    """The distinct tokens of concatenated sequences. A token that several sequences share occurs once.

    The distinct tokens are in the order of the segments of the prefix tree. Sequences keep their order if none of them
    shares tokens.

    Attributes:
        kept: (M,) index of each distinct token in the concatenated sequences.
        places: (N,) for each token of the concatenated sequences, its index among the distinct tokens.
        lengths: (S,) number of tokens in each segment.
        depths: (S,) number of tokens of each segment's ancestors.
        keys: (K,) for each segment, one after another, the indices of its ancestors' tokens and then of its own tokens.
            K is the sum of `depths` and `lengths`. None if no segment has ancestors.
    """

    kept: Tensor
    places: Tensor
    lengths: Tensor
    depths: Tensor
    keys: Tensor | None


def distinct_tokens(ids: Tensor, lengths: Tensor, prompts: Tensor) -> DistinctTokens:
    """Return the distinct tokens of the prefix tree of sequences.

    Args:
        ids: (N,) int64 tokens of all sequences, on the CPU.
        lengths: (C,) number of tokens in each sequence.
        prompts: (C,) number of prompt tokens at the start of each sequence.
    """
    tree = PrefixTree(ids.numpy(), lengths.tolist(), prompts.tolist())
    segments = list(tree.segments())
    own = _integers(segment.length for segment in segments)
    starts = dict(zip(segments, offsets_of(own).tolist(), strict=False))
    paths = {segment: segment.path() for segment in segments}

    def tokens_of(ends: Sequence[Segment | None]) -> Tensor:
        """Return the indices of the tokens on the paths to the given segments."""
        parts = [part for end in ends if end is not None for part in paths[end]]
        return ranges(_integers(starts[part] for part in parts), _integers(part.length for part in parts))

    depths = _integers(segment.depth for segment in segments)
    return DistinctTokens(
        ranges(_integers(segment.first for segment in segments), own),
        tokens_of(tree.leaves),
        own,
        depths,
        tokens_of(segments) if bool(depths.any()) else None,
    )


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
