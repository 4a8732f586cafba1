"""Forward and backward pass of a softmax over a vocabulary, in chunks of a matrix of logits (positions, vocabulary)."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.algorithms.ratio import as_float

LEAST_LOG = -1e4  # Finite replacement for -inf: exp(LEAST_LOG) is 0 in every dtype, and 0 * LEAST_LOG is 0, not NaN.
# Largest number of rows (positions) in a chunk of logits. More than 2048 rows per chunk would not make the matrix
# product faster, and would allow fewer columns per chunk.
MAX_ROWS = 2048
# Number of logits per chunk, by device type. On a CPU, a chunk must fit into the cache, because the computation reads
# the chunk several times. On a device other than a CPU, the matrix products must be large enough to hide the kernel
# launch overhead.
CHUNK_SIZES = {"cpu": 2**21}
OTHER_CHUNK_SIZE = 2**26


def default_chunk_size(device: torch.device) -> int:
    """Return the default number of logits in one chunk for the type of `device`."""
    return CHUNK_SIZES.get(device.type, OTHER_CHUNK_SIZE)


def chunks(positions: int, words: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (rows, columns) that split logits (positions, vocabulary) into chunks of at most `size` logits.

    All chunks with the same columns (vocabulary entries) are yielded in succession, so that the computation reads each
    weight of the language-model head only once.
    """
    height = max(1, min(positions, MAX_ROWS, size))
    width = max(1, min(words, size // height))
    for column in range(0, words, width):
        for row in range(0, positions, height):
            yield slice(row, min(row + height, positions)), slice(column, min(column + width, words))


def logits(
    hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float, softcap: float | None = None
) -> Tensor:
    """Compute logits (rows, columns) in a new tensor, from hidden states (rows, H) and head weights (columns, H).

    A soft cap c replaces each logit z by c * tanh(z / c). The logits are then divided by the temperature. The matrix
    product is computed in the dtype of its factors, as in a model's last layer. The function `logits` returns float64
    if the matrix product is float64, and float32 otherwise.
    """
    product = as_float(F.linear(hidden, head, bias))
    if softcap is not None:
        product = product.div_(softcap).tanh_().mul_(softcap)
    return product if temperature == 1 else product.div_(temperature)


def cap_slope(capped: Tensor, temperature: float, softcap: float) -> Tensor:
    """Return the derivative (rows, columns) of the soft cap c at each logit z, given `capped` = c * tanh(z / c) / T."""
    return 1 - (capped * (temperature / softcap)).square_()


class RunningSoftmax:
    """Accumulates the softmax denominator and a softmax-weighted mean for each position, over chunks of the vocabulary.

    Each sum is accumulated relative to the largest logit added so far, and is rescaled when a larger logit is added. If
    `add` gets `values`, the property `mean` is the softmax-weighted mean of `values`. If `add` gets no `values`, the
    property `mean` is the softmax-weighted mean of the differences between the logits and the largest logit. A
    vocabulary entry of probability 0, such as an entry with logit -inf, contributes exactly 0 to the mean, even if its
    value in `values` is inf or NaN.
    """

    def __init__(self, hidden: Tensor, *, with_mean: bool) -> None:
        self.with_mean = with_mean
        self.top = torch.full((len(hidden),), torch.finfo(torch.float32).min, device=hidden.device)
        self.top = self.top.to(as_float(hidden[:0]).dtype)
        self.total, self.weighted = torch.zeros_like(self.top), torch.zeros_like(self.top)

    def add(self, rows: slice, chunk: Tensor, values: Tensor | None = None) -> None:
        """Add a chunk of logits to the running sums. The tensors `chunk` and `values` are overwritten.

        Args:
            rows: the positions whose logits are in the chunk.
            chunk: logits (rows, columns) of the positions `rows` for some vocabulary entries.
            values: tensor (rows, columns) with one value for each logit in `chunk`, or None. If `values` is given, the
                property `mean` is the softmax-weighted mean of `values` for each position.
        """
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
        """Return the log-sum-exp over all logits passed to `add` so far, for each of the R positions, as (R,)."""
        return self.top + self.total.log()

    @property
    def mean(self) -> Tensor:
        """Return the softmax-weighted mean over all chunks passed to `add` so far for each of the R positions: (R,)."""
        return self.weighted / self.total


class GradientSums:
    """Accumulates the gradients of hidden (R, H), head (V, H) and bias (V,) from the logit gradients of all chunks.

    Gradients in types narrower than float32 are summed in float32 and rounded once. `wanted` says which of the three
    gradients (hidden, head, bias) are computed; a gradient that is not computed is None.
    """

    def __init__(self, hidden: Tensor, head: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self.hidden, self.head = hidden, head
        self.type = as_float(hidden[:0]).dtype
        self.to_hidden = torch.zeros_like(hidden, dtype=self.type) if wanted[0] else None
        self.to_head = torch.zeros_like(head) if wanted[1] else None
        self.to_bias = torch.zeros_like(bias, dtype=self.type) if bias is not None and wanted[2] else None
        self.part = torch.empty(0)

    def add(self, rows: slice, columns: slice, to_logits: Tensor) -> None:
        """Add a chunk's contribution to the gradients, given the gradient (rows, columns) of the chunk's logits.

        Chunks must be added in the order in which the function `chunks` yields them.
        """
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
        """Return the gradients of the tensors `hidden`, `head` and `bias`.

        The gradient of `hidden` has the dtype of `hidden`. The gradients of `head` and `bias` have the dtype of `head`.
        """
        to_hidden = None if self.to_hidden is None else self.to_hidden.to(self.hidden.dtype)
        return to_hidden, self.to_head, None if self.to_bias is None else self.to_bias.to(self.head.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
