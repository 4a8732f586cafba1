"""Softmax over a vocabulary, forward and backward, without ever holding all logits: chunks of (positions, words)."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.algorithms.ratio import as_float

LEAST_LOG = -1e4  # its exp is 0 in every type; what is clamped to it can be multiplied by 0, which -inf cannot
MAX_ROWS = 2048  # more rows make the matrix products no faster, and a chunk narrower
# Numbers in one chunk, by kind of device. On a CPU a chunk stays in the cache between the few passes over it; elsewhere
# products must be large enough to hide the launches of kernels.
CHUNK_SIZES = {"cpu": 2**21}
OTHER_CHUNK_SIZE = 2**26


def default_chunk_size(device: torch.device) -> int:
    """How many logits one chunk has on this device unless a caller says otherwise."""
    return CHUNK_SIZES.get(device.type, OTHER_CHUNK_SIZE)


def chunks(positions: int, words: int, size: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of chunks of at most `size` logits that cover a (positions, words) matrix.

    All rows of some columns come before the next columns, so that each row of the head is read once.
    """
    height = max(1, min(positions, MAX_ROWS, size))
    width = max(1, min(words, size // height))
    for column in range(0, words, width):
        for row in range(0, positions, height):
            yield slice(row, min(row + height, positions)), slice(column, min(column + width, words))


def logits(hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(rows, H) by (columns, H) to a new (rows, columns), over the temperature.

    The product has the type of its factors, as a model's last layer has it; what follows is at least float32.
    """
    product = as_float(F.linear(hidden, head, bias))
    return product if temperature == 1 else product.div_(temperature)


class RunningSoftmax:
    """Of each position, the sum of exp(logit) and a mean under the softmax, while columns arrive chunk by chunk.

    Sums are kept relative to the largest logit so far and rescaled when a larger one arrives. The mean is that of
    `values`, and where there are none, of the distance to the largest logit. A word of probability 0, such as one whose
    logit is -inf, adds exactly 0 to it, whatever its value.
    """

    def __init__(self, hidden: Tensor, *, with_mean: bool) -> None:
        self.with_mean = with_mean
        self.top = torch.full((len(hidden),), torch.finfo(torch.float32).min, device=hidden.device)
        self.top = self.top.to(as_float(hidden[:0]).dtype)
        self.total, self.weighted = torch.zeros_like(self.top), torch.zeros_like(self.top)

    def add(self, rows: slice, chunk: Tensor, values: Tensor | None = None) -> None:
        """Take in the logits of a chunk, which are overwritten, and its `values`, which are too."""
        before = self.top[rows]
        top = torch.maximum(before, chunk.amax(-1))
        fade = (before - top).exp_()
        distance = chunk.sub_(top[:, None])
        share = distance.exp() if self.with_mean else distance.exp_()
        if self.with_mean and values is None:
            moved = self.total[rows] * (before - top)
            products = distance.clamp_(min=LEAST_LOG).mul_(share)
            self.weighted[rows] = fade * (self.weighted[rows] + moved) + products.sum(-1)
        elif values is not None:
            products = values.mul_(share).masked_fill_(share == 0, 0)
            self.weighted[rows] = fade * self.weighted[rows] + products.sum(-1)
        self.total[rows] = fade * self.total[rows] + share.sum(-1)
        self.top[rows] = top

    @property
    def log_sum(self) -> Tensor:
        """(R,) log sum exp of all logits."""
        return self.top + self.total.log()

    @property
    def mean(self) -> Tensor:
        """(R,) of the values under the softmax."""
        return self.weighted / self.total


class GradientSums:
    """Gradients of hidden (R, H), head (V, H) and bias (V,), from those of the logits of one chunk after another.

    Narrower types are summed in float32 and rounded once. What is not `wanted` is None and costs nothing.
    """

    def __init__(self, hidden: Tensor, head: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self.hidden, self.head = hidden, head
        self.type = as_float(hidden[:0]).dtype
        self.to_hidden = torch.zeros_like(hidden, dtype=self.type) if wanted[0] else None
        self.to_head = torch.zeros_like(head) if wanted[1] else None
        self.to_bias = torch.zeros_like(bias, dtype=self.type) if bias is not None and wanted[2] else None
        self.part = torch.empty(0)

    def add(self, rows: slice, columns: slice, to_logits: Tensor) -> None:
        """Take in a chunk's gradient (rows, columns), the chunks in the order of `chunks`."""
        if self.to_bias is not None:
            self.to_bias[columns] += to_logits.sum(0)
        narrow = to_logits.to(self.head.dtype)
        if self.to_hidden is not None:
            _add_product(self.to_hidden[rows], narrow, self.head[columns])
        if self.to_head is not None:
            if rows.start == 0:
                same = self.to_head.dtype == self.type
                self.part = self.to_head[columns] if same else torch.zeros_like(self.head[columns], dtype=self.type)
            _add_product(self.part, narrow.T, self.hidden[rows])
            if rows.stop == len(self.hidden) and self.part.dtype != self.to_head.dtype:
                self.to_head[columns] = self.part

    @property
    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden, head and bias, each in the type of what it belongs to."""
        to_hidden = None if self.to_hidden is None else self.to_hidden.to(self.hidden.dtype)
        return to_hidden, self.to_head, None if self.to_bias is None else self.to_bias.to(self.head.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
