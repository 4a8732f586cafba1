"""Sequence parallelism: the ranks of a sequence group split the tokens of each pack (Ulysses, arXiv:2309.14509).

Every rank of a sequence group receives the whole pack, and computes the token-wise layers for its own slice of the
tokens. Attention needs all tokens of a row. Before attention, an all-to-all changes the split by tokens into a split by
heads, in which each rank has all tokens for some of the heads. A second all-to-all after attention restores the split
by tokens.

The model's outputs for the response tokens are gathered, so that every rank of the group computes the same loss. The
backward pass of each rank covers only that rank's slice of the tokens. The sum of the gradients over the ranks of the
group is the full gradient, because each token is in the backward pass of exactly one rank.
"""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rltrain.batch.token_arrays import NOT_RECORDED

if TYPE_CHECKING:
    from workers.models.packed_forward import Pack


@dataclass(frozen=True)
class Sequence:
    """A group of ranks that split the tokens of a pack, and this rank's position in the group.

    Attributes:
        group: the process group of the ranks that split the tokens of a pack.
        size: number of ranks that split the tokens of a pack.
        rank: index of this process among the ranks that split the tokens of a pack.
        tokens: number of tokens in the current pack, without padding, or 0 if there is no current pack.
    """

    group: Any
    size: int
    rank: int
    tokens: int = 0

    @property
    def slice(self) -> int:
        """Return the number of tokens in a slice, which is the same on all ranks because the pack is padded."""
        return max(1, -(-self.tokens // self.size))


@functools.cache
def sequence_group(size: int) -> Sequence | None:
    """Return the group of `size` neighbouring ranks that includes this rank, or None if `size` is 1.

    For each value of `size`, all training ranks must make their first call of `sequence_group` together.
    """
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size)
    return Sequence(group, size, dist.get_rank() % size)


def sequence_group_of(model: nn.Module) -> Sequence | None:
    """Return the process group whose ranks split the tokens of a pack, or None without sequence parallelism."""
    return getattr(model, "sequence", None)


def split(packed: "Pack", sequence: Sequence) -> tuple["Pack", Tensor]:
    """Return this rank's slice of a pack, and a mask of the response tokens that are predicted in the slice.

    The mask (R,) has one entry for each of the R response tokens of the whole pack. The returned slice keeps the
    layout of the whole pack, because each rank computes the attention of all tokens, for some of the heads.
    """
    own = replace(sequence, tokens=packed.input_ids.size(1))
    begin, length = own.rank * own.slice, own.slice
    filler = (0, own.size * length - own.tokens)
    experts = packed.experts
    if experts is not None:
        experts = F.pad(experts, (0, 0, *filler), value=NOT_RECORDED)[begin : begin + length]
    here = (packed.predicting >= begin) & (packed.predicting < begin + length)
    sliced = replace(
        packed,
        input_ids=F.pad(packed.input_ids, filler)[:, begin : begin + length],
        position_ids=F.pad(packed.position_ids, filler)[:, begin : begin + length],
        experts=experts,
        predicting=packed.predicting[here] - begin,
        targets=packed.targets[here],
        sequence=own,
    )
    return sliced, here


def heads_of_all_tokens(tensor: Tensor, sequence: Sequence) -> Tensor:
    """Change a split by tokens (each rank has some tokens, all heads) into a split by heads (all tokens, some heads).

    An all-to-all within the sequence group changes the shape from (1, H, n, D), with all H heads of a slice of n
    tokens, to (1, H', N, D), with H' heads of all N tokens. If there are fewer heads than ranks, each head is repeated
    before the all-to-all, so that each rank gets one head (H' = 1).
    """
    heads = tensor.size(1)
    if heads % sequence.size:
        tensor = tensor.repeat_interleave(sequence.size // heads, dim=1)
    parts = tensor[0].unflatten(0, (sequence.size, -1))  # the shape of `parts` is (ranks, H', n, D)
    received: Tensor = _AllToAll.apply(parts, sequence.group)  # type: ignore[no-untyped-call]  # part r of `received` came from rank r
    return received.transpose(0, 1).flatten(1, 2)[None, :, : sequence.tokens]


def heads_of_rank(values: Tensor, sequence: Sequence) -> Tensor:
    """Return the values of this rank's heads (H / ranks,), given one value for each query head (H,)."""
    return values.chunk(sequence.size)[sequence.rank]


def tokens_of_all_heads(tensor: Tensor, sequence: Sequence) -> Tensor:
    """Change a split by heads (each rank has all tokens, some heads) into a split by tokens (some tokens, all heads).

    An all-to-all within the sequence group changes the shape from (1, N, H', D), with H' heads of all N tokens, to
    (1, n, H, D), with all H heads of a slice of n tokens.
    """
    length = sequence.slice
    padded = F.pad(tensor[0], (0, 0, 0, 0, 0, sequence.size * length - sequence.tokens))
    parts = padded.unflatten(0, (sequence.size, length))  # shape (ranks, n, H', D): one slice of n tokens for each rank
    received: Tensor = _AllToAll.apply(parts, sequence.group)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).flatten(1, 2)[None]


def gather(values: Tensor, whole: "Pack", sequence: Sequence) -> Tensor:
    """Gather the values of response tokens from the slices of all ranks.

    Args:
        values: (r, ...) values of the r response tokens that are predicted in this rank's slice of the pack.
        whole: the pack before it was split over the ranks.
        sequence: the group of ranks that split the pack. `sequence.tokens` is the number of tokens in the pack.

    Returns:
        (R, ...) values of all R response tokens of the whole pack, in order.
    """
    owners = whole.predicting // sequence.slice
    counts = torch.bincount(owners, minlength=sequence.size).tolist()
    assert counts[sequence.rank] == len(values), "`values` must have one value for each response token in the slice"
    gathered: Tensor = _Gather.apply(values, counts, sequence)  # type: ignore[no-untyped-call]
    # The values arrive slice by slice. If contexts share tokens, neighbouring response tokens can be predicted in
    # different slices, so the values are put back in the order of the response tokens.
    return gathered[owners.argsort(stable=True).argsort()]


def of_all_tokens(values: Tensor, whole: "Pack", sequence: Sequence | None) -> Tensor:
    """Gather integer values of tokens from the slices of all ranks.

    Args:
        values: (n, ...) values of the tokens of this rank's slice of the pack, in any integer dtype.
        whole: the pack before it was split over the ranks.
        sequence: the group of ranks that split the pack; None if this rank has the whole pack.

    Returns:
        (N, ...) values of all N tokens of the pack, in the dtype of `values`.
    """
    if sequence is None:
        return values
    own = values.int()  # The gloo backend does not support int16.
    parts = [torch.empty_like(own) for _ in range(sequence.size)]
    dist.all_gather(parts, own, group=sequence.group)
    return torch.cat(parts)[: whole.input_ids.size(1)].to(values.dtype)


class _AllToAll(torch.autograd.Function):
    """All-to-all that sends part r of the first dimension to rank r, and sends gradients in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()  # all_to_all_single requires contiguous memory
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Gather(torch.autograd.Function):
    """All-gather that concatenates the values of all ranks of a sequence group.

    The backward pass returns the gradient of this rank's loss with respect to this rank's own values. The backward pass
    needs no communication, because every rank computes the full loss.
    """

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
