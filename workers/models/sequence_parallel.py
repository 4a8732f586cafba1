"""Sequence and context parallelism: several ranks split the tokens of each pack.

Every rank of such a group receives the whole pack, and computes the token-wise layers for its own slice of the tokens.
Attention needs the keys and values of all tokens of a row. Two methods provide them, and can be combined:

- Sequence parallelism (Ulysses, arXiv:2309.14509): before attention, an all-to-all changes the split by tokens into a
  split by heads, in which each rank has all tokens for some of the heads. A second all-to-all after attention restores
  the split by tokens. The number of ranks is limited by the number of heads.
- Context parallelism (arXiv:2407.21783, section 3.3.2): each rank keeps the queries of its own tokens, and an
  all-gather collects the keys and values of all tokens. Any number of ranks is possible.

With both, the slices of neighbouring ranks form a chunk. The all-to-all within the ranks of a chunk gives each rank all
tokens of the chunk for some of the heads. The all-gather collects keys and values of these heads from all chunks.

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
from workers.models.collectives import exchanged

if TYPE_CHECKING:
    from workers.models.packed_forward import Pack


@dataclass(frozen=True)
class Ranks:
    """A group of ranks, and this rank's position in the group.

    Attributes:
        group: the process group, or None if this rank is the only one.
        size: number of ranks in the group.
        rank: index of this rank in the group.
    """

    group: Any = None
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Sequence:
    """The ranks that split the tokens of a pack.

    Attributes:
        all: all ranks that split the tokens of a pack.
        heads: the ranks of this rank's chunk, which exchange tokens for heads (sequence parallelism).
        chunks: the ranks with the same heads, one of each chunk, which gather keys and values (context parallelism).
        tokens: number of tokens in the current pack, without padding, or 0 if there is no current pack.
    """

    all: Ranks
    heads: Ranks
    chunks: Ranks
    tokens: int = 0

    @property
    def slice(self) -> int:
        """Return the number of tokens in a slice, which is the same on all ranks because the pack is padded."""
        return max(1, -(-self.tokens // self.all.size))

    @property
    def chunk(self) -> tuple[int, int]:
        """Return the positions in the pack of the first token of this rank's chunk, and of the token after its last.

        The last chunks can be empty, if the pack is short.
        """
        length = self.heads.size * self.slice
        begin = min(self.chunks.rank * length, self.tokens)
        return begin, min(begin + length, self.tokens)


@functools.cache
def sequence_group(sequence_ranks: int, context_ranks: int, tensor_ranks: int) -> Sequence | None:
    """Return the ranks that split the tokens of this rank's packs, or None if this rank computes all tokens.

    For each combination of arguments, all training ranks must make their first call of `sequence_group` together.

    Args:
        sequence_ranks: number of ranks that exchange tokens for heads.
        context_ranks: number of chunks of a pack. Each chunk is split by `sequence_ranks` ranks.
        tensor_ranks: number of neighbouring ranks that divide the matrices of a layer. They have the same tokens.
    """
    if sequence_ranks == context_ranks == 1:
        return None
    mesh = torch.arange(dist.get_world_size()).view(-1, context_ranks, sequence_ranks, tensor_ranks)
    every = _ranks(mesh.permute(0, 3, 1, 2).reshape(-1, context_ranks * sequence_ranks).tolist())
    if context_ranks == 1:
        return Sequence(every, heads=every, chunks=Ranks())
    if sequence_ranks == 1:
        return Sequence(every, heads=Ranks(), chunks=every)
    return Sequence(
        every,
        heads=_ranks(mesh.permute(0, 1, 3, 2).reshape(-1, sequence_ranks).tolist()),
        chunks=_ranks(mesh.permute(0, 2, 3, 1).reshape(-1, context_ranks).tolist()),
    )


def _ranks(groups: list[list[int]]) -> Ranks:
    """Create the process groups of the given ranks, and return the group that includes this rank."""
    own = next(group for group in groups if dist.get_rank() in group)
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return Ranks(group, len(own), own.index(dist.get_rank()))


def sequence_group_of(model: nn.Module) -> Sequence | None:
    """Return the process group whose ranks split the tokens of a pack, or None without sequence parallelism."""
    return getattr(model, "sequence", None)


def split(packed: "Pack", sequence: Sequence) -> tuple["Pack", Tensor]:
    """Return this rank's slice of a pack, and a mask of the response tokens that are predicted in the slice.

    The mask (R,) has one entry for each of the R response tokens of the whole pack. The returned slice has the layout
    of the tokens of this rank's chunk, because each rank computes the attention of these tokens, for some of the heads.
    """
    own = replace(sequence, tokens=packed.input_ids.size(1))
    begin, length = own.all.rank * own.slice, own.slice
    filler = (0, own.all.size * length - own.tokens)
    experts = packed.experts
    if experts is not None:
        experts = F.pad(experts, (0, 0, *filler), value=NOT_RECORDED)[begin : begin + length]
    here = (packed.predicting >= begin) & (packed.predicting < begin + length)
    sliced = replace(
        packed,
        input_ids=F.pad(packed.input_ids, filler)[:, begin : begin + length],
        position_ids=F.pad(packed.position_ids, filler)[:, begin : begin + length],
        experts=experts,
        layout=packed.layout if own.chunks.size == 1 else packed.layout.part(*own.chunk),
        predicting=packed.predicting[here] - begin,
        targets=packed.targets[here],
        sequence=own,
    )
    return sliced, here


def attention_inputs(query: Tensor, key: Tensor, value: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries of this rank's chunk, and the keys and values of all tokens, for this rank's heads.

    The shapes change from (1, H, n, D) with all H heads of a slice of n tokens, to (1, H', C, D) for the queries of the
    C tokens of a chunk, and to (1, K', N, D) for the keys and values of all N tokens. H' and K' are numbers of heads of
    a rank. If this rank's chunk is empty, there is one query, whose attention output must not be used.
    """
    begin, end = sequence.chunk
    queries, keys, values = (_heads_of_chunk(tensor, sequence.heads) for tensor in (query, key, value))
    queries = queries[:, :, : max(1, end - begin)]
    return queries, _of_all_chunks(keys, sequence), _of_all_chunks(values, sequence)


def _heads_of_chunk(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Change a split by tokens into a split by heads, in which each rank has all tokens of a chunk for some heads.

    An all-to-all changes the shape from (1, H, n, D), with all H heads of a slice of n tokens, to (1, H', n * ranks,
    D), with H' heads of the chunk's tokens, including padding. If there are fewer heads than ranks, each head is
    repeated before the all-to-all, so that each rank gets one head (H' = 1).
    """
    if ranks.size == 1:
        return tensor
    heads = tensor.size(1)
    if heads % ranks.size:
        tensor = tensor.repeat_interleave(ranks.size // heads, dim=1)
    parts = tensor[0].unflatten(0, (ranks.size, -1))  # the shape of `parts` is (ranks, H', n, D)
    received = exchanged(parts, ranks.group)  # part r of `received` came from rank r
    return received.transpose(0, 1).flatten(1, 2)[None]


def _of_all_chunks(tensor: Tensor, sequence: Sequence) -> Tensor:
    """Return the keys or values of all N tokens (1, K', N, D), gathered from the ranks of all chunks.

    `tensor` has the keys or values of the tokens of this rank's chunk, including padding.
    """
    if sequence.chunks.size > 1:
        gathered: Tensor = _GatherChunks.apply(tensor[0], sequence.chunks)  # type: ignore[no-untyped-call]
        tensor = gathered.transpose(0, 1).flatten(1, 2)[None]
    return tensor[:, :, : sequence.tokens]


def heads_of_rank(values: Tensor, sequence: Sequence) -> Tensor:
    """Return the values of this rank's heads (H',), given one value for each query head (H,)."""
    return values.chunk(sequence.heads.size)[sequence.heads.rank]


def tokens_of_all_heads(tensor: Tensor, sequence: Sequence) -> Tensor:
    """Change a split by heads (tokens of a chunk, some heads) into a split by tokens (tokens of a slice, all heads).

    An all-to-all within the ranks of a chunk changes the shape from (1, C, H', D), with H' heads of the C tokens of the
    chunk, to (1, n, H, D), with all H heads of a slice of n tokens.
    """
    ranks, length = sequence.heads, sequence.slice
    padded = F.pad(tensor[0], (0, 0, 0, 0, 0, ranks.size * length - tensor.size(1)))
    if ranks.size == 1:
        return padded[None]
    parts = padded.unflatten(0, (ranks.size, length))  # shape (ranks, n, H', D): one slice of n tokens for each rank
    received = exchanged(parts, ranks.group)
    return received.transpose(0, 1).flatten(1, 2)[None]


def gather(values: Tensor, whole: "Pack", sequence: Sequence) -> Tensor:
    """Gather the values of response tokens from the slices of all ranks.

    Args:
        values: (r, ...) values of the r response tokens that are predicted in this rank's slice of the pack.
        whole: the pack before it was split over the ranks.
        sequence: the ranks that split the pack. `sequence.tokens` is the number of tokens in the pack.

    Returns:
        (R, ...) values of all R response tokens of the whole pack, in order.
    """
    owners = whole.predicting // sequence.slice
    counts = torch.bincount(owners, minlength=sequence.all.size).tolist()
    assert counts[sequence.all.rank] == len(values), "`values` must have one value for each response token in the slice"
    gathered: Tensor = _Gather.apply(values, counts, sequence.all)  # type: ignore[no-untyped-call]
    # The values arrive slice by slice. If contexts share tokens, neighbouring response tokens can be predicted in
    # different slices, so the values are put back in the order of the response tokens.
    return gathered[owners.argsort(stable=True).argsort()]


def of_all_tokens(values: Tensor, whole: "Pack", sequence: Sequence | None) -> Tensor:
    """Gather integer values of tokens from the slices of all ranks.

    Args:
        values: (n, ...) values of the tokens of this rank's slice of the pack, in any integer dtype.
        whole: the pack before it was split over the ranks.
        sequence: the ranks that split the pack; None if this rank has the whole pack.

    Returns:
        (N, ...) values of all N tokens of the pack, in the dtype of `values`.
    """
    if sequence is None:
        return values
    own = values.int()  # The gloo backend does not support int16.
    parts = [torch.empty_like(own) for _ in range(sequence.all.size)]
    dist.all_gather(parts, own, group=sequence.all.group)
    return torch.cat(parts)[: whole.input_ids.size(1)].to(values.dtype)


class _GatherChunks(torch.autograd.Function):
    """All-gather of the keys or values (K', L, D) of each chunk, with the shape (chunks, K', L, D).

    The queries of every chunk read the gathered keys and values, so the backward pass adds the gradients of all ranks:
    each rank gets the sum for its own chunk.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, values = ranks, values.contiguous()
        gathered: Tensor = values.new_empty(ranks.size * len(values), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, values, group=ranks.group)
        return gathered.view(ranks.size, *values.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = torch.empty_like(gradients[0][0])
        dist.reduce_scatter_tensor(own, gradients[0].contiguous().flatten(0, 1), group=ctx.ranks.group)
        return own, None


class _Gather(torch.autograd.Function):
    """All-gather that concatenates the values of all ranks that split a pack.

    The backward pass returns the gradient of this rank's loss with respect to this rank's own values. The backward pass
    needs no communication, because every rank computes the full loss.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: list[int], ranks: Ranks) -> Tensor:
        ctx.begin, ctx.count = sum(counts[: ranks.rank]), counts[ranks.rank]
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=ranks.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.begin : ctx.begin + ctx.count], None, None
