"""Packed forward passes: log-probs, entropies and values of response tokens, without padding in any linear layer.

A pack concatenates rows into one sequence of N tokens. A row of the batch consists of one or more contexts, and a token
sees only the earlier tokens of its own context. Almost all rows have one context, but an agent program can start new
contexts within a row.

An attention function for packs is registered in transformers under the name `PACKED`. On GPUs and with 16-bit dtypes,
one call of an attention kernel computes the attention of all contexts. If no attention kernel is usable, contexts of
similar length form an attention batch, which is padded on the right. One causal sdpa call computes the attention of an
attention batch. Attention masks are never built, and a context cannot attend to another context. All layers other than
attention process the N tokens without padding.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rltrain.algorithms import full_kl
from rltrain.algorithms.ratio import as_float
from rltrain.base import trace
from rltrain.batch.data_proto import COLUMNS, DataProto, offsets_of, positions
from workers.cluster.progress import tick
from workers.models.fsdp import device, forward_only
from workers.models.fused_head import PROBE, check_probe, logit_scale, replaced_head, token_log_probs
from workers.models.sequence_parallel import (
    Sequence,
    gather,
    heads_of_all_tokens,
    sequence_group_of,
    split,
    tokens_of_all_heads,
)
from workers.models.varlen_attention import kernel_for

PACKED = "rltrain_packed"
# Names of the batch columns that `microbatch` does not pad, because all code reads these columns without padding.
PACKED_COLUMNS = ("responses", "context_starts", "ref_hidden", "teacher_hidden")
# Minimum ratio of the shortest to the longest context length in an attention batch.
SLACK = 0.75


@dataclass(frozen=True)
class AttentionBatch:
    """Contexts whose attention is computed in one sdpa call.

    Attributes:
        index: (contexts, L) position of each token in the pack, where L is the length of the longest context in the
            attention batch.
        real: (contexts, L) bool, False for entries of `index` that are padding.
    """

    index: Tensor
    real: Tensor


class ContextLayout:
    """The context lengths of a pack, and the attention batches into which the contexts are grouped by length.

    `ContextLayout` is not a dataclass, because FSDP would copy a dataclass for each layer.

    Args:
        lengths: (contexts,) number of tokens in each context, on the CPU.
        device: device on which attention is computed.
    """

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        self.lengths, self.device = lengths, device

    @functools.cached_property
    def attention_batches(self) -> tuple[AttentionBatch, ...]:
        """Return the attention batches: groups of contexts of similar length, with one sdpa call for each group.

        The attention batches are computed on first access, because they are needed only if no attention kernel is
        usable.
        """
        return _attention_batches(self.lengths, self.device)


@dataclass(frozen=True)
class Pack:
    """Rows that are concatenated into one sequence.

    Attributes:
        input_ids: (1, N) prompt and response ids. Each row's last response token is left out, because the model
            predicts no token after the last response token.
        position_ids: (1, N) positions, which restart at 0 in each context.
        contexts: context lengths, and groups of contexts of similar length (attention batches).
        longest: number of tokens in the longest context.
        offsets: (contexts + 1,) int32, the start positions of all contexts, followed by the end of the last context.
        predicting: (R,) position in the pack at which each of the R response tokens is predicted.
        targets: (R,) ids of the response tokens.
        sequence: the group of ranks that split the pack's tokens (sequence parallelism), or None. With sequence
            parallelism, all attributes except `contexts`, `longest`, `offsets` and `sequence` hold only this rank's
            slice of the pack.
    """

    input_ids: Tensor
    position_ids: Tensor
    contexts: ContextLayout
    longest: int
    offsets: Tensor
    predicting: Tensor
    targets: Tensor
    sequence: Sequence | None = None


def pack(batch: DataProto) -> Pack:
    """Concatenate all rows of a batch into one sequence, and return the sequence as a `Pack`.

    The first context of a row begins with the row's prompt. The column `context_starts` marks the first token of the
    second and of each further context of a row; a batch without the column `context_starts` has exactly one context per
    row. The policy did not sample the first token of a row's second or further context, so log-probs, entropies and
    values of this token are meaningless and must not be used.

    If a row has no response tokens, the pack contains the row's prompt tokens, but no token is predicted for the row.
    """
    prompt_lengths, response_lengths = batch.lengths("prompts"), batch.lengths("responses")
    lengths = prompt_lengths + response_lengths.clamp(min=1) - 1
    starts = offsets_of(lengths)
    ids = torch.empty(int(lengths.sum()), dtype=torch.int64)
    ids[starts[:-1].repeat_interleave(prompt_lengths) + positions(prompt_lengths)] = batch.values("prompts")
    at = (starts[:-1] + prompt_lengths).repeat_interleave(response_lengths) + positions(response_lengths)
    is_input = positions(response_lengths) < (response_lengths - 1).repeat_interleave(response_lengths)
    ids[at[is_input]] = batch.values("responses")[is_input]
    if "context_starts" in batch:
        begins = at[is_input & batch.values("context_starts")]
        starts = torch.cat([starts, begins]).sort().values
        lengths = starts.diff()
    return Pack(
        ids[None],
        positions(lengths)[None],
        ContextLayout(lengths, ids.device),
        int(lengths.max()),
        starts.int(),
        at - 1,
        batch.values("responses"),
    )


def _attention_batches(lengths: Tensor, device: torch.device) -> tuple[AttentionBatch, ...]:
    starts = offsets_of(lengths)[:-1]
    order = lengths.argsort(descending=True, stable=True)
    batches, begin = [], 0
    while begin < len(order):
        longest = int(lengths[order[begin]])
        count = int((lengths[order[begin:]] >= SLACK * longest).sum())
        chosen = order[begin : begin + count]
        steps = torch.arange(longest)
        real = steps < lengths[chosen][:, None]
        batches.append(
            AttentionBatch(torch.where(real, starts[chosen][:, None] + steps, 0).to(device), real.to(device))
        )
        begin += count
    return tuple(batches)


def to_device(packed: Pack, device: torch.device) -> Pack:
    """Return the pack with its tensors on `device`."""
    if device.type == "cpu":
        return packed
    return Pack(
        packed.input_ids.to(device),
        packed.position_ids.to(device),
        ContextLayout(packed.contexts.lengths, device),
        packed.longest,
        packed.offsets.to(device),
        packed.predicting.to(device),
        packed.targets.to(device),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Pack,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # arguments that transformers passes to every attention function, but packed attention does not use
) -> tuple[Tensor, None]:
    """Compute causal attention within each context of a pack.

    The shape of `query` is (1, H, N, D), with H heads of width D for N tokens. The shape of `key` and `value` is
    (1, K, N, D), where the number K of key heads divides the number H of query heads. The shape of the attention
    output is (1, N, H, D).

    Raises:
        ValueError: the model uses soft caps, attention sinks, or a window shorter than the longest context, none
            of which is supported.
    """
    assert attention_mask is None, "a packed forward pass must not be given an attention mask"
    if softcap is not None or s_aux is not None or (sliding_window is not None and sliding_window < packed.longest):
        raise ValueError(
            "this model's attention uses a soft cap, sinks, or a window shorter than the longest context of the batch, "
            "which are not supported; use another model"
        )
    if packed.sequence is not None:
        query, key, value = (heads_of_all_tokens(tensor, packed.sequence) for tensor in (query, key, value))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # q, k and v have the shape (N, heads, D)
    kernel = None if dropout else kernel_for(q, v)
    if kernel is not None:
        out = kernel(q, k, v, packed.offsets, packed.longest, scaling)
    else:
        out = _in_attention_batches(q, k, v, packed, scaling=scaling, dropout=dropout)
    return out[None] if packed.sequence is None else tokens_of_all_heads(out[None], packed.sequence), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile would recompile for every number of batches
def _in_attention_batches(
    q: Tensor, k: Tensor, v: Tensor, packed: Pack, *, scaling: float | None, dropout: float
) -> Tensor:
    """Compute attention (N, H, D) with one sdpa call for each attention batch."""
    tokens, heads = q.shape[:2]
    out = q.new_zeros(tokens, heads, v.size(-1))
    for batch in packed.contexts.attention_batches:
        rows, length = batch.index.shape
        flat = batch.index.reshape(-1)
        own, keys, values = (
            t.index_select(0, flat).view(rows, length, t.size(1), -1).transpose(1, 2) for t in (q, k, v)
        )
        # On CUDA, sdpa in float32 would materialize all attention scores if query heads shared key heads, so the key
        # heads are repeated.
        if q.is_cuda and k.size(1) != heads:
            keys, values = (t.repeat_interleave(heads // t.size(1), dim=1) for t in (keys, values))
        attended = F.scaled_dot_product_attention(
            own, keys, values, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=keys.size(1) != heads
        )
        attended = attended.transpose(1, 2).reshape(rows * length, heads, -1)
        if len(packed.contexts.attention_batches) == 1 and bool(batch.real.all()):
            out = attended.index_select(0, _inverse(flat))
        else:
            real = batch.real.reshape(-1)
            out = out.index_copy(0, flat[real], attended[real])
    return out


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class TeacherStates:
    """Outputs of the teachers, from which the exact KL is computed for the R response tokens of a pack.

    Attributes:
        numbers: (R,) int64, on the CPU: index of each token's teacher; -1 for a token without a teacher.
        hidden: (R, H') last hidden state of the teacher at each token. H' is the largest hidden size of all teachers.
        heads: output head (V, H_k) of each teacher, where H_k is the hidden size of teacher k. The logits of teacher k
            are computed from the first H_k of the H' entries of a hidden state.
    """

    numbers: Tensor
    hidden: Tensor
    heads: list[Tensor]

    def at(self, tokens: Tensor) -> "TeacherStates":
        """Return the teachers' outputs for the response tokens that a bool mask (R,) selects."""
        return TeacherStates(self.numbers[tokens.cpu()], self.hidden[tokens], self.heads)

    def kl(self, states: Tensor, head: Tensor, **knobs: Any) -> Tensor:
        """Return the exact KL(policy || teacher) at each token (R,), which is 0 at a token without a teacher.

        Args:
            states: (R, H) last hidden states of the policy.
            head: (V, H) output head of the policy.
            knobs: keyword arguments that are passed on to `full_kl`.
        """
        kl = torch.zeros(len(states), dtype=as_float(states).dtype, device=states.device)
        for number, own in enumerate(self.heads):
            here = (self.numbers == number).nonzero()[:, 0].to(states.device)
            if len(here):
                found = full_kl(states[here], head, self.hidden[here, : own.size(1)], own, **knobs)
                kl = kl.index_copy(0, here, found)
        return kl


@dataclass(frozen=True)
class PolicyOutput:
    """Outputs of a policy for the R response tokens of a pack, in float32, or float64 if the model is in float64.

    Attributes:
        log_probs: (R,) log-prob of each token under the policy's distribution softmax(logits / temperature), in nats.
        entropies: (R,) entropy of the policy's distribution, or None if not requested.
        full_kl: (R,) exact KL(policy || reference) over the vocabulary at each token, or None if not requested.
        teacher_kl: (R,) exact KL(policy || teacher) over the vocabulary at each token, or None if not requested.
        hidden: (R, H) hidden states from which the last layer predicts the response tokens, or None if not requested.
    """

    log_probs: Tensor
    entropies: Tensor | None
    full_kl: Tensor | None
    teacher_kl: Tensor | None
    hidden: Tensor | None


def policy_output(
    model: PreTrainedModel,
    packed: Pack,
    *,
    temperature: float,
    entropies: bool = False,
    hidden: bool = False,
    reference: tuple[Tensor, Tensor] | None = None,
    teachers: TeacherStates | None = None,
) -> PolicyOutput:
    """Run one forward pass of a causal language model over a pack.

    Entropies, hidden states and the exact KL cost extra time and are computed only on request. A function that computes
    logits in chunks replaces the model's last layer, so that the full logits are never in memory.

    Args:
        model: the language model, possibly sharded.
        packed: the pack (packed forward-pass input), with the tokens of all ranks of the sequence-parallel group.
        temperature: sampling temperature, by which the logits are divided.
        entropies: whether to compute the entropy of the policy's distribution at each response token.
        hidden: whether to return the last hidden states.
        reference: last hidden states (R, H') and head (V, H') of the reference model for the exact KL, or None.
        teachers: outputs of the teachers for the exact KL(policy || teacher), or None.
    """
    whole, sequence = packed, sequence_group_of(model)
    if sequence is not None:
        packed, here = split(whole, sequence)
        reference = None if reference is None else (reference[0][here], reference[1])
        teachers = None if teachers is None else teachers.at(here)
    scale, states = logit_scale(model), list[Tensor]()
    knobs: dict[str, Any] = {"temperature": temperature / scale}

    def columns(of_all: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        states.append(of_all[0])
        found = token_log_probs(states[0], weight, packed.targets, bias=bias, entropies=entropies, **knobs)
        kl = None if reference is None else full_kl(states[0], weight, *reference, **knobs)
        teacher_kl = None if teachers is None else teachers.kl(states[0], weight, **knobs)
        probe = torch.full_like(found[0], PROBE)
        return torch.stack([column / scale for column in (*found, kl, teacher_kl, probe) if column is not None])

    with replaced_head(model, columns):
        out = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=packed.predicting,
            packed=packed,
        ).logits
    log_probs, *others, probe = out.unbind()
    check_probe(probe, model)
    kept = states[0] if hidden else None
    if packed.sequence is not None:
        log_probs, *others = (gather(column, whole, packed.sequence) for column in (log_probs, *others))
        kept = None if kept is None else gather(kept, whole, packed.sequence)
    rest = iter(others)
    return PolicyOutput(
        log_probs,
        entropies=next(rest) if entropies else None,
        full_kl=None if reference is None else next(rest),
        teacher_kl=None if teachers is None else next(rest),
        hidden=kept,
    )


def response_values(model: PreTrainedModel, packed: Pack) -> Tensor:
    """Return the critic's value (R,), in float32, of the state before each response token."""
    whole, sequence = packed, sequence_group_of(model)
    if sequence is not None:
        packed, _ = split(whole, sequence)
    logits = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=None,
        use_cache=False,
        packed=packed,
    ).logits[0]
    values = logits[packed.predicting, 0].float()
    return values if packed.sequence is None else gather(values, whole, packed.sequence)


def unpack(values: Tensor, mask: Tensor) -> Tensor:
    """Copy one value per response token from `values` (R,) into a padded tensor (B, T) with one row per response.

    `mask` (B, T) is True at response tokens. The padded tensor is 0 where `mask` is False. Gradients flow from the
    padded tensor to `values`.
    """
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def stand_in(batch: DataProto) -> list[int]:
    """Return a micro-batch for a rank that has no rows of its own: the index of the batch's shortest row, in a list."""
    return [int((batch.lengths("prompts") + batch.lengths("responses")).argmin())]


def microbatch(batch: DataProto, rows: list[int]) -> tuple[DataProto, Pack, dict[str, Tensor]]:
    """Return the rows of the batch with the indices `rows`, and the rows' packed model input and response columns.

    Each response column is padded to the shape (B, T). `microbatch` moves the packed input and the padded columns to
    this rank's device. The padded response columns include `mask`, which is True at response tokens, and
    `response_mask`, which is True at trained tokens.

    If `rows` is empty, the micro-batch is the shortest row of the batch, and no token of the row counts as trained. A
    rank to which no rows are assigned still runs the batch's shortest row, so that the rank takes part in the
    collectives and adds exactly zero to the gradient.
    """
    tick()
    part = batch[rows or stand_in(batch)]
    mask = part.padding_mask("responses")
    names = [
        name
        for name in part.keys()  # noqa: SIM118 (iterating a batch gives its rows)
        if COLUMNS.get(name, ("",))[0] == "response" and name not in PACKED_COLUMNS
    ]
    columns = {name: part.padded(name).to(device()) for name in names} | {"mask": mask.to(device())}
    if not rows:
        columns["response_mask"] = torch.zeros_like(columns["mask"])
    return part, to_device(pack(part), device()), columns


def row_pass(
    model: PreTrainedModel,
    function: Callable[[DataProto, Pack], dict[str, Tensor]],
    batch: DataProto,
    microbatches: list[list[int]],
) -> DataProto:
    """Run a function on each micro-batch without gradients, and collect the columns that the function returns.

    Args:
        model: the model that `function` uses.
        function: function that is called with the rows of a micro-batch and the pack (packed forward-pass input) of
            these rows. `function` must return columns (R, ...) with one value for each of the R response tokens in the
            pack.
        batch: the batch whose rows are split into micro-batches.
        microbatches: row indices of each forward pass. If a list of row indices is empty, the shortest row of the batch
            is processed, and the results are dropped.

    Returns:
        A batch with the columns that `function` returned, and with rows in the order of `microbatches`.
    """
    parts, names = [], set[str]()
    with forward_only(model):
        for rows in microbatches:
            tick()
            part = batch[rows or stand_in(batch)]
            with trace.span("micro-batch", trace.CALLS, rows=len(rows)):
                found = function(part, to_device(pack(part), device()))
                columns = {name: values.cpu() for name, values in found.items()}
            kept = columns if rows else {name: values[:0] for name, values in columns.items()}
            parts.append(batch[rows].select(["responses"]).with_values("responses", **kept))
            names.update(columns)
    return DataProto.concat(parts).select(sorted(names))
