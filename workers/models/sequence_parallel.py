"""Sequence parallelism: the ranks of a sequence group share out the tokens of each pack (Ulysses, arXiv:2309.14509).

Every rank of the group has the whole pack and computes its slice of the tokens in all that works token by token.
Attention needs all tokens of a row: before it, an all-to-all turns a slice of the tokens with all heads into all tokens
with a slice of the heads, and after it another one turns that back. What the model says of its slice of the response
tokens is gathered, so that every rank of the group computes the same loss; each one's backward pass goes through its
own slice only, so that the gradients of all ranks sum up to the whole and no token counts twice.
"""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from workers.models.packed_forward import Pack


@dataclass(frozen=True)
class Sequence:
    """A group of ranks that share the tokens of a pack, and this rank's place in it.

    Attributes:
        group: the process group.
        size: its ranks.
        rank: of this process in it.
        tokens: of the pack at hand, without filler; 0 where there is none.
    """

    group: Any
    size: int
    rank: int
    tokens: int = 0

    @property
    def slice(self) -> int:
        """Tokens of one rank's slice: filler makes all of them equally long."""
        return max(1, -(-self.tokens // self.size))


@functools.cache
def sequence_group(size: int) -> Sequence | None:
    """The group of `size` neighbouring ranks that this rank is in; None for 1. A collective, the first time."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size)
    return Sequence(group, size, dist.get_rank() % size)


def sequence_group_of(model: nn.Module) -> Sequence | None:
    """The ranks that share out a sharded model's tokens; None where each computes its own rows alone."""
    return getattr(model, "sequence", None)


def split(packed: "Pack", sequence: Sequence) -> tuple["Pack", Tensor]:
    """This rank's slice of a pack, and which of the R response tokens are predicted in it (R,) bool.

    Its rows, for attention, are those of the whole pack.
    """
    own = replace(sequence, tokens=packed.input_ids.size(1))
    begin, length = own.rank * own.slice, own.slice
    filler = (0, own.size * length - own.tokens)
    here = (packed.predicting >= begin) & (packed.predicting < begin + length)
    sliced = replace(
        packed,
        input_ids=F.pad(packed.input_ids, filler)[:, begin : begin + length],
        position_ids=F.pad(packed.position_ids, filler)[:, begin : begin + length],
        predicting=packed.predicting[here] - begin,
        targets=packed.targets[here],
        sequence=own,
    )
    return sliced, here


def heads_of_all_tokens(tensor: Tensor, sequence: Sequence) -> Tensor:
    """A slice of the tokens with all heads (1, H, n, D) -> all tokens with a slice of the heads (1, H', N, D).

    Heads fewer than ranks are repeated first: H' is 1 then.
    """
    heads = tensor.size(1)
    if heads % sequence.size:
        tensor = tensor.repeat_interleave(sequence.size // heads, dim=1)
    parts = tensor[0].unflatten(0, (sequence.size, -1))  # (ranks, H', n, D): part r goes to rank r
    received: Tensor = _AllToAll.apply(parts, sequence.group)  # type: ignore[no-untyped-call]  # (ranks, H', n, D): part r came from rank r
    return received.transpose(0, 1).flatten(1, 2)[None, :, : sequence.tokens]


def tokens_of_all_heads(tensor: Tensor, sequence: Sequence) -> Tensor:
    """All tokens with a slice of the heads (1, N, H', D) -> a slice of the tokens with all heads (1, n, H, D)."""
    length = sequence.slice
    padded = F.pad(tensor[0], (0, 0, 0, 0, 0, sequence.size * length - sequence.tokens))
    parts = padded.unflatten(0, (sequence.size, length))  # (ranks, n, H', D)
    received: Tensor = _AllToAll.apply(parts, sequence.group)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).flatten(1, 2)[None]


def gather(values: Tensor, whole: "Pack", sequence: Sequence) -> Tensor:
    """Values of the response tokens of this rank's slice (r, ...) -> of those of the whole pack (R, ...), in order."""
    counts = torch.bincount(whole.predicting // sequence.slice, minlength=sequence.size).tolist()
    assert counts[sequence.rank] == len(values), "the slice is that of the pack"
    gathered: Tensor = _Gather.apply(values, counts, sequence)  # type: ignore[no-untyped-call]
    return gathered


class _AllToAll(torch.autograd.Function):
    """Part r of the first dimension goes to rank r; so do gradients, the other way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()  # what comes in lies as it does, whatever the strides are
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Gather(torch.autograd.Function):
    """All ranks' values, end to end; a rank's gradient is that of its own values in its own loss, the whole one."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: list[int], sequence: Sequence) -> Tensor:
        ctx.begin, ctx.count = sum(counts[: sequence.rank]), counts[sequence.rank]
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=sequence.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.begin : ctx.begin + ctx.count], None, None
